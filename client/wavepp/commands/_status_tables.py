"""How `wavepp status` tells a person what the controller said.

Owns the words: what of a pool is in use, which stage is lost, what a request waits for. Shows nothing as
alive that the controller does not hear from. Called by `status.py`; programs take `--json` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wavepp.commands._shared import state_in_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from wavepp_proto.v1 import admin_pb2 as pb
    from wavepp_proto.v1 import common_pb2 as pb_common

NONE = "-"
STAGE_COLUMNS = (
    "stage", "address", "engine", "layers", "blocks\nheld+cached\n/total", "host\nused\n/total",
    "states\nheld+cached\n/total", "waves", "beat ms",
)  # fmt: skip
EXPLAINED = "held: in use by a request; cached: reusable, held by nobody, given up when room is needed"
ADDRESS = 1
TIERS = (5, 6)
"""Of STAGE_COLUMNS: left out where no stage has any."""
STAGE_IMPORTANCE = (0, 8, 4, 1, 6, 5, 7, 3, 2)
LEAST_COLUMNS = 4
ENDLESS = 10_000
BELIEVED_ERROR = 0.15
"""Errors up to here are believed whatever they are: the controller's limit, which the client cannot import. A test
compares them."""
REQUEST_COLUMNS = ("request", "pipeline", "state", "prompt", "endpoint", "computed", "age ms")
REQUEST_FIGURES = 3
"""Columns from here on are numbers."""


def stages(
    pipeline: pb.PipelineStatus, console: Console | None = None, refused: Sequence[pb.RefusedMember] = ()
) -> Table:
    """One line a daemon, and one for each place without one, or whose daemon is `refused`; columns that say least are
    left out until `console` has
    room for the others. No figure is cut or wrapped, an address is wrapped last."""
    rows = {_place(daemon.key): stage_row(pipeline, daemon) for daemon in pipeline.daemons}
    there = {_place(one.key): one.address for one in refused if one.key.pipeline == pipeline.pipeline}
    lacking = {_place(key): lacking_row(_name(pipeline, key), there.get(_place(key))) for key in pipeline.missing}
    rows = {**lacking, **rows}
    lines = [row for _, row in sorted(rows.items())]
    kept = [at for at in STAGE_IMPORTANCE if at not in TIERS or any(line[at] != NONE for line in lines)]
    while True:
        table = _stage_table(pipeline, sorted(kept), lines)
        if console is None or len(kept) <= LEAST_COLUMNS:
            return table
        if console.measure(table, options=console.options.update(max_width=ENDLESS)).maximum <= console.width:
            return table
        kept.pop()


def _stage_table(pipeline: pb.PipelineStatus, shown: Sequence[int], lines: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(title=title(pipeline), caption=EXPLAINED)
    for at in shown:
        table.add_column(STAGE_COLUMNS[at], overflow="fold", no_wrap=at != ADDRESS)
    for line in lines:
        table.add_row(*(line[at] for at in shown))
    return table


def title(pipeline: pb.PipelineStatus) -> str:
    parts = [f"{pipeline.pipeline}: {pipeline.state}", f"formation {pipeline.formation}", pipeline.model]
    parts += [f"link {pipeline.link}"] if pipeline.link else []
    parts += [f"policy {pipeline.policy}"] if pipeline.policy else []
    parts += [f"mode {pipeline.mode}"] if pipeline.mode else []
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


def lacking_row(name: str, address: str | None) -> tuple[str, ...]:
    """A place without a usable daemon; `address` of one that is registered for it and refused."""
    rest = (NONE,) * (len(STAGE_COLUMNS) - 3)
    return (name, address or NONE, *rest, "refused" if address else "missing")


def without_daemon(pipeline: pb.PipelineStatus, refused: Sequence[pb.RefusedMember]) -> list[str]:
    """Places for which nothing is registered, not even a daemon that is refused."""
    there = {_place(one.key) for one in refused if one.key.pipeline == pipeline.pipeline}
    return [in_words(key) for key in pipeline.missing if _place(key) not in there]


def learnt(pipeline: pb.PipelineStatus) -> list[str]:
    """What waves were learnt to take, stage by stage, and whether the planner goes by it."""
    known = [daemon for daemon in pipeline.daemons if daemon.HasField("costs")]
    said = [_costs(daemon) for daemon in known]
    doubted = [daemon for daemon in known if not _believed(daemon.costs)]
    if pipeline.policy == "adaptive" and pipeline.state == "serving":
        if doubted or len({daemon.key.stage for daemon in known}) < pipeline.stages:
            off = [in_words(daemon.key) for daemon in doubted if daemon.costs.error > BELIEVED_ERROR]
            reason = f"{', '.join(off)}: off by more than {BELIEVED_ERROR:.0%}, not known to be noise"
            why = reason if off else "too few waves yet"
            said.append(f"mpu plans for now: the stages' times are not known well enough ({why})")
        elif known:
            said.append("adaptive plans with these times")
    return said


def _believed(costs: pb.StageCosts) -> bool:
    """As the controller says; one that is older says only how large errors are."""
    return costs.believed if costs.HasField("believed") else costs.error <= BELIEVED_ERROR


def _costs(daemon: pb.StageStatus) -> str:
    costs = daemon.costs
    return (
        f"{in_words(daemon.key)}: {costs.c_us / 1e3:.2f} ms a wave + {costs.b_us:.3g} ms a thousand tokens + "
        f"{costs.a_us * 1e3:.3g} ms a million (token, token before it) pairs + {costs.g_us:.3g} ms a thousand prefix "
        f"tokens of a chunk; off by {costs.error:.1%} of late, {costs.samples} waves"
    )


def in_words(key: pb_common.DaemonKey) -> str:
    """`stage 1`, or `stage 1 rank 2`."""
    from wavepp_proto import convert

    return convert.daemon_key_from_pb(key).place


def requests(live: list[pb.RequestStatus]) -> Table:
    from rich.table import Table

    table = Table()
    for at, column in enumerate(REQUEST_COLUMNS):
        table.add_column(column, overflow="fold", no_wrap=at >= REQUEST_FIGURES)
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
