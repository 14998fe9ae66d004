"""StageExecution: waves and reports, with heartbeats between them in both directions.

`wave_request_*` is what a controller sends (WaveCommand or Heartbeat), `wave_response_*` what a daemon
answers (WaveReport or Heartbeat); `wave_command_*`, `heartbeat_*` and `wave_report_*` are their parts.
"""

from __future__ import annotations

from wavepp_proto import limits
from wavepp_proto.convert import _check
from wavepp_proto.convert import common as c
from wavepp_proto.convert.admission import running_hash
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.terms import (
    Fence,
    Heartbeat,
    Row,
    RowFault,
    RowResult,
    WaveCommand,
    WaveOrdinal,
    WaveReport,
)
from wavepp_proto.v1 import execution_pb2 as pb

BITMAP_BYTES = limits.MAX_LANES // 8
LOGIT_BYTES = 4


def wave_request_to_pb(term: WaveCommand | Heartbeat) -> pb.WaveRequest:
    out = pb.WaveRequest()
    c.fill_fence(out.fence, term.fence)
    if isinstance(term, Heartbeat):
        _fill_heartbeat(out.heartbeat, term)
        return out
    # An empty wave must still arrive as a wave, to be refused by name.
    out.wave.SetInParent()
    out.wave.limit_ms = term.limit_ms
    for row in term.rows:
        _fill_row(out.wave.rows.add(), row)
    return out


def wave_request_from_pb(msg: pb.WaveRequest) -> WaveCommand | Heartbeat:
    """Raises InvalidRequest when there is no body, no row, too many rows, or an empty row."""
    _check.present("fence", msg.HasField("fence"))
    fence = c.fence_from_pb(msg.fence)
    body = msg.WhichOneof("body")
    if body == "heartbeat":
        return _heartbeat_from_pb(fence, msg.heartbeat)
    _check.present("body", body == "wave")
    rows = msg.wave.rows
    _check.at_most("rows", _check.at_least("rows", len(rows), 1), limits.MAX_LANES)
    return WaveCommand(fence, tuple([_row_from_pb(row) for row in rows]), msg.wave.limit_ms)


def _fill_row(out: pb.Row, row: Row) -> None:
    c.fill_hold_key(out.key, row.key)
    out.start = row.start
    out.length = row.length
    out.final = row.final
    if row.snapshots:
        out.snapshots.extend(row.snapshots)


def _row_from_pb(msg: pb.Row) -> Row:
    start, length, snapshots = msg.start, msg.length, tuple(msg.snapshots)
    _check.at_most("row end", start + _check.at_least("length", length, 1), limits.MAX_PROMPT_TOKENS)
    for position in snapshots:
        if not start < position <= start + length:
            message = f"snapshot at {position} lies outside the chunk ({start}, {start + length}]"
            raise InvalidRequest(message, field="snapshots", value=position, limit=start + length)
    return Row(c.hold_key_from_pb(msg.key), start, length, msg.final, snapshots)


def _fill_heartbeat(out: pb.Heartbeat, beat: Heartbeat) -> None:
    out.count = beat.count
    out.queued_waves = beat.queued_waves
    out.loop_delay_us = beat.loop_delay_us
    out.draining = beat.draining
    out.reported_wave = beat.reported_wave
    if beat.executing_wave is not None:
        out.executing_wave = beat.executing_wave
        out.executing_ms = beat.executing_ms
    if beat.capacity is not None:
        c.fill_capacity(out.capacity, beat.capacity)


def _heartbeat_from_pb(fence: Fence, msg: pb.Heartbeat) -> Heartbeat:
    executing = WaveOrdinal(msg.executing_wave) if msg.HasField("executing_wave") else None
    capacity = c.capacity_from_pb(msg.capacity) if msg.HasField("capacity") else None
    return Heartbeat(
        fence,
        msg.count,
        executing,
        msg.queued_waves,
        msg.loop_delay_us,
        capacity,
        msg.draining,
        WaveOrdinal(msg.reported_wave),
        msg.executing_ms,
    )


def wave_response_to_pb(term: WaveReport | Heartbeat) -> pb.WaveResponse:
    out = pb.WaveResponse()
    c.fill_fence(out.fence, term.fence)
    if isinstance(term, Heartbeat):
        _fill_heartbeat(out.heartbeat, term)
    else:
        _fill_report(out.report, term)
    return out


def wave_response_from_pb(msg: pb.WaveResponse) -> WaveReport | Heartbeat:
    """Raises InvalidRequest when there is no body, or a bitmap, hash or row list of another size."""
    _check.present("fence", msg.HasField("fence"))
    fence = c.fence_from_pb(msg.fence)
    body = msg.WhichOneof("body")
    if body == "heartbeat":
        return _heartbeat_from_pb(fence, msg.heartbeat)
    _check.present("body", body == "report")
    return _report_from_pb(fence, msg.report)


def _fill_report(out: pb.WaveReport, report: WaveReport) -> None:
    out.done = report.done
    out.void_bitmap = report.void_bitmap.to_bytes(BITMAP_BYTES, "little")
    out.running_hash = report.running_hash
    out.times.CopyFrom(c.stage_times_to_pb(report.times))
    for result in report.results:
        item = out.results.add(row=result.row, token_id=result.token_id, logits=result.logits)
        item.top_logprobs.extend(c.logprobs_to_pb(result.top_logprobs))
    for fault in report.faults:
        item_fault = out.faults.add(row=fault.row)
        c.fill_error(item_fault.error, fault.error)
    if report.capacity is not None:
        c.fill_capacity(out.capacity, report.capacity)
    if report.error is not None:
        c.fill_error(out.error, report.error)
    out.partial = report.partial


def _report_from_pb(fence: Fence, msg: pb.WaveReport) -> WaveReport:
    bitmap = _check.exactly("void_bitmap", msg.void_bitmap, BITMAP_BYTES)
    _check.at_most("results", len(msg.results), limits.MAX_LANES)
    _check.at_most("faults", len(msg.faults), limits.MAX_LANES)
    return WaveReport(
        fence=fence,
        done=msg.done,
        void_bitmap=int.from_bytes(bitmap, "little"),
        running_hash=running_hash(msg.running_hash),
        times=c.stage_times_from_pb(msg.times),
        results=tuple([_result_from_pb(result) for result in msg.results]),
        faults=tuple([RowFault(_row_index(fault.row), c.error_from_pb(fault.error)) for fault in msg.faults]),
        capacity=c.capacity_from_pb(msg.capacity) if msg.HasField("capacity") else None,
        error=c.error_from_pb(msg.error) if msg.HasField("error") else None,
        partial=msg.partial,
    )


def _row_index(row: int) -> int:
    return _check.at_most("row", row, limits.MAX_LANES - 1)


def _result_from_pb(msg: pb.RowResult) -> RowResult:
    _check.at_most("top_logprobs", len(msg.top_logprobs), limits.MAX_TOP_LOGPROBS)
    return RowResult(
        _row_index(msg.row), msg.token_id, c.logprobs_from_pb(msg.top_logprobs), logits_checked(msg.logits)
    )


def logits_checked(logits: bytes) -> bytes:
    """Packed float32 of at most the largest vocabulary."""
    _check.payload("logits", len(logits), limits.MAX_VOCABULARY * LOGIT_BYTES)
    return _check.packed("logits", logits, LOGIT_BYTES)
