"""Spans made in the stage's process (DESIGN.md): prepare, execute, wave, copy.

Owns nothing but the mapping from what happened to recorded spans; `Tracer.record` appends a tuple,
so this is cheap enough for the executor's path.
"""

from __future__ import annotations

from wavepp_proto.errors import EngineFault
from wavepp_proto.runtime import span_names
from wavepp_proto.runtime.trace_context import is_sampled
from wavepp_proto.runtime.tracing import Tracer
from wavepp_proto.terms import DaemonKey, Votes
from wavepp_stage.core.work import CopyLot
from wavepp_stage.runtime.core_shell import CoreShell
from wavepp_stage.runtime.running_formation import Report


def record_prepares(
    tracer: Tracer, core: CoreShell, key: DaemonKey, votes: Votes, started_ns: int, ended_ns: int
) -> None:
    """One `prepare` span per round entry, under the context announced with its request."""
    if not tracer.recording or not votes.votes:
        return
    parents = core.read(lambda machine: [machine.trace_of(vote.key) for vote in votes.votes])
    for vote, parent in zip(votes.votes, parents, strict=True):
        if parent is None or not is_sampled(parent):
            continue
        tracer.record(
            span_names.PREPARE,
            started_ns,
            ended_ns,
            parent=parent,
            attributes=(
                (span_names.REQUEST_ID, vote.key.request_id),
                (span_names.STAGE, key.stage),
                (span_names.RANK, key.rank),
                (span_names.OUTCOME, vote.outcome.value),
                (span_names.ENDPOINT, vote.endpoint),
                (span_names.OWN_HIT, vote.own_hit),
            ),
        )


def record_copy(tracer: Tracer, key: DaemonKey, lot: CopyLot, started_ns: int, ended_ns: int, ok: bool) -> None:
    """One `copy` span per lot: it serves whoever needs its blocks, so it hangs on no request."""
    if not tracer.recording:
        return
    tracer.record(
        span_names.COPY,
        started_ns,
        ended_ns,
        own=tracer.root(),
        attributes=(
            (span_names.PIPELINE, key.pipeline),
            (span_names.STAGE, key.stage),
            (span_names.RANK, key.rank),
            (span_names.DIRECTION, lot.direction.value),
            (span_names.BLOCKS, len(lot)),
        ),
        error="" if ok else EngineFault.reason,
    )


def record_wave(tracer: Tracer, key: DaemonKey, report: Report) -> None:
    """The `wave` span, linked to its requests, and one `execute` span per row in its request's trace."""
    if not tracer.recording or report.work is None or not any(is_sampled(row.trace) for row in report.work.rows):
        return
    void = report.done.void_bitmap if report.done else 0
    rows = report.work.rows
    times = report.times
    tracer.record(
        span_names.WAVE,
        report.started_ns,
        report.ended_ns,
        links=[row.trace for row in rows if row.trace.traceparent],
        attributes=(
            (span_names.PIPELINE, key.pipeline),
            (span_names.STAGE, key.stage),
            (span_names.RANK, key.rank),
            (span_names.FORMATION, report.formation),
            (span_names.WAVE_ORDINAL, report.ordinal),
            (span_names.TOKENS, report.work.tokens),
            (span_names.ROWS, len(rows)),
            (span_names.IDLE_US, times.idle_us),
            (span_names.ADMISSION_WAIT_US, times.admission_wait_us),
            (span_names.PREPARING_US, times.preparing_us),
            (span_names.ACTIVATION_WAIT_US, times.activation_wait_us),
        ),
        error="" if report.error is None else report.error.reason,
    )
    for index, row in enumerate(rows):
        if not is_sampled(row.trace):
            continue
        tracer.record(
            span_names.EXECUTE,
            report.started_ns,
            report.ended_ns,
            parent=row.trace,
            attributes=(
                (span_names.REQUEST_ID, row.key.request_id),
                (span_names.STAGE, key.stage),
                (span_names.RANK, key.rank),
                (span_names.WAVE_ORDINAL, report.ordinal),
                (span_names.CHUNK_START, row.start),
                (span_names.CHUNK_LENGTH, row.length),
                (span_names.VOID, bool(void >> index & 1)),
            ),
        )
