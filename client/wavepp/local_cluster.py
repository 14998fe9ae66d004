"""A whole cluster on this machine: etcd, a controller and every stage daemon, each a process of its own.

Owns the child processes from start to end: they die with this process, whatever ends it. Used by
`wavepp up`, the demo and the fault tests. It knows the other packages only as `python -m` names;
what they do it learns from etcd and the Admin service, like any operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import grpc.aio

from wavepp._child import Child
from wavepp._paths import make_writable
from wavepp.local_plan import LocalPlan
from wavepp_proto import convert
from wavepp_proto.errors import PipelineUnavailable, WaveppError
from wavepp_proto.runtime.channels import ClientSecurity, open_channel
from wavepp_proto.runtime.child import child_argv, module_argv
from wavepp_proto.runtime.closers import Closers
from wavepp_proto.runtime.election import find_leader
from wavepp_proto.runtime.etcd_client import EtcdOptions
from wavepp_proto.runtime.etcd_server import EtcdServer
from wavepp_proto.runtime.etcd_store import EtcdStore
from wavepp_proto.terms import DaemonKey
from wavepp_proto.v1 import admin_pb2, admin_pb2_grpc

__all__ = ["Child", "LocalCluster", "LocalPlan"]

CONTROLLERS_OWN = (
    "headroom_blocks", "share_tokens", "policy", "mode", "min_wave_tokens", "fills", "short_share", "model_file",
    "hang_ms", "first_wave_ms",
)  # fmt: skip
"""Of the plan: what the controller knows by itself unless it is given."""
POLL_S = 0.1
STOP_S = 15.0


class LocalCluster:
    """`start`, use `address`, `close`. Not thread-safe; children belong to the thread that started them."""

    def __init__(self, plan: LocalPlan, log_dir: Path, security: ClientSecurity | None = None) -> None:
        """Raises InvalidRequest if the operator allows fewer GPUs than the plan needs."""
        self.plan = plan
        self.log_dir = log_dir
        self.security = security or ClientSecurity()
        self.address = ""
        self.etcd: EtcdServer | None = None
        self.children: dict[str, Child] = {}
        self._closers = Closers()
        self._channel: grpc.aio.Channel | None = None
        self._gpus = plan.gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        """The only GPU that the daemon at a place may see."""

    async def start(self, say: Callable[[str], None] = lambda text: None) -> admin_pb2.StatusResponse:
        """Bring everything up; the first status in which the pipeline serves.

        Raises PipelineUnavailable naming the process or stages that did not come up in time, InvalidRequest
        if the log folder cannot be written to."""
        deadline = time.monotonic() + self.plan.timeout_s
        try:
            make_writable("log_dir", self.log_dir)
            if self.plan.etcd is None:
                self.etcd = await EtcdServer.start()
                self._closers.push("etcd", self._end_etcd)
                say(f"etcd {self.etcd.binary.version} at {self.etcd.endpoint} (pid {self.etcd.pid})")
            await self.start_controller()
            for stage, rank in self.plan.places:
                await self.start_stage(stage, rank=rank)
            self.address = await self._leader(deadline)
            say(f"controller at {self.address} (pid {self.children['controller'].process.pid})")
            return await self.wait_serving(deadline, say)
        except BaseException:
            await self.close()
            raise

    async def start_controller(self, listen: str | None = None) -> Child:
        """Start (or start again) a controller, at the plan's address unless told another."""
        plan = self.plan
        argv = [*self._common(), "--listen", listen or plan.listen]
        argv += ["--wave-tokens", str(plan.wave_tokens), "--silence-ms", str(plan.silence_ms)]
        argv += ["--snapshot-tokens", str(plan.snapshot_tokens)]
        for name in CONTROLLERS_OWN:
            value = getattr(plan, name)
            argv += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
        if plan.link:
            argv += ["--link", plan.link]
        return await self._spawn("controller", "wavepp_controller", argv)

    async def start_stage(
        self, stage: int, listen: str = "127.0.0.1:0", advertise: str | None = None, *, rank: int = 0
    ) -> Child:
        """Start (or start again) one stage daemon; `advertise` is where others reach it, if not at `listen`."""
        plan = self.plan
        argv = [*self._common(), "--listen", listen, "--pipeline", plan.pipeline]
        argv += ["--advertise", advertise] if advertise else []
        argv += ["--stage", str(stage), "--stages", str(plan.stages), "--model", plan.model, "--engine", plan.engine]
        argv += ["--rank", str(rank), "--ranks", str(plan.ranks)]
        argv += ["--block-tokens", str(plan.block_tokens), "--wave-tokens", str(plan.wave_tokens)]
        argv += ["--pool-blocks", plan.of(plan.pool_blocks, stage, rank)]
        argv += ["--host-pool-blocks", plan.of(plan.host_pool_blocks, stage, rank)]
        argv += ["--state-slots", plan.of(plan.state_slots, stage, rank)]
        for option, value in (("device", plan.device), ("dtype", plan.dtype)):
            argv += [f"--{option}", value] if value is not None else []
        if plan.layers:
            argv += ["--layers", plan.layers[stage]]
        if plan.threads is not None:
            argv += ["--threads", str(plan.threads)]
        return await self._spawn(plan.name(stage, rank), "wavepp_stage", argv, self._gpus.get((stage, rank)))

    def _common(self) -> list[str]:
        plan, etcd = self.plan, self._etcd_options()
        argv = ["--etcd", ",".join(etcd.endpoints), "--cluster", plan.cluster, "--log-level", plan.log_level]
        for name, path in (("ca", etcd.ca), ("cert", etcd.cert), ("key", etcd.key)):
            argv += [f"--etcd-{name}", str(path)] if path is not None else []
        if plan.otlp:
            argv += ["--otlp", plan.otlp, "--trace-sample", str(plan.trace_sample)]
        for name, value in plan.tls.items():
            argv += [f"--{name}", value]
        return argv

    def _etcd_options(self) -> EtcdOptions:
        """How everybody here reaches etcd."""
        plan = self.plan
        if self.etcd is not None:
            return self.etcd.options
        return EtcdOptions(tuple((plan.etcd or "").split(",")), plan.etcd_ca, plan.etcd_cert, plan.etcd_key)

    def _command(self, module: str, argv: list[str]) -> list[str]:
        return module_argv(module, argv)

    async def _spawn(self, name: str, module: str, argv: list[str], gpu: str | None = None) -> Child:
        """`gpu`: the only one that the process sees; None leaves it all of them."""
        if not self.children:
            self._closers.push("processes", self._end_children)
        log = self.log_dir / f"{name}.log"
        with log.open("ab") as sink:
            start = sink.tell()
            process = await asyncio.create_subprocess_exec(
                *child_argv(self._command(module, argv)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                # Ctrl-C in a terminal goes to us alone; we stop the children in order
                start_new_session=True,
                env=_environment() | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
            )
        child = self.children[name] = Child(name, process, log, start)
        return child

    def pids(self) -> dict[str, int]:
        """Of every process that was started here, by name."""
        own = {name: child.process.pid for name, child in self.children.items()}
        return own if self.etcd is None else {"etcd": self.etcd.pid, **own}

    # --- what it does ------------------------------------------------------------------------------

    async def status(self) -> admin_pb2.StatusResponse:
        """One Admin.Status. Raises grpc.aio.AioRpcError."""
        if self._channel is None:
            self._channel = open_channel(self.address, self.security)
            self._closers.push("channel", self._close_channel)
        reply: admin_pb2.StatusResponse = await admin_pb2_grpc.AdminStub(self._channel).Status(
            admin_pb2.StatusRequest(requests=True), timeout=5.0
        )
        return reply

    async def wait_serving(
        self, deadline: float, say: Callable[[str], None] = lambda text: None
    ) -> admin_pb2.StatusResponse:
        """Until the pipeline serves; `deadline` is a time.monotonic() value."""
        heard: set[DaemonKey] = set()
        refusals: set[str] = set()
        missing = "the controller knows of no daemon"
        while time.monotonic() < deadline:
            self._check_children()
            with contextlib.suppress(grpc.aio.AioRpcError):
                status = await self.status()
                found = next((p for p in status.pipelines if p.pipeline == self.plan.pipeline), None)
                if found is not None:
                    for daemon in found.daemons:
                        key = convert.daemon_key_from_pb(daemon.key)
                        if key not in heard:
                            heard.add(key)
                            say(f"{key.place} at {daemon.address} (pid {daemon.pid})")
                    if found.state == "serving":
                        return status
                    for refusal in _refusals(status).values():
                        if refusal not in refusals:  # most will be tried again, and may take long to be given up
                            refusals.add(refusal)
                            say(refusal)
                    missing = _what_is_missing(found, status)
            await asyncio.sleep(POLL_S)
        raise PipelineUnavailable(
            f"the pipeline did not form within {self.plan.timeout_s:g} s: {missing}",
            pipeline=self.plan.pipeline, limit=f"{self.plan.timeout_s:g} s",
        )  # fmt: skip

    def _check_children(self) -> None:
        for child in self.children.values():
            if not child.alive:
                raise PipelineUnavailable(
                    f"{child.name} ended with status {child.process.returncode}: {child.tail()}", process=child.name
                )

    async def _leader(self, deadline: float) -> str:
        store = EtcdStore(self._etcd_options())
        try:
            while time.monotonic() < deadline:
                self._check_children()
                with contextlib.suppress(WaveppError):
                    leader = await find_leader(store, self.plan.cluster)
                    if leader is not None:
                        return leader.address
                await asyncio.sleep(POLL_S)
        finally:
            await store.close()
        raise PipelineUnavailable(f"no controller led within {self.plan.timeout_s:g} s", process="controller")

    # --- the end -----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop controller, stages, then etcd: SIGTERM, a bounded wait, SIGKILL; as far as begun. Idempotent."""
        await self._closers.close()

    async def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(0)

    async def _end_children(self) -> None:
        order = sorted(self.children.values(), key=lambda child: child.name)
        for child in order:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)
                # a stopped process would not hear it
                child.process.send_signal(signal.SIGCONT)
        await asyncio.gather(*(self._reap(child) for child in order))
        self.children.clear()

    async def _end_etcd(self) -> None:
        if self.etcd is not None:
            await self.etcd.close()
            self.etcd = None

    async def _reap(self, child: Child) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await child.process.wait()
        except TimeoutError:
            child.process.kill()
            await child.process.wait()


def _environment() -> dict[str, str]:
    """Ours without settings meant for this command alone: every flag is passed explicitly."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WAVEPP_")}
    return kept | {"PYTHONUNBUFFERED": "1"}


def _refusals(status: admin_pb2.StatusResponse) -> dict[DaemonKey, str]:
    """Why daemons that are there are not taken in."""
    keyed = {convert.daemon_key_from_pb(member.key): member.error.message for member in status.refused}
    return {key: f"{key.place} is refused: {message}" for key, message in keyed.items()}


def _what_is_missing(pipeline: admin_pb2.PipelineStatus, status: admin_pb2.StatusResponse) -> str:
    refused = _refusals(status)
    missing = [key for key in map(convert.daemon_key_from_pb, pipeline.missing) if key not in refused]
    found = [f"no daemon for {', '.join(key.place for key in missing)}"] if missing else []
    found += refused.values()
    return "; ".join(found) or pipeline.last_fault.message or f"state {pipeline.state}"
