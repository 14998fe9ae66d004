"""A throw-away etcd of our own: one member on loopback, gone with its owner.

Owns the child process, its free ports and its temporary folder. Used by `wavepp up` when no endpoint
is given, and by tests. Which program is started is `etcd_binary.py`'s choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import Final

from wavepp_proto.errors import MembershipUnavailable
from wavepp_proto.runtime.backoff import Backoff
from wavepp_proto.runtime.channels import PLAIN_SERVER, ServerSecurity
from wavepp_proto.runtime.child import child_argv
from wavepp_proto.runtime.etcd_binary import EtcdBinary, find_etcd
from wavepp_proto.runtime.etcd_client import EtcdOptions
from wavepp_proto.runtime.etcd_store import EtcdStore
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.runtime.scratch_folder import ScratchFolder
from wavepp_proto.runtime.store import STORE_TROUBLE

_TRIES: Final = 3
"""Between choosing a free port and etcd's binding it, another process may take it."""
_STOP_S: Final = 5.0
_LOG_TAIL: Final = 600

_log = get_log(__name__)


class EtcdServer:
    """A running etcd. Make it with `start`; `close` it, or end the process: both end etcd."""

    def __init__(
        self, binary: EtcdBinary, folder: ScratchFolder, process: asyncio.subprocess.Process, options: EtcdOptions
    ) -> None:
        self.binary = binary
        self.options = options
        """How to reach it as a client."""
        self._folder = folder
        self._process = process

    @property
    def endpoint(self) -> str:
        """host:port of the client service."""
        return self.options.endpoints[0]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def folder(self) -> Path:
        return self._folder.path

    @classmethod
    async def start(
        cls,
        binary: EtcdBinary | None = None,
        deadline_s: float = 30.0,
        security: ServerSecurity = PLAIN_SERVER,
        base: Path | None = None,
        client_port: int | None = None,
    ) -> EtcdServer:
        """Start and wait until it answers a put. Call it from the thread that shall own the child.

        `client_port` asks for one port instead of any free one; `base` is where its folder is made.
        `security` with `ca` demands client certificates; its own then serves as this side's client
        certificate. Raises MembershipUnavailable with the end of etcd's log when it does not come up.
        """
        if binary is None:
            binary = await asyncio.to_thread(find_etcd)
        for _ in range(_TRIES):
            server = await cls._spawn(binary, security, base, client_port)
            try:
                async with asyncio.timeout(deadline_s):
                    ended = await server._until_ready()
            except TimeoutError:
                ended = f"no answer within {deadline_s} s, log: {server._log_tail()}"
                await server.close()
                break
            except BaseException:
                await server.close()
                raise
            if ended is None:
                _log.info("etcd started", version=binary.version, source=binary.source, endpoint=server.endpoint)
                return server
            await server.close()
        raise MembershipUnavailable(
            f"etcd {binary.version} ({binary.path}) did not start: {ended}", field="etcd_binary"
        )

    async def close(self) -> None:
        """Stop etcd and remove its folder. Idempotent."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._folder.close()

    @classmethod
    async def _spawn(
        cls, binary: EtcdBinary, security: ServerSecurity, base: Path | None, client_port: int | None
    ) -> EtcdServer:
        folder = ScratchFolder("wavepp-etcd", base)
        try:
            return await cls._spawn_in(folder, binary, security, client_port)
        except BaseException:
            folder.close()
            raise

    @classmethod
    async def _spawn_in(
        cls, folder: ScratchFolder, binary: EtcdBinary, security: ServerSecurity, client_port: int | None
    ) -> EtcdServer:
        free_port, peer_port = _free_ports(2)
        client_port = client_port or free_port
        arguments = _arguments(folder.path, client_port, peer_port, security)
        with (folder.path / "etcd.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *child_argv([str(binary.path), *arguments]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in a terminal goes to the owner, which stops etcd last.
                start_new_session=True,
                env=_environment(),
            )
        mutual = security.ca is not None
        options = EtcdOptions(
            endpoints=(f"127.0.0.1:{client_port}",),
            ca=security.ca or security.cert,
            cert=security.cert if mutual else None,
            key=security.key if mutual else None,
        )
        return cls(binary, folder, process, options)

    async def _until_ready(self) -> str | None:
        """None once a put was answered; the end of the log if the process ended first."""
        store = EtcdStore(self.options)
        backoff = Backoff(first_s=0.05, most_s=0.5)
        try:
            while self._process.returncode is None:
                try:
                    await store.put("/wavepp-ready", b"")
                    return None
                except STORE_TROUBLE:
                    await asyncio.sleep(backoff.next_s())
            return f"it ended with status {self._process.returncode}, log: {self._log_tail()}"
        finally:
            await store.close()

    def _log_tail(self) -> str:
        return (self.folder / "etcd.log").read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:].strip()


def _arguments(folder: Path, client_port: int, peer_port: int, security: ServerSecurity) -> list[str]:
    client = f"{'https' if security.cert else 'http'}://127.0.0.1:{client_port}"
    peer = f"http://127.0.0.1:{peer_port}"
    arguments = ["--name=wavepp", f"--data-dir={folder / 'data'}", "--logger=zap", "--log-level=warn"]
    arguments += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    arguments += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
    arguments += [f"--initial-cluster=wavepp={peer}"]
    if security.cert:
        arguments += [f"--cert-file={security.cert}", f"--key-file={security.key}"]
    if security.ca:
        arguments += [f"--trusted-ca-file={security.ca}", "--client-cert-auth"]
    return arguments


def _environment() -> dict[str, str]:
    """Ours without etcd's own settings, except the switch that unusual processors need."""
    kept = "ETCD_UNSUPPORTED_ARCH"
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_") or name == kept}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [taken.getsockname()[1] for taken in sockets]
