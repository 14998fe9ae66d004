"""A cluster of real processes that a test may kill, stop, drain and start again.

Owns the client's side of such a test: load that is known to run, the audit of what daemons hold, and
the file of figures. The processes are `wavepp.local_cluster`'s, etcd included, so they end with the
test whatever happens to it. Every wait is bounded. With `proxied`, the controller reaches stage 0 (which
no other stage dials) through a proxy that can fail.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio

from tests.harness.audit import is_quiet
from tests.harness.eventually import eventually
from tests.harness.ports import free_port
from tests.harness.proxy import Proxy
from tests.harness.variant import choose, environment, expected_first_token
from wavepp import Admitted, AsyncClient, ClientSecurity, PrefillResult, RetryPolicy, WaveppError
from wavepp.local_cluster import Child, LocalCluster, LocalPlan
from wavepp_proto.runtime.channels import open_channel
from wavepp_proto.v1 import admin_pb2, admin_pb2_grpc

VOCABULARY = 1000
QUICK = f"emulated:layers=6,vocabulary={VOCABULARY},window=65536"
SLOW = f"{QUICK},token_us=1000"
"""One millisecond a token and stage: a request of LONG_TOKENS takes seconds."""
LONG_TOKENS = 1000
BLOCK_TOKENS = 16
PATIENT_MS = 10_000
"""Silence that means lost, for tests about something else: a busy machine is no dead host."""
OUTCOME_S = 90.0
FIGURES = Path(__file__).parents[2] / "bench-results" / "fault.json"


def random_prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=tokens)


def answers(result: PrefillResult | WaveppError, prompt: Sequence[int]) -> bool:
    """Whether a result is what the unsplit model says for `prompt`."""
    return isinstance(result, PrefillResult) and result.first_token == expected_first_token(prompt, VOCABULARY)


class Run:
    """One request under way."""

    def __init__(self, client: AsyncClient, prompt: Sequence[int], **options: Any) -> None:
        self.prompt = prompt
        self.admitted = asyncio.Event()
        self.ended_at = 0.0
        self._client, self._options = client, options
        self.task = asyncio.create_task(self._go())

    async def _go(self) -> PrefillResult | WaveppError:
        try:
            async with self._client.stream(self.prompt, **self._options) as stream:
                async for event in stream:
                    if isinstance(event, Admitted):
                        self.admitted.set()
                return await stream.result()
        except WaveppError as error:
            return error
        finally:
            self.ended_at = time.monotonic()

    async def outcome(self) -> PrefillResult | WaveppError:
        async with asyncio.timeout(OUTCOME_S):
            return await self.task

    async def succeeds(self) -> PrefillResult:
        """The right answer; AssertionError for anything else."""
        outcome = await self.outcome()
        assert answers(outcome, self.prompt), outcome
        assert isinstance(outcome, PrefillResult)
        return outcome


class ProxiedCluster(LocalCluster):
    """Stage 0 advertises its proxy, in every life."""

    proxy: Proxy

    async def start_stage(
        self, stage: int, listen: str = "127.0.0.1:0", advertise: str | None = None, *, rank: int = 0
    ) -> Child:
        if stage == 0:
            listen, advertise = self.proxy.target, self.proxy.address
        return await super().start_stage(stage, listen, advertise, rank=rank)


class Processes:
    """`async with Processes(tmp_path) as cluster`; at the end nothing is held, and nobody has logged an error."""

    def __init__(
        self,
        folder: Path,
        model: str = QUICK,
        *,
        security: ClientSecurity | None = None,
        proxied: bool = False,
        **plan: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "engine": "emulated", "stages": 3, "pool_blocks": (512,), "block_tokens": BLOCK_TOKENS,
            "wave_tokens": 128, "silence_ms": PATIENT_MS, "timeout_s": 90.0, "listen": f"127.0.0.1:{free_port()}",
        }  # fmt: skip
        settings |= plan
        self._chosen = chosen = choose(settings["engine"], model, settings["wave_tokens"])
        settings |= {"engine": chosen.engine, "device": chosen.device, "threads": 1}
        made = ProxiedCluster if proxied else LocalCluster
        self.local = made(LocalPlan(model=chosen.model, **settings), folder / "logs", security)
        self._stack = AsyncExitStack()
        self._security = security or ClientSecurity()
        self._addresses: dict[str, str] = {}
        self.first = 0
        """The formation that served first: usually 1, more if a busy machine let a join fail."""

    async def __aenter__(self) -> Self:
        self._stack.enter_context(environment(self._chosen))
        if isinstance(self.local, ProxiedCluster):
            proxy = await self._stack.enter_async_context(Proxy(f"127.0.0.1:{free_port()}"))
            self.proxy = self.local.proxy = proxy
        status = await self.local.start()
        daemons = [d for p in status.pipelines for d in p.daemons]
        self._addresses = {self.local.plan.name(d.key.stage, d.key.rank): d.address for d in daemons}
        self.first = status.pipelines[0].formation
        self._dial(self.local.address)
        return self

    def _dial(self, address: str) -> None:
        self.address = address
        # one try: the tests are about what the first one comes to
        self.client = AsyncClient(self.address, tls=self._security, retry=RetryPolicy(attempts=1), deadline=OUTCOME_S)
        channel = open_channel(self.address, self._security)
        self._admin = admin_pb2_grpc.AdminStub(channel)
        self._stack.push_async_callback(channel.close, 0)
        self._stack.push_async_callback(self.client.close)

    def follow(self, address: str) -> None:
        """Speak to another controller from now on; requests under way stay where they are."""
        self._dial(address)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.nothing_held()
                assert not self.errors_logged(), self.errors_logged()
        finally:
            await self._stack.aclose()
            await self.local.close()

    # --- processes --------------------------------------------------------------------------------

    def pids(self, *without: str) -> dict[str, int]:
        """Of controller and stages by name, and of etcd."""
        return {name: pid for name, pid in self.local.pids().items() if name not in without}

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pids()[name], number)

    async def ended(self, name: str) -> int:
        """Exit status of a process that is about to end."""
        async with asyncio.timeout(60):
            return await self.local.children[name].process.wait()

    async def start_again(self, name: str) -> None:
        """A new process at the address that the earlier one had."""
        if name == "controller":
            await self.local.start_controller()
        else:
            stage, _, rank = name.removeprefix("stage-").partition(".")
            await self.local.start_stage(int(stage), self._addresses[name], rank=int(rank or 0))

    def set_aside(self, name: str, alias: str) -> None:
        """Let another process take the name; this one goes on under `alias`."""
        self.local.children[alias] = self.local.children.pop(name)

    async def start_elsewhere(self, stage: int, rank: int = 0) -> None:
        """A process for a place whose address the earlier one still holds."""
        await self.local.start_stage(stage, rank=rank)

    def log(self, name: str) -> str:
        return self.local.children[name].log.read_text(errors="replace")

    def errors_logged(self) -> list[str]:
        """Lines of level error, of every process that ever ran: a fault of a peer is no error of ours."""
        logs = sorted(self.local.log_dir.glob("*.log"))
        return [line for log in logs for line in log.read_text().splitlines() if '"level": "error"' in line]

    # --- what it says -----------------------------------------------------------------------------

    async def pipeline(self) -> admin_pb2.PipelineStatus | None:
        """The one pipeline, None while the controller does not answer or knows none."""
        try:
            status = await self._admin.Status(admin_pb2.StatusRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return None
        return status.pipelines[0] if status.pipelines else None

    async def serving(self, formation: int) -> admin_pb2.PipelineStatus:
        """Until the pipeline serves in `formation` or a later one, and every stage's first digest has come: until then
        hints count it as empty."""

        async def ready() -> admin_pb2.PipelineStatus | None:
            found = await self.pipeline()
            if found is None or found.state != "serving" or found.formation < formation:
                return None
            return found if all(stage.digest_in_sync for stage in found.daemons) else None

        return await eventually(ready, within=60, about=f"formation {formation} to serve")

    async def formation(self) -> int:
        """The serving formation's number; 0 for none."""
        found = await self.pipeline()
        return found.formation if found is not None and found.state == "serving" else 0

    async def nothing_held(self) -> admin_pb2.AuditResponse:
        """Until no stage holds anything, its pool is complete, and all stages ran the same rows."""
        seen: list[object] = []

        async def quiet() -> admin_pb2.AuditResponse | None:
            try:
                audit = await self._admin.Audit(admin_pb2.AuditRequest(pipeline="default"), timeout=5)
            except grpc.aio.AioRpcError as error:
                audit = None
                seen.append(error)
            else:
                seen.append(audit)
            return audit if audit is not None and is_quiet(audit, len(self.local.plan.places)) else None

        try:
            return await eventually(quiet, within=30)
        except AssertionError:
            raise AssertionError(f"something is still held: {seen[-1]}") from None

    # --- load -------------------------------------------------------------------------------------

    def run(self, prompt: Sequence[int], **options: Any) -> Run:
        return Run(self.client, prompt, **options)

    async def running(self, requests: int, tokens: int = LONG_TOKENS, seed: int = 0) -> list[Run]:
        """That many different requests, each admitted and none finished."""
        runs = [self.run(random_prompt(seed + number, tokens)) for number in range(requests)]
        async with asyncio.timeout(30):
            await asyncio.gather(*(run.admitted.wait() for run in runs))
        return runs


def record_figure(name: str, value: float) -> None:
    """Add one measured figure (seconds) to the file of figures; nothing asserts it."""
    FIGURES.parent.mkdir(exist_ok=True)
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    FIGURES.write_text(json.dumps({**known, name: round(value, 4)}, indent=2, sort_keys=True) + "\n")
