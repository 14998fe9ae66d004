"""What a stage daemon tells its operators: spans of its work, and metrics when asked for.

Owns the sums over votes and waves, and how they and the core's census become series. Decides nothing.
The executor's thread only leaves span records; sums are made on the event loop, from reports and votes
that pass by anyway. A scrape reads them from its own thread and asks the core under its mutex once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Final

from grpc_health.v1 import health, health_pb2

from wavepp_proto.runtime.channels import pipeline_service
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.runtime.tracing import Tracer
from wavepp_proto.terms import DaemonKey, StageTimes, VoteOutcome, Votes
from wavepp_stage.runtime.copier import CopyCounts
from wavepp_stage.runtime.core_shell import CoreShell
from wavepp_stage.runtime.running_formation import Report
from wavepp_stage.runtime.spans import record_prepares, record_wave

if TYPE_CHECKING:
    from wavepp_proto.runtime.metrics import MetricsServer, Reading, StageMetrics

log = get_log(__name__)

STATES: Final = tuple(name.name.removesuffix("_us") for name in fields(StageTimes))
"""What an executor's time is split into."""
HEALTH_S: Final = 0.1
"""How late health may be."""
GLOO_LINK: Final = "wavepp_stage.engine.torch.gloo_link"


class Observer:
    """One per daemon."""

    def __init__(
        self, core: CoreShell, copies: CopyCounts, tracer: Tracer, key: DaemonKey, serving: Callable[[], bool]
    ) -> None:
        """`serving` says whether a formation is served; callable from any thread."""
        self._core = core
        self._copies = copies
        self._tracer = tracer
        self._key = key
        self._serving = serving
        self._self_fences = 0
        self._resumed_streams = 0
        self._refused = False
        # Every key is there from the start: a scrape copies these dicts while the loop counts.
        self._votes = {outcome.value: 0 for outcome in VoteOutcome}
        self._waves = {"done": 0, "failed": 0}
        self._times_us = dict.fromkeys(STATES, 0)
        self._tokens = 0
        self._void_rows = 0
        self._worst_delay_s = 0.0
        self._metrics: StageMetrics | None = None
        self._server: MetricsServer | None = None

    @property
    def metrics_address(self) -> str | None:
        """host:port of the Prometheus endpoint; None while there is none."""
        return self._server.address if self._server is not None else None

    def serve(self, listen: str) -> None:
        """Serve metrics. Raises InvalidRequest if the address cannot be bound."""
        # Deferred: Prometheus takes 0.2 s to import, for operators who asked for it.
        from wavepp_proto.runtime.metrics import StageMetrics, serve_metrics

        self._loop = asyncio.get_running_loop()
        self._metrics = StageMetrics.create(self._read)
        self._server = serve_metrics(self._metrics.registry, self._ready, listen)
        log.info("metrics served", stage=self._key.stage, address=self._server.address)

    async def report_health(self, servicer: health.aio.HealthServicer) -> None:
        """Serving while a formation is served and its engine gets on: a daemon that only waits to join is no target
        yet. Under its pipeline's name too, as a controller tells it."""
        state = health_pb2.HealthCheckResponse
        while True:
            for service in ("", pipeline_service(self._key.pipeline)):
                await servicer.set(service, state.SERVING if self._serving() else state.NOT_SERVING)
            await asyncio.sleep(HEALTH_S)

    async def close(self) -> None:
        """Stop serving metrics. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.close)

    # --- what happens -----------------------------------------------------------------------------

    def executed(self, report: Report) -> None:
        """On the executor's thread."""
        record_wave(self._tracer, self._key, report)

    def reported(self, report: Report) -> None:
        """The same report, on the event loop."""
        self._waves["failed" if report.done is None else "done"] += 1
        for state in STATES:
            self._times_us[state] += getattr(report.times, f"{state}_us")
        if report.work is not None and report.done is not None:
            void = report.done.void_bitmap
            self._void_rows += void.bit_count()
            self._tokens += sum(row.length for index, row in enumerate(report.work.rows) if not void >> index & 1)

    def voted(self, votes: Votes, started_ns: int, ended_ns: int) -> None:
        """A round was answered, within these wall-clock times; the answer has left."""
        for vote in votes.votes:
            self._votes[vote.outcome.value] += 1
        record_prepares(self._tracer, self._core, self._key, votes, started_ns, ended_ns)

    def fenced(self) -> None:
        """This daemon fenced itself, and is somebody new."""
        self._self_fences += 1

    def resumed(self) -> None:
        """The controller opened its wave stream again, within a formation."""
        self._resumed_streams += 1

    def judged(self, refused: bool) -> None:
        """Whether the controller can use this daemon."""
        self._refused = refused

    def loop_delayed(self, seconds: float) -> None:
        self._worst_delay_s = max(self._worst_delay_s, seconds)
        if self._metrics is not None:
            self._metrics.loop_delay_s.observe(seconds)

    def take_loop_delay_us(self) -> int:
        """The worst delay since this was last asked, for a heartbeat."""
        worst, self._worst_delay_s = self._worst_delay_s, 0.0
        return round(worst * 1e6)

    # --- what a scrape reads ----------------------------------------------------------------------

    def _ready(self) -> bool | None:
        """On a probe's thread."""
        from wavepp_proto.runtime.metrics import asked_on

        return asked_on(self._loop, self._serving)

    def _read(self) -> Reading:
        """On a scrape's thread."""
        from wavepp_proto.runtime.metrics import StageFigures

        census = self._core.read(lambda machine: machine.census())
        figures = StageFigures(
            serving=self._serving(),
            time_s={state: spent_us / 1e6 for state, spent_us in dict(self._times_us).items()},
            waves=dict(self._waves),
            computed_tokens=self._tokens,
            void_rows=self._void_rows,
            votes=dict(self._votes),
            blocks={
                "free": census.free, "cached": census.cached, "held": census.held, "quarantined": census.quarantined,
            },
            leases=census.leases,
            escrows=census.escrows,
            escrowed_blocks=census.escrowed,
            backed_blocks={
                "free": census.backed_free, "offload": census.backed_offload, "evict": census.backed_evict,
            },
            evicted_blocks=census.evicted,
            moved_blocks={"offload": census.offloaded, "onboard": census.onboarded},
            host_blocks={"free": census.host_free, "cached": census.host_cached, "held": census.host_held},
            states={
                "free": census.states_free, "cached": census.states_cached, "held": census.states_held,
                "quarantined": census.states_quarantined,
            },
            escrowed_states=census.states_escrowed,
            evicted_states=census.states_evicted,
            abandoned_links=_abandoned_links(),
            copied_blocks=dict(self._copies.blocks),
            copy_s=dict(self._copies.seconds),
            failed_copies=self._copies.failed_lots,
            self_fences=self._self_fences,
            resumed_streams=self._resumed_streams,
            refused=self._refused,
        )  # fmt: skip
        return figures, self._tracer.stats()


def _abandoned_links() -> int:
    """Looks only at what is imported: a daemon without torch must not load it to say none."""
    module = sys.modules.get(GLOO_LINK)
    return int(module.abandoned_threads()) if module is not None else 0
