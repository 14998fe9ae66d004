"""What a controller tells its operators: log lines of what matters, and metrics when asked for.

Owns which facts are logged, at which level and under which keys (never token ids: neither tokens nor
messages of refused prompts), and how the core's counters become series. Decides nothing. Called by the
shell with actions it carries out anyway; a scrape asks the event loop, so nothing is counted twice and
a controller that nobody scrapes pays nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from wavepp_controller.core.events import Emit, EndFormation
from wavepp_controller.core.machine import ControllerMachine
from wavepp_controller.core.status import RefusedMember
from wavepp_proto.errors import BY_REASON, FormationEnded, WaveppError
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.runtime.tracing import Tracer
from wavepp_proto.terms import (
    Admitted,
    DaemonKey,
    Failed,
    Finished,
    Formation,
    Incarnation,
    PipelineId,
    Queued,
    RequestId,
)

if TYPE_CHECKING:
    from wavepp_proto.runtime.metrics import ControllerFigures, ControllerMetrics, MetricsServer, Reading

log = get_log(__name__)

CALLERS_DOING: Final = frozenset(
    {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
)
"""gRPC codes of failures that say nothing about the health of this system."""
LOGGED_FIELDS: Final = ("stage", "rank", "wave", "cause", "field", "limit")
"""Fields of an error that a log may show: `value` may be a token id."""
COUNTED_ELSEWHERE: Final = frozenset(
    {
        "waves",
        "wave_tokens",
        "cached_tokens",
        "finished",
        "failed",
        "cancelled",
        "rejected",
        "tokens_lost_to_snapshots",
    }
)
"""Core counters that have a series of their own, or are the sum of one."""
Fields = tuple[tuple[str, str], ...]
"""Of an error, by name."""


class Observer:
    """One per controller; everything but `_read` runs on the event loop."""

    def __init__(self, machine: ControllerMachine, tracer: Tracer) -> None:
        self._machine = machine
        self._tracer = tracer
        self._pipelines: dict[RequestId, PipelineId] = {}
        """Of queued and running requests."""
        self._formations: dict[PipelineId, Formation] = {}
        """The latest begun, by the order of actions: the core itself may be further."""
        self._refused: dict[tuple[DaemonKey, Incarnation], Fields] = {}
        self._lost_tokens = 0
        self._metrics: ControllerMetrics | None = None
        self._server: MetricsServer | None = None

    @property
    def metrics_address(self) -> str | None:
        """host:port of the Prometheus endpoint; None while there is none."""
        return self._server.address if self._server is not None else None

    def serve(self, listen: str) -> None:
        """Serve metrics. Raises InvalidRequest if the address cannot be bound."""
        # Deferred: Prometheus takes 0.2 s to import, for operators who asked for it.
        from wavepp_proto.runtime.metrics import ControllerMetrics, serve_metrics

        self._loop = asyncio.get_running_loop()
        self._metrics = ControllerMetrics.create(self._read)
        self._server = serve_metrics(self._metrics.registry, self._ready, listen)
        log.info("metrics served", address=self._server.address)

    async def close(self) -> None:
        """Stop serving metrics. Idempotent; the loop stays free for a scrape that waits for it."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.close)

    # --- what happens -----------------------------------------------------------------------------

    def loop_delayed(self, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.loop_delay_s.observe(seconds)

    def emitted(self, emit: Emit) -> None:
        match emit.event:
            case Queued(request_id, pipeline):
                self._pipelines[request_id] = pipeline
            case Admitted() as admitted:
                self._lost_tokens += max(0, admitted.best_stage_hit - admitted.endpoint)
                if self._metrics is not None and emit.admission is not None:
                    self._metrics.observe_admission(emit.admission)
            case Finished(request_id) as finished:
                self._pipelines.pop(request_id, None)
                if self._metrics is not None:
                    self._metrics.prefill_s.observe(finished.timings.prefill_ms / 1_000)
            case Failed() as failed:
                self._failed(failed)

    def formation_begun(self, pipeline: PipelineId, formation: Formation) -> None:
        self._formations[pipeline] = formation

    def formation_joined(self, pipeline: PipelineId, formation: Formation) -> None:
        """A daemon has joined; told once the last one has."""
        present = self._machine.pipelines[pipeline].forming.present
        if present is not None and present.number == formation and present.serving:
            log.info(
                "formation formed", pipeline=pipeline, formation=formation, stages=present.stages,
                link=present.link.value, wave_tokens=present.wave_tokens,
            )  # fmt: skip

    def formation_ended(self, ended: EndFormation) -> None:
        cause = ended.cause
        faults = {"cause", "field"} & dict(cause.fields).keys()
        asked = cause.reason == FormationEnded.reason and not faults  # an operator, or a drain
        tell = log.info if asked else log.warning
        told = {**_told(cause.fields), "reason": cause.reason, "error": cause.message}
        tell("formation ended", pipeline=ended.pipeline, formation=ended.formation, **told)

    def members_refused(self, refused: Iterable[RefusedMember]) -> None:
        """Tell of members that are refused, once each as long as the reason is the same."""
        now = {(member.key, member.incarnation): member for member in refused}
        for identity, member in now.items():
            if self._refused.get(identity) != member.error.fields:
                _log_refused(member)
        self._refused = {identity: member.error.fields for identity, member in now.items()}

    def _failed(self, failed: Failed) -> None:
        pipeline, error = self._pipelines.pop(failed.request_id, None), failed.error
        kind = BY_REASON.get(error.reason, WaveppError)
        tell = log.info if kind.code in CALLERS_DOING else log.warning
        told: dict[str, object] = {"request_id": failed.request_id, "reason": error.reason, **_told(error.fields)}
        if pipeline is None:
            tell("request refused", **told)
        else:
            tell("request failed", pipeline=pipeline, formation=self._formations.get(pipeline), **told)

    # --- what a scrape reads ----------------------------------------------------------------------

    def _read(self) -> Reading:
        """On a scrape's thread."""
        from wavepp_proto.runtime.metrics import asked_on

        return asked_on(self._loop, self._figures), self._tracer.stats()

    def _ready(self) -> bool | None:
        """On a probe's thread."""
        from wavepp_proto.runtime.metrics import asked_on

        return asked_on(self._loop, lambda: self._machine.ready)

    def _figures(self) -> ControllerFigures:
        from wavepp_proto.runtime.metrics import ControllerFigures

        status = self._machine.status(requests=False)
        counters, pipelines = status.counters, status.pipelines
        rejected, failed = _named(counters, "rejected."), _named(counters, "failed.")
        ended = {reason: rejected.get(reason, 0) + failed.get(reason, 0) for reason in sorted({*rejected, *failed})}
        daemons = [daemon for pipeline in pipelines for daemon in pipeline.daemons]
        return ControllerFigures(
            leads=status.epoch is not None,
            ready=status.ready,
            ring_waves={p.pipeline: p.waves_in_flight for p in pipelines},
            queue_requests={p.pipeline: p.queued_requests for p in pipelines},
            queue_tokens={p.pipeline: p.queued_tokens for p in pipelines},
            running_requests={p.pipeline: p.running_requests for p in pipelines},
            parked_requests={p.pipeline: p.parked_requests for p in pipelines},
            digest_age_s={str(d.key): d.digest_age_ms / 1e3 for d in daemons if d.digest_age_ms is not None},
            requests={"finished": counters.get("finished", 0), **ended},
            rejected=rejected,
            waves=counters.get("waves", 0),
            computed_tokens=counters.get("wave_tokens", 0),
            cached_tokens=counters.get("cached_tokens", 0),
            lost_tokens={
                "agreement": self._lost_tokens,
                "snapshots": counters.get("tokens_lost_to_snapshots", 0),
            },
            events={name: n for name, n in counters.items() if name not in COUNTED_ELSEWHERE and "." not in name},
        )


def _named(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in counters.items() if name.startswith(prefix)}


def _told(fields: Fields) -> dict[str, str]:
    return {name: value for name, value in fields if name in LOGGED_FIELDS}


def _log_refused(member: RefusedMember) -> None:
    key, error = member.key, member.error
    log.warning(
        "member refused", pipeline=key.pipeline, stage=key.stage, rank=key.rank, incarnation=member.incarnation,
        address=member.address, reason=error.reason, error=error.message,
    )  # fmt: skip
