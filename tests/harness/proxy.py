"""A TCP proxy that does to a connection what networks do: cut it, hold its bytes back, delay them.

Owns the connections between whoever dials `address` and the one `target`. What it drops, it drops with a
reset; what it holds, it delivers later, as TCP does after a partition. It never refuses a connection: a
refusal says that no process is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from types import TracebackType
from typing import Self

CHUNK = 1 << 16
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes close a reset."""


class Proxy:
    """`async with Proxy(target) as proxy`; dial `proxy.address`."""

    def __init__(self, target: str) -> None:
        self.target = target
        """host:port; may change, for later connections."""
        self.address = ""
        self.accepted = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._swallowed: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._down = False
        self._delay_s = 0.0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    # --- what the network does --------------------------------------------------------------------

    def cut(self) -> None:
        """Reset every connection; new ones come through."""
        for writer in list(self._writers):
            _reset(writer)

    def go_down(self) -> None:
        """Reset every connection, and every later one as soon as it is made, until `heal`."""
        self._down = True
        self.cut()

    def hold(self) -> None:
        """Deliver nothing until `heal`; connections stay."""
        self._flows.clear()

    def swallow(self) -> None:
        """Deliver nothing more on the connections there are; later ones come through: they are half-open."""
        self._swallowed |= self._pumps

    def delay(self, seconds: float) -> None:
        """Deliver every piece this much later."""
        self._delay_s = seconds

    def heal(self) -> None:
        self._down, self._delay_s = False, 0.0
        self._flows.set()

    # --- connections ------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._down:
            _reset(writer)
            return
        host, _, port = (await self._target_of(reader, writer)).rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            _reset(writer)
            return
        self._writers |= {writer, far_writer}
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink), name="proxy-pump")
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _target_of(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        return self.target

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(CHUNK):
                    if self._delay_s:
                        await asyncio.sleep(self._delay_s)
                    await self._flows.wait()
                    if asyncio.current_task() in self._swallowed:
                        continue
                    sink.write(data)
                    await sink.drain()
        finally:
            self._writers.discard(sink)
            sink.close()


class ConnectProxy(Proxy):
    """An HTTP proxy: each connection names its target (CONNECT host:port)."""

    def __init__(self) -> None:
        super().__init__("")
        self.asked: list[str] = []
        """Targets, in order."""

    async def _target_of(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        method, target, _ = (await reader.readuntil(b"\r\n\r\n")).decode().split(" ", 2)
        assert method == "CONNECT"
        self.asked.append(target)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        return target


def _reset(writer: asyncio.StreamWriter) -> None:
    held = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it is closed already
        held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
