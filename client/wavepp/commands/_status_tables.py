"""How `wavepp status` tells a person what the controller said.

Owns the words: what of a pool is in use, which stage is lost, what a request waits for. Shows nothing as
alive that the controller does not hear from. Called by `status.py`; programs take `--json` instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavepp.commands._shared import state_in_words

if TYPE_CHECKING:
    from rich.table import Table

    from wavepp_proto.v1 import admin_pb2 as pb
    from wavepp_proto.v1 import common_pb2 as pb_common

NONE = "-"
STAGE_COLUMNS = (
    "stage", "address", "engine", "layers", "blocks\nheld+cached\n/total", "host\nused\n/total",
    "states\nheld+cached\n/total", "waves", "beat ms",
)  # fmt: skip
EXPLAINED = "held: in use by a request; cached: reusable, held by nobody, given up when room is needed"
REQUEST_COLUMNS = ("request", "pipeline", "state", "prompt", "endpoint", "computed", "age ms")


def stages(pipeline: pb.PipelineStatus) -> Table:
    """One line a daemon, and one for each place without one."""
    from rich.table import Table

    table = Table(*STAGE_COLUMNS, title=title(pipeline), caption=EXPLAINED)
    for column in table.columns:
        column.overflow = "fold"  # a narrow terminal wraps an address, it must not cut it
    rows = {_place(daemon.key): stage_row(pipeline, daemon) for daemon in pipeline.daemons}
    rows = {**{_place(key): missing_row(_name(pipeline, key)) for key in pipeline.missing}, **rows}
    for _, row in sorted(rows.items()):
        table.add_row(*row)
    return table


def title(pipeline: pb.PipelineStatus) -> str:
    parts = [f"{pipeline.pipeline}: {pipeline.state}", f"formation {pipeline.formation}", pipeline.model]
    parts += [f"link {pipeline.link}"] if pipeline.link else []
    parts += [f"{pipeline.queued_requests} queued", f"{pipeline.running_requests} running"]
    return ", ".join(filter(None, parts))


def stage_row(pipeline: pb.PipelineStatus, daemon: pb.StageStatus) -> tuple[str, ...]:
    room = daemon.capacity if pipeline.state == "serving" and daemon.HasField("capacity") else None
    blocks, host, states = (
        f"{NONE}/{size}" for size in (daemon.pool_blocks, daemon.host_pool_blocks, daemon.state_slots)
    )
    if room is not None:
        blocks = _in_use(daemon.pool_blocks, room.free_blocks, room.evictable_blocks)
        host = f"{daemon.host_pool_blocks - room.host_free_blocks}/{daemon.host_pool_blocks}"
        states = _in_use(daemon.state_slots, room.recurrent_free, room.recurrent_evictable)
    return (
        _name(pipeline, daemon.key), daemon.address, daemon.engine, f"{daemon.first_layer}:{daemon.last_layer}", blocks,
        host if daemon.host_pool_blocks else NONE, states if daemon.state_slots else NONE,
        str(daemon.waves_done) if pipeline.state == "serving" else NONE, _beat(pipeline, daemon),
    )  # fmt: skip


def missing_row(name: str) -> tuple[str, ...]:
    """A place that no daemon is registered for."""
    return (name, *[NONE] * (len(STAGE_COLUMNS) - 2), "missing")


def requests(live: list[pb.RequestStatus]) -> Table:
    from rich.table import Table

    table = Table(*REQUEST_COLUMNS)
    for request in live:
        table.add_row(
            request.request_id, request.pipeline, request_state(request), str(request.prompt_tokens),
            str(request.endpoint), str(request.computed_tokens), str(request.age_ms),
        )  # fmt: skip
    return table


def request_state(request: pb.RequestStatus) -> str:
    """`waiting for its turn`, or the state with what keeps the request in it."""
    state = state_in_words(request.state)
    if not request.waiting_for:
        return state
    reason = f"waiting for {request.waiting_for}"
    return reason if state in (reason, "waiting") else f"{state}, {reason}"


def _in_use(size: int, free: int, cached: int) -> str:
    return f"{size - free - cached}+{cached}/{size}"


def _beat(pipeline: pb.PipelineStatus, daemon: pb.StageStatus) -> str:
    """Since the controller heard from it; nothing is heard outside a serving formation."""
    if pipeline.state == "serving":
        return "reconnecting" if daemon.reconnecting else str(daemon.heartbeat_age_ms)
    return "lost" if _is_lost(pipeline, daemon) else NONE


def _is_lost(pipeline: pb.PipelineStatus, daemon: pb.StageStatus) -> bool:
    """The last formation ended because of this daemon; one that came in its place has another incarnation."""
    fault = pipeline.last_fault
    if pipeline.state != "broken" or fault.reason != "STAGE_LOST":
        return False
    same_incarnation = fault.fields.get("incarnation", str(daemon.incarnation)) == str(daemon.incarnation)
    same_place = fault.fields.get("stage") == str(daemon.key.stage) and fault.fields.get("rank", "0") == str(
        daemon.key.rank
    )
    return same_place and same_incarnation


def _name(pipeline: pb.PipelineStatus, key: pb_common.DaemonKey) -> str:
    """`1`, or `1.0` where stages have several ranks."""
    ranked = any(daemon.key.rank for daemon in pipeline.daemons) or any(missing.rank for missing in pipeline.missing)
    return f"{key.stage}.{key.rank}" if ranked else str(key.stage)


def _place(key: pb_common.DaemonKey) -> tuple[int, int]:
    return key.stage, key.rank
