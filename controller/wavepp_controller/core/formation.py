"""One life of a pipeline's links and wave order (DESIGN.md).

Owns the daemons of a formation: their fences, what they answered to Join, when they were last heard and
how much room they have. Says who is silent. Does not own requests, nor when to form: `pipeline` does.

    FormPipeline ──▶ joining ──all Joined──▶ serving ──▶ ended (silent, replaced, failed report, asked)
                        └──── JoinFailed or deadline ──────▲
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.headroom import headroom_blocks
from wavepp_controller.core.resume import Streams
from wavepp_controller.core.verdicts import PipelineFacts
from wavepp_proto import limits
from wavepp_proto.errors import JoinRefused, WaveppError
from wavepp_proto.fence import Standing, check_fence
from wavepp_proto.terms import (
    CacheGroup,
    Capacity,
    DaemonKey,
    Epoch,
    Fence,
    Formation,
    JoinPlan,
    JoinReply,
    LinkKind,
    MemberRecord,
    Peer,
    RoundOrdinal,
    StageTimes,
    WaveOrdinal,
)


@dataclass(slots=True)
class Daemon:
    """One daemon in one formation."""

    record: MemberRecord
    plan: JoinPlan
    reply: JoinReply | None = None
    last_heard: float = 0.0
    capacity: Capacity | None = None
    """The newest by seq, from whichever message brought it."""
    digest_at: float | None = None
    draining: bool = False
    """It wants to leave: nothing new is admitted, and the formation ends when nothing is held."""
    snapshot_due: float | None = None
    """When to ask (again) for a snapshot that is awaited; None while none is."""
    excesses: int = 0
    """Digests in a row that told of more than it has room for."""
    waves_done: int = 0
    times: StageTimes = StageTimes()
    """Sums since the formation began."""
    streams: Streams = field(default_factory=Streams)
    idle_since: float | None = None
    """Since when its heartbeats have said that it has no wave, though it owes reports; None while it owes none."""
    waits: tuple[WaveOrdinal, float] | None = None
    """The wave that it could execute by now and does not, and since when its heartbeats have said so."""
    executing: tuple[WaveOrdinal, float] | None = None
    """What its engine computed at its last heartbeat, and since when (event time)."""
    inventory_at: float | None = None
    """When its last inventory that was judged arrived."""
    orphans: int = 0
    """Holds and announcements found on it that nobody owned."""

    @property
    def key(self) -> DaemonKey:
        return self.record.key

    @property
    def pool_blocks(self) -> int:
        return self.plan.pool_blocks if self.reply is None else self.reply.pool_blocks

    @property
    def state_slots(self) -> int:
        return self.plan.state_slots if self.reply is None else self.reply.state_slots

    @property
    def host_pool_blocks(self) -> int:
        made = None if self.reply is None else self.reply.host_pool_blocks
        return self.plan.host_pool_blocks if made is None else made

    @property
    def most_indexed(self) -> int:
        """Blocks and snapshots that it has room for."""
        return self.pool_blocks + self.host_pool_blocks + self.state_slots

    def fence(self, ordinal: int = 0) -> Fence:
        ours = self.plan.fence
        return Fence(ours.epoch, ours.formation, ours.incarnation, ordinal)

    def check(self, fence: Fence) -> None:
        """The gate: StaleMessage unless the message belongs to this life of this daemon."""
        ours = self.plan.fence
        check_fence(fence, Standing(ours.epoch, ours.formation, ours.incarnation))

    def has(self, capacity: Capacity | None) -> None:
        if capacity is not None and (self.capacity is None or capacity.seq > self.capacity.seq):
            self.capacity = capacity

    def spent(self, times: StageTimes) -> None:
        total = self.times
        self.times = StageTimes(
            total.compute_us + times.compute_us,
            total.activation_wait_us + times.activation_wait_us,
            total.admission_wait_us + times.admission_wait_us,
            total.preparing_us + times.preparing_us,
            total.idle_us + times.idle_us,
        )


@dataclass(slots=True)
class PipelineFormation:
    number: Formation
    daemons: dict[DaemonKey, Daemon]
    """In (stage, rank) order."""
    join_deadline: float
    serving: bool = False
    symptom: WaveppError | None = None
    """A fault that a daemon reported and that a dead neighbour may have caused: whose stream ends tells which."""
    symptom_until: float = 0.0
    """When the formation ends for the symptom, if no cause has shown by then."""

    @property
    def stages(self) -> int:
        return next(iter(self.daemons.values())).plan.stages

    @property
    def ranks(self) -> int:
        return next(iter(self.daemons.values())).plan.ranks

    @property
    def block_tokens(self) -> int:
        return next(iter(self.daemons.values())).plan.block_tokens

    @property
    def wave_tokens(self) -> int:
        return next(iter(self.daemons.values())).plan.wave_tokens

    @property
    def round_tokens(self) -> int:
        """Most tokens that the prompts which one round prepares may have, and those that it releases; one prompt alone
        may have more."""
        read = any(daemon.reply is not None and daemon.reply.needs_tokens for daemon in self.daemons.values())
        return limits.ENGINE_ROUND_TOKENS if read else limits.MAX_LANES * limits.MAX_PROMPT_TOKENS

    @property
    def plans(self) -> tuple[JoinPlan, ...]:
        return tuple(daemon.plan for daemon in self.daemons.values())

    @property
    def draining(self) -> bool:
        return any(daemon.draining for daemon in self.daemons.values())

    @property
    def link(self) -> LinkKind:
        return next(iter(self.daemons.values())).plan.link

    def facts(self) -> PipelineFacts:
        """What the pipeline really is, by the daemons' answers to Join."""
        records = [
            replace(daemon.record, pool_blocks=daemon.pool_blocks, state_slots=daemon.state_slots)
            for daemon in self.daemons.values()
        ]
        return PipelineFacts.of(records)

    def fences(self) -> tuple[tuple[DaemonKey, Fence], ...]:
        return tuple((key, daemon.fence()) for key, daemon in self.daemons.items())

    def joined(self, daemon: Daemon, reply: JoinReply, now: float) -> bool:
        """Note one answer; True when it was the last one and the formation serves.

        JoinRefused if what the daemon loaded is not what it was to load, or does not fit what others loaded.
        """
        _check_groups(daemon, reply)
        _check_layers(daemon, reply)
        self._check_width(daemon, reply)
        daemon.reply = reply
        daemon.has(reply.capacity)
        if any(other.reply is None for other in self.daemons.values()):
            return False
        for other in self.daemons.values():
            other.last_heard = now
        self.serving = True
        return True

    def _check_width(self, daemon: Daemon, reply: JoinReply) -> None:
        for other in self.daemons.values():
            if other.reply is not None and other.reply.hidden != reply.hidden:
                what = f"its activation rows are {reply.hidden} wide, not {other.reply.hidden} as {other.key.place}'s"
                raise _unlike(daemon, what, "hidden", reply.hidden, other.reply.hidden)

    def excuse(self, pause: float, now: float) -> None:
        """Time in which the controller itself did not listen is nobody's silence."""
        for daemon in self.daemons.values():
            daemon.last_heard = min(now, daemon.last_heard + pause)
            if pause:
                daemon.idle_since = daemon.waits = None

    def silent(self, now: float, silence: float) -> Daemon | None:
        """The daemon that has been silent longest, if longer than `silence` seconds."""
        quietest = min(self.daemons.values(), key=lambda daemon: daemon.last_heard)
        return quietest if self.serving and now - quietest.last_heard > silence else None

    def next_silence(self, silence: float) -> float:
        return min(daemon.last_heard for daemon in self.daemons.values()) + silence


def _check_groups(daemon: Daemon, reply: JoinReply) -> None:
    if set(reply.groups) == set(daemon.plan.groups):
        return
    has, needs = (" ".join(sorted(group.value for group in groups)) for groups in (reply.groups, daemon.plan.groups))
    # Agreement would skip the group that it lacks.
    raise _unlike(daemon, f"groups are {has or 'none'}, its band needs {needs}", "groups", has, needs)


def _check_layers(daemon: Daemon, reply: JoinReply) -> None:
    """A daemon that lists what it loaded has loaded its band."""
    plan, loaded = daemon.plan, reply.loaded_layers
    if loaded and loaded != tuple(range(plan.first_layer, plan.last_layer)):
        has, band = f"{loaded[0]}:{loaded[-1] + 1} ({len(loaded)})", f"{plan.first_layer}:{plan.last_layer}"
        raise _unlike(daemon, f"it loaded layers {has}, its band is {band}", "loaded_layers", has, band)


def _unlike(daemon: Daemon, what: str, name: str, value: str | int, limit: str | int) -> JoinRefused:
    return JoinRefused(
        f"{daemon.key} at {daemon.record.address}: {what}",
        field=name,
        value=value,
        limit=limit,
        stage=daemon.key.stage,
        address=daemon.record.address,
    )


def align_wave_tokens(wave_tokens: int, block_tokens: int) -> int:
    """M rounded down to whole blocks, at least one: interior chunk ends lie on multiples of B, so a
    budget that is no multiple could never be filled. The plan and the status show what is really used.
    """
    return max(block_tokens, wave_tokens // block_tokens * block_tokens)


def choose_link(records: Mapping[DaemonKey, MemberRecord], forced: LinkKind | None) -> LinkKind:
    """The forced kind, else what every daemon can: nccl with a GPU for each alone, gloo with a torch.distributed
    store, else grpc.

    JoinRefused if a forced kind needs stores that are not there.
    """
    stages = next(iter(records.values())).stages
    if stages == 1:
        return LinkKind.NONE
    without = [record for record in records.values() if not record.link_address]
    if forced is None or forced is LinkKind.NONE:
        if without:
            return LinkKind.GRPC
        return LinkKind.NCCL if _own_gpus(records) else LinkKind.GLOO
    if forced in (LinkKind.GLOO, LinkKind.NCCL) and without:
        raise JoinRefused(
            f"{without[0].key} has no link address, which link {forced.value} needs",
            field="link",
            value=forced.value,
            limit=LinkKind.GRPC.value,
            stage=without[0].key.stage,
        )
    return forced


def _own_gpus(records: Mapping[DaemonKey, MemberRecord]) -> bool:
    """NCCL refuses a group in which two share a device."""
    gpus = {record.gpu for record in records.values()}
    return "" not in gpus and len(gpus) == len(records)


@dataclass(frozen=True, slots=True)
class Terms:
    """What an operator may change from formation to formation."""

    link: LinkKind | None
    wave_tokens: int


def draw_up(
    records: Mapping[DaemonKey, MemberRecord],
    number: Formation,
    epoch: Epoch,
    terms: Terms,
    config: ControllerConfig,
    rounds: Mapping[DaemonKey, RoundOrdinal],
    now: float,
) -> PipelineFormation:
    """The formation of `records` (complete, (stage, rank) order), with one join plan per daemon; `rounds` are the
    ordinals of their next rounds."""
    link = choose_link(records, terms.link)
    first = next(iter(records.values()))
    peers = tuple(
        Peer(key, r.incarnation, r.address, r.link_address, r.first_layer, r.last_layer, r.engine_load, r.pool_blocks)
        for key, r in records.items()
    )
    wave_tokens = align_wave_tokens(terms.wave_tokens, first.block_tokens)
    floor = config.floor_blocks
    if floor is None:
        smallest = min(record.pool_blocks for record in records.values())
        floor = headroom_blocks(first.stages, wave_tokens, first.block_tokens, smallest)
    daemons = {
        key: Daemon(
            record,
            JoinPlan(
                fence=Fence(epoch, number, record.incarnation),
                key=key,
                stages=record.stages,
                ranks=record.ranks,
                model_fingerprint=record.model.fingerprint,
                first_layer=record.first_layer,
                last_layer=record.last_layer,
                block_tokens=record.block_tokens,
                pool_blocks=record.pool_blocks,
                host_pool_blocks=record.host_pool_blocks,
                floor_blocks=floor,
                wave_tokens=wave_tokens,
                lanes=config.lanes,
                link=link,
                link_store=first.link_address if link in (LinkKind.GLOO, LinkKind.NCCL) else "",
                peers=peers,
                deadline_ms=config.join_deadline_ms,
                heartbeat_ms=config.heartbeat_ms,
                silence_ms=config.silence_ms,
                state_slots=record.state_slots if CacheGroup.RECURRENT in record.groups else 0,
                groups=record.groups,
                first_round=rounds[key],
            ),
        )
        for key, record in records.items()
    }
    return PipelineFormation(number, daemons, now + config.join_deadline_ms / 1e3)
