"""Identities and the values that several services share.

`fill_x(pb, term)` writes into a message that its parent already owns (a third of the cost of building
one and copying it in: rounds and votes are on the critical path); `x_to_pb` and `x_from_pb` are the
public pair. Called by the other modules of this package, and by runtimes through the package.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from wavepp_proto import limits
from wavepp_proto.convert import _check
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.terms import (
    Attempt,
    CacheGroup,
    Capacity,
    DaemonKey,
    Epoch,
    ErrorInfo,
    Fence,
    Formation,
    GroupBlocks,
    GroupEndpoint,
    HoldKey,
    Incarnation,
    PipelineId,
    Rank,
    RequestId,
    Sampling,
    StageIndex,
    StageTimes,
    TokenLogprob,
    TraceContext,
)
from wavepp_proto.v1 import common_pb2 as pb

GROUP_TO_PB = {
    CacheGroup.ATTENTION: pb.CACHE_GROUP_ATTENTION,
    CacheGroup.RECURRENT: pb.CACHE_GROUP_RECURRENT,
}
GROUP_FROM_PB: dict[int, CacheGroup] = {number: group for group, number in GROUP_TO_PB.items()}


def group_from_pb(number: int) -> CacheGroup:
    return _check.one_of("group", number, GROUP_FROM_PB)


def fill_fence(out: pb.Fence, fence: Fence) -> None:
    out.epoch = fence.epoch
    out.formation = fence.formation
    out.incarnation = fence.incarnation
    out.ordinal = fence.ordinal


def fence_to_pb(fence: Fence) -> pb.Fence:
    out = pb.Fence()
    fill_fence(out, fence)
    return out


def fence_from_pb(msg: pb.Fence) -> Fence:
    return Fence(Epoch(msg.epoch), Formation(msg.formation), Incarnation(msg.incarnation), msg.ordinal)


def fill_daemon_key(out: pb.DaemonKey, key: DaemonKey) -> None:
    out.pipeline = key.pipeline
    out.stage = key.stage
    out.rank = key.rank


def daemon_key_to_pb(key: DaemonKey) -> pb.DaemonKey:
    out = pb.DaemonKey()
    fill_daemon_key(out, key)
    return out


def daemon_key_from_pb(msg: pb.DaemonKey) -> DaemonKey:
    """Raises InvalidRequest when the pipeline has no name or one that is too long."""
    pipeline = msg.pipeline
    _check.present("key.pipeline", bool(pipeline))
    _check.text("key.pipeline", pipeline)
    stage = _check.at_most("key.stage", msg.stage, limits.MAX_STAGES - 1)
    return DaemonKey(PipelineId(pipeline), StageIndex(stage), Rank(msg.rank))


def fill_hold_key(out: pb.HoldKey, key: HoldKey) -> None:
    out.request_id = key.request_id
    out.attempt = key.attempt


def hold_key_to_pb(key: HoldKey) -> pb.HoldKey:
    out = pb.HoldKey()
    fill_hold_key(out, key)
    return out


def hold_key_from_pb(msg: pb.HoldKey) -> HoldKey:
    """Raises InvalidRequest when the key names no request, too long a one, or no attempt."""
    request_id, attempt = msg.request_id, msg.attempt
    # One test on the path that every entry of every round takes; the refusal finds out which part.
    # What came off the wire is UTF-8.
    if not attempt or not 0 < len(request_id) <= limits.MAX_REQUEST_ID_CHARS:
        request_id_checked(request_id)
        _check.at_least("attempt", attempt, 1)
    return HoldKey(RequestId(request_id), Attempt(attempt))


def request_id_checked(request_id: str) -> RequestId:
    """1 to MAX_REQUEST_ID_CHARS characters that UTF-8 can carry, or InvalidRequest."""
    _check.present("request_id", bool(request_id))
    return RequestId(_check.text("request_id", request_id, limits.MAX_REQUEST_ID_CHARS))


def fill_trace(out: pb.TraceContext, trace: TraceContext) -> None:
    out.traceparent = trace.traceparent
    out.tracestate = trace.tracestate


def trace_to_pb(trace: TraceContext) -> pb.TraceContext:
    out = pb.TraceContext()
    fill_trace(out, trace)
    return out


def trace_from_pb(msg: pb.TraceContext) -> TraceContext:
    """A part beyond its limit is left out, never refused: tracing must not fail a request."""
    parent, state = msg.traceparent, msg.tracestate
    if len(parent) > limits.MAX_TRACEPARENT_CHARS:
        parent = ""
    if len(state) > limits.MAX_TRACESTATE_CHARS:
        state = ""
    return TraceContext(parent, state)


def fill_sampling(out: pb.Sampling, sampling: Sampling) -> None:
    out.temperature = sampling.temperature
    out.seed = sampling.seed
    out.top_logprobs = sampling.top_logprobs
    out.full_logits = sampling.full_logits


def sampling_to_pb(sampling: Sampling) -> pb.Sampling:
    out = pb.Sampling()
    fill_sampling(out, sampling)
    return out


def sampling_from_pb(msg: pb.Sampling) -> Sampling:
    """Raises InvalidRequest as `sampling_checked` does."""
    return sampling_checked(Sampling(msg.temperature, msg.seed, msg.top_logprobs, msg.full_logits))


def sampling_checked(sampling: Sampling) -> Sampling:
    """Temperature 0 or finite and >= MIN_TEMPERATURE, seed of 64 bits, top_logprobs within its limit.

    Raises InvalidRequest naming field, value and limit.
    """
    if not 0.0 <= sampling.temperature < math.inf:
        message = f"temperature is {sampling.temperature}, it must be finite and not negative"
        raise InvalidRequest(message, field="temperature", value=sampling.temperature, limit=0)
    if 0.0 < sampling.temperature < limits.MIN_TEMPERATURE:
        message = f"temperature is {sampling.temperature}, it must be 0 (greedy) or at least {limits.MIN_TEMPERATURE}"
        raise InvalidRequest(message, field="temperature", value=sampling.temperature, limit=limits.MIN_TEMPERATURE)
    _check.at_most("seed", _check.at_least("seed", sampling.seed, 0), (1 << 64) - 1)
    top = _check.at_least("top_logprobs", sampling.top_logprobs, 0)
    _check.at_most("top_logprobs", top, limits.MAX_TOP_LOGPROBS)
    return sampling


def logprobs_to_pb(pairs: Iterable[TokenLogprob]) -> list[pb.TokenLogprob]:
    return [pb.TokenLogprob(token_id=pair.token_id, logprob=pair.logprob) for pair in pairs]


def logprobs_from_pb(msgs: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """Raises InvalidRequest for NaN and infinity: no answer has them, and JSON has no words for them."""
    return tuple(TokenLogprob(msg.token_id, _check.finite("logprob", msg.logprob)) for msg in msgs)


def fill_error(out: pb.Error, error: ErrorInfo) -> None:
    out.reason = error.reason
    out.message = error.message
    for name, value in error.fields:
        out.fields[name] = value
    if error.retry_after_ms is not None:
        out.retry_after_ms = error.retry_after_ms


def error_to_pb(error: ErrorInfo) -> pb.Error:
    out = pb.Error()
    fill_error(out, error)
    return out


def error_from_pb(msg: pb.Error) -> ErrorInfo:
    """Fields come back sorted by name: a map has no order of its own."""
    retry = msg.retry_after_ms if msg.HasField("retry_after_ms") else None
    return ErrorInfo(msg.reason, msg.message, tuple(sorted(msg.fields.items())), retry)


def fill_capacity(out: pb.Capacity, capacity: Capacity) -> None:
    out.seq = capacity.seq
    out.free_blocks = capacity.free_blocks
    out.evictable_blocks = capacity.evictable_blocks
    out.escrowed_blocks = capacity.escrowed_blocks
    out.host_free_blocks = capacity.host_free_blocks
    out.recurrent_free = capacity.recurrent_free
    out.recurrent_evictable = capacity.recurrent_evictable
    out.recurrent_escrowed = capacity.recurrent_escrowed


def capacity_to_pb(capacity: Capacity) -> pb.Capacity:
    out = pb.Capacity()
    fill_capacity(out, capacity)
    return out


def capacity_from_pb(msg: pb.Capacity) -> Capacity:
    return Capacity(
        msg.seq,
        msg.free_blocks,
        msg.evictable_blocks,
        msg.escrowed_blocks,
        msg.host_free_blocks,
        msg.recurrent_free,
        msg.recurrent_evictable,
        msg.recurrent_escrowed,
    )


def group_endpoints_to_pb(endpoints: Iterable[GroupEndpoint]) -> list[pb.GroupEndpoint]:
    return [pb.GroupEndpoint(group=GROUP_TO_PB[item.group], endpoint=item.endpoint) for item in endpoints]


def group_endpoints_from_pb(msgs: Iterable[pb.GroupEndpoint]) -> tuple[GroupEndpoint, ...]:
    return tuple([GroupEndpoint(group_from_pb(msg.group), msg.endpoint) for msg in msgs])


def group_blocks_to_pb(counts: Iterable[GroupBlocks]) -> list[pb.GroupBlocks]:
    return [pb.GroupBlocks(group=GROUP_TO_PB[item.group], blocks=item.blocks) for item in counts]


def group_blocks_from_pb(msgs: Iterable[pb.GroupBlocks]) -> tuple[GroupBlocks, ...]:
    return tuple([GroupBlocks(group_from_pb(msg.group), msg.blocks) for msg in msgs])


def stage_times_to_pb(times: StageTimes) -> pb.StageTimes:
    return pb.StageTimes(
        compute_us=times.compute_us,
        activation_wait_us=times.activation_wait_us,
        admission_wait_us=times.admission_wait_us,
        preparing_us=times.preparing_us,
        idle_us=times.idle_us,
    )


def stage_times_from_pb(msg: pb.StageTimes) -> StageTimes:
    return StageTimes(msg.compute_us, msg.activation_wait_us, msg.admission_wait_us, msg.preparing_us, msg.idle_us)
