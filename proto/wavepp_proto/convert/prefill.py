"""Prefill events, from controller to client. Requests and their frames are in `prompt.py`."""

from __future__ import annotations

from collections.abc import Callable

from wavepp_proto import limits
from wavepp_proto.convert import _check
from wavepp_proto.convert import common as c
from wavepp_proto.convert.execution import logits_checked
from wavepp_proto.terms import (
    Admitted,
    Attempt,
    Failed,
    Finished,
    PipelineId,
    PrefillEvent,
    Progress,
    Queued,
    RequestId,
    StageIndex,
    Timings,
)
from wavepp_proto.v1 import prefill_pb2 as pb


def prefill_event_to_pb(event: PrefillEvent) -> pb.PrefillEvent:
    out = pb.PrefillEvent(request_id=event.request_id)
    match event:
        case Queued():
            out.queued.CopyFrom(pb.Queued(pipeline=event.pipeline, position=event.position))
        case Admitted():
            out.admitted.CopyFrom(admitted_to_pb(event))
        case Progress():
            out.progress.computed_tokens = event.computed_tokens
            out.progress.prompt_tokens = event.prompt_tokens
        case Finished():
            out.finished.CopyFrom(finished_to_pb(event))
        case Failed():
            out.failed.SetInParent()
            c.fill_error(out.failed, event.error)
    return out


def prefill_event_from_pb(msg: pb.PrefillEvent) -> PrefillEvent:
    """Raises InvalidRequest when the event is of a kind this version does not know."""
    request_id = c.request_id_checked(msg.request_id)
    kind = msg.WhichOneof("event")
    _check.present("event", kind is not None)
    assert kind is not None
    return _EVENT_FROM_PB[kind](request_id, msg)


def _queued_from_pb(request_id: RequestId, msg: pb.PrefillEvent) -> Queued:
    return Queued(request_id, PipelineId(msg.queued.pipeline), msg.queued.position)


def _progress_from_pb(request_id: RequestId, msg: pb.PrefillEvent) -> Progress:
    return Progress(request_id, msg.progress.computed_tokens, msg.progress.prompt_tokens)


_EVENT_FROM_PB: dict[str, Callable[[RequestId, pb.PrefillEvent], PrefillEvent]] = {
    "queued": _queued_from_pb,
    "admitted": lambda request_id, msg: admitted_from_pb(request_id, msg.admitted),
    "progress": _progress_from_pb,
    "finished": lambda request_id, msg: finished_from_pb(request_id, msg.finished),
    "failed": lambda request_id, msg: Failed(request_id, c.error_from_pb(msg.failed)),
}


def admitted_to_pb(event: Admitted) -> pb.Admitted:
    out = pb.Admitted(
        attempt=event.attempt,
        endpoint=event.endpoint,
        candidate=event.candidate,
        best_stage_hit=event.best_stage_hit,
        rounds=event.rounds,
        lost_to_snapshots=event.lost_to_snapshots,
        shared_tokens=event.shared_tokens,
    )
    if event.limiting_stage is not None:
        out.limiting_stage = event.limiting_stage
    return out


def admitted_from_pb(request_id: RequestId, msg: pb.Admitted) -> Admitted:
    return Admitted(
        request_id=request_id,
        attempt=Attempt(msg.attempt),
        endpoint=msg.endpoint,
        candidate=msg.candidate,
        limiting_stage=StageIndex(msg.limiting_stage) if msg.HasField("limiting_stage") else None,
        best_stage_hit=msg.best_stage_hit,
        rounds=msg.rounds,
        lost_to_snapshots=msg.lost_to_snapshots,
        shared_tokens=msg.shared_tokens,
    )


def finished_to_pb(event: Finished) -> pb.Finished:
    return pb.Finished(
        attempt=event.attempt,
        first_token=event.first_token,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        timings=timings_to_pb(event.timings),
        waves=event.waves,
        top_logprobs=c.logprobs_to_pb(event.top_logprobs),
        logits=event.logits,
        handoff=event.handoff,
    )


def finished_from_pb(request_id: RequestId, msg: pb.Finished) -> Finished:
    """Raises InvalidRequest when the log probabilities or logits are more than their limits."""
    _check.at_most("top_logprobs", len(msg.top_logprobs), limits.MAX_TOP_LOGPROBS)
    return Finished(
        request_id=request_id,
        attempt=Attempt(msg.attempt),
        first_token=msg.first_token,
        prompt_tokens=msg.prompt_tokens,
        cached_tokens=msg.cached_tokens,
        timings=timings_from_pb(msg.timings),
        waves=msg.waves,
        top_logprobs=c.logprobs_from_pb(msg.top_logprobs),
        logits=logits_checked(msg.logits),
        handoff=msg.handoff,
    )


def run_response_to_pb(pipeline: PipelineId, admitted: Admitted | None, outcome: Finished | Failed) -> pb.RunResponse:
    out = pb.RunResponse(pipeline=pipeline)
    if admitted is not None:
        out.admitted.CopyFrom(admitted_to_pb(admitted))
    if isinstance(outcome, Finished):
        out.finished.CopyFrom(finished_to_pb(outcome))
    else:
        c.fill_error(out.failed, outcome.error)
    return out


def run_response_from_pb(
    request_id: RequestId, msg: pb.RunResponse
) -> tuple[PipelineId, Admitted | None, Finished | Failed]:
    """Raises InvalidRequest when there is no outcome."""
    admitted = admitted_from_pb(request_id, msg.admitted) if msg.HasField("admitted") else None
    if msg.HasField("failed"):
        return PipelineId(msg.pipeline), admitted, Failed(request_id, c.error_from_pb(msg.failed))
    _check.present("finished", msg.HasField("finished"))
    return PipelineId(msg.pipeline), admitted, finished_from_pb(request_id, msg.finished)


def timings_to_pb(timings: Timings) -> pb.Timings:
    return pb.Timings(
        queue_ms=timings.queue_ms,
        hash_ms=timings.hash_ms,
        hint_ms=timings.hint_ms,
        announce_ms=timings.announce_ms,
        rounds_ms=timings.rounds_ms,
        capacity_wait_ms=timings.capacity_wait_ms,
        admission_ms=timings.admission_ms,
        prefill_ms=timings.prefill_ms,
        sharing_wait_ms=timings.sharing_wait_ms,
    )


def timings_from_pb(msg: pb.Timings) -> Timings:
    return Timings(
        msg.queue_ms,
        msg.hash_ms,
        msg.hint_ms,
        msg.announce_ms,
        msg.rounds_ms,
        msg.capacity_wait_ms,
        msg.admission_ms,
        msg.prefill_ms,
        msg.sharing_wait_ms,
    )
