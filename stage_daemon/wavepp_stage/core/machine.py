"""The stage daemon's core: events in, actions out.

    standing ──Join──▶ serving ──FormationEnd, Join, higher epoch, silence──▶ standing (the cache stays)

Owns authority (epoch, formation, incarnation), the formation in service and the order in which its
parts hear of things. Does not own time, threads or bytes: a shell calls `handle` under one mutex. The
fence is checked by gate.py before any handler, the controller's silence (silence.py) behind it; handlers
never look at epochs, incarnations or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from wavepp_proto.errors import FormationEnded as FormationEndedError
from wavepp_proto.errors import InternalError, InvalidRequest, QueueFull, StaleMessage
from wavepp_proto.fence import NO_EPOCH, NO_FORMATION, Standing, check_fence
from wavepp_proto.terms import (
    AnnounceAck,
    Capacity,
    Digest,
    Epoch,
    Fence,
    HoldKey,
    Incarnation,
    Inventory,
    JoinPlan,
    TraceContext,
    WaveOrdinal,
)
from wavepp_stage.core import events as ev
from wavepp_stage.core.announcements import MAX_ANNOUNCED, Announcements
from wavepp_stage.core.block_cache import BlockCache
from wavepp_stage.core.cache_manager import CacheManager
from wavepp_stage.core.cache_shape import CacheShape
from wavepp_stage.core.census import Census
from wavepp_stage.core.digest_feed import DigestFeed
from wavepp_stage.core.gate import OF_THE_CONTROLLER, check_event
from wavepp_stage.core.holds import IllegalTransition, Phase
from wavepp_stage.core.join_plan import check_plan, needs_rebuild
from wavepp_stage.core.lot_numbers import LotNumbers
from wavepp_stage.core.served_formation import ServedFormation
from wavepp_stage.core.stage_inventory import NO_CAPACITY, list_inventory

MakeCache = Callable[[JoinPlan, DigestFeed], CacheManager]


def block_cache(plan: JoinPlan, feed: DigestFeed) -> CacheManager:
    """The cache manager of engines that leave their cache to us."""
    shape = CacheShape(
        plan.pool_blocks,
        plan.block_tokens,
        plan.floor_blocks,
        plan.host_pool_blocks,
        plan.state_slots,
        plan.groups,
    )
    return BlockCache(shape, feed)


class StageMachine:
    """One stage daemon's core; Reincarnate makes it the core of the next incarnation."""

    def __init__(
        self, incarnation: Incarnation, make_cache: MakeCache = block_cache, most_announced: int = MAX_ANNOUNCED
    ) -> None:
        self.standing = Standing(NO_EPOCH, NO_FORMATION, incarnation)
        self.plan: JoinPlan | None = None
        """The last plan joined; its pool and cache outlive its formation."""
        self._make_cache = make_cache
        self._feed = DigestFeed(incarnation)
        self._cache: CacheManager | None = None
        self._lots = LotNumbers()
        self._announcements = Announcements(self._is_held, most_announced)
        self._serving: ServedFormation | None = None
        self._room = (0, 0)
        """Room after the last event (blocks, slots): digest readers are woken when one of them grows."""
        self._told = 0
        """Changes of the feed that readers were woken for."""

    # --- the only door ----------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[ev.Action]:
        """Apply one event. Raises the typed error of whoever sent it; then nothing was applied.

        A broken invariant is nobody's message: it comes back as a CoreError."""
        check_event(event, self.standing)
        return self._answer(lambda: self._act(event))

    def fence_deadline(self) -> float | None:
        """When (s) the shell calls `fence_if_silent`, unless the controller is heard before; None: not at all."""
        return self._serving.silence.deadline if self._serving else None

    def fence_if_silent(self, now: float) -> list[ev.Action]:
        """The shell's timer: the answer of a late event once the deadline is reached, nothing before."""
        deadline = self.fence_deadline()
        if deadline is None or now < deadline:
            return []
        return self._answer(lambda: self._fence_self(now))

    def _answer(self, act: Callable[[], list[ev.Action]]) -> list[ev.Action]:
        """What `act` causes, behind it the copies that it made due, and whether digest readers are to be woken."""
        try:
            actions = act()
            if self._cache is not None:
                actions += [ev.StartCopies(lot) for lot in self._lots.take(self._cache)]
        except (InternalError, IllegalTransition) as error:
            return [ev.CoreError(error.info())]
        if self._has_news():
            actions.append(ev.DigestChanged())
        return actions

    def _act(self, event: ev.Event) -> list[ev.Action]:
        if isinstance(event, OF_THE_CONTROLLER) and self._lapsed(event.now):
            return self._fence_self(event.now)
        return self._dispatch(event)

    def _dispatch(self, event: ev.Event) -> list[ev.Action]:
        match event:
            case ev.InventoryAsked():
                return self._take_inventory(event)
            case ev.JoinAsked():
                return self._join(event)
            case ev.FormationEnd():
                return self._end_formation()
            case ev.Announced():
                return self._announce(event)
            case ev.RoundArrived():
                return [ev.SendVotes(self._served().rounds.apply(event.round, event.announces))]
            case ev.WaveArrived():
                accepted = self._served().waves.accept(event.command)
                return [ev.WaveQueued(event.command)] if accepted else []
            case ev.ReleaseArrived():
                return self._release(event)
            case ev.ControllerHeard():
                self._served().silence.hear(event.now)
                return []
            case ev.Reincarnate():
                return self._reincarnate(event)
            case ev.PrepareWave():
                return self._served().prepare_wave(event.ordinal)
            case ev.WaveRetired():
                return self._served().retire_wave(event)
            case ev.ExecutorStopped():
                if self._cache is not None:
                    self._cache.executor_stopped(event.formation)
                return []
            case ev.CopiesEnded():
                if self._cache is not None:
                    self._lots.ended(self._cache, event.number, event.ok)
                return []

    # --- authority --------------------------------------------------------------------------------

    def _take_inventory(self, event: ev.InventoryAsked) -> list[ev.Action]:
        """Fence first: what the inventory lists is there, and no older authority can change it any more."""
        ended = self._install_epoch(event.fence.epoch)
        inventory = list_inventory(event.fence, self._cache, self._announcements, self._serving)
        return [*ended, ev.InventoryTaken(inventory)]

    def _install_epoch(self, epoch: Epoch) -> list[ev.Action]:
        """A new authority counts its formations anew, and knows nothing of what an older one ran."""
        if epoch == self.standing.epoch:
            return []
        self.standing = replace(self.standing, epoch=epoch, formation=NO_FORMATION)
        return self._end_formation()

    def _join(self, event: ev.JoinAsked) -> list[ev.Action]:
        plan, old = event.plan, self.plan
        if plan.fence.epoch == self.standing.epoch and plan.fence.formation <= self.standing.formation:
            raise StaleMessage(
                "the formation is not a new one",
                field="formation",
                value=plan.fence.formation,
                limit=self.standing.formation,
            )
        check_plan(plan)
        ended = self._serving.formation if self._serving else NO_FORMATION
        self._install_epoch(plan.fence.epoch)
        self._end_formation()
        rebuild = needs_rebuild(old, plan)
        if rebuild or self._cache is None:
            self._cache = self._make_cache(plan, self._feed)
            self._lots.cache_replaced()
        self._cache.floor_blocks = plan.floor_blocks
        self.plan = plan
        self.standing = replace(self.standing, formation=plan.fence.formation)
        self._serving = ServedFormation(plan, self._cache, self._announcements)
        return [ev.FormationStarted(plan, rebuild, ended)]

    def _end_formation(self) -> list[ev.Action]:
        """Every hold ends, and every announcement: the next formation announces later attempts."""
        serving, self._serving = self._serving, None
        if serving is None or self._cache is None:
            return []
        formation = serving.formation
        self._cache.end_formation(formation)
        self._announcements.clear()
        return [ev.FormationEnded(formation)]

    def _lapsed(self, now: float) -> bool:
        return self._serving is not None and self._serving.silence.lapsed(now)

    def _fence_self(self, now: float) -> list[ev.Action]:
        """Somebody else may have taken over long ago: nothing that this controller asked for is done any more."""
        silent_s = self._served().silence.lasts(now)
        return [*self._end_formation(), ev.SelfFenced(silent_s)]

    def _reincarnate(self, event: ev.Reincarnate) -> list[ev.Action]:
        """Epoch and formation stay: what was too old for this stage is too old for its next life."""
        ended = self._end_formation()
        self._announcements.clear()
        self.standing = replace(self.standing, incarnation=event.incarnation)
        self._feed.reincarnate(event.incarnation)
        return ended

    # --- admission --------------------------------------------------------------------------------

    def _announce(self, event: ev.Announced) -> list[ev.Action]:
        """A refusal is one request's: it is answered, and the stream goes on."""
        frame, block_tokens = event.frame, self._served().plan.block_tokens
        try:
            complete = self._announcements.add(frame, block_tokens)
        except (InvalidRequest, QueueFull) as error:
            return [ev.SendAck(AnnounceAck(frame.fence, frame.key, refused=error.info()))]
        return [ev.SendAck(AnnounceAck(frame.fence, frame.key))] if complete else []

    def _release(self, event: ev.ReleaseArrived) -> list[ev.Action]:
        """A release from an older formation finds its hold gone: only the announcement is left."""
        serving, key = self._serving, event.release.key
        if serving is not None and event.fence.formation == serving.formation:
            serving.release(event.release)
        elif event.release.ended and not self._is_held(key):
            self._announcements.forget(key)
        return []

    # --- what the shell may ask -------------------------------------------------------------------

    @property
    def unadmitted_requests(self) -> int:
        """Requests announced here that do not run yet."""
        running = len(self._serving.sequences) if self._serving else 0
        return len(self._announcements) - running

    def void_bitmap(self, ordinal: WaveOrdinal) -> int:
        """Rows of an accepted wave that are void by now: ask before a wave prepared ahead runs."""
        return self._served().waves.void_bitmap(ordinal)

    def inventory(self) -> Inventory:
        """Every hold and announcement, without asking for authority."""
        fence = Fence(self.standing.epoch, self.standing.formation, self.standing.incarnation)
        return list_inventory(fence, self._cache, self._announcements, self._serving)

    def check_reader(self, fence: Fence) -> None:
        """Gate of the digest stream: raises StaleMessage."""
        check_fence(fence, self.standing)

    def trace_of(self, key: HoldKey) -> TraceContext | None:
        """Context that the request was announced with; None if it is unknown here."""
        announcement = self._announcements.get(key)
        return announcement.trace if announcement is not None else None

    @property
    def pool_blocks(self) -> int:
        """As the cache has it: a manager of an engine's own may have got less memory than was planned."""
        return self._cache.pool_blocks if self._cache else 0

    @property
    def host_pool_blocks(self) -> int:
        """The same of its host tier."""
        return self._cache.host_pool_blocks if self._cache else 0

    def capacity(self) -> Capacity:
        return self._cache.capacity() if self._cache else NO_CAPACITY

    def census(self) -> Census:
        return self._cache.census() if self._cache else Census()

    def digests_since(self, seq: int) -> Sequence[Digest]:
        """What a reader at `seq` has not seen; nothing before the first join."""
        return self._cache.digests_since(seq) if self._cache else []

    def check(self) -> None:
        """Verify every invariant; raises InternalError naming the broken one."""
        self._announcements.check()
        if self._cache is not None:
            self._cache.check()
        if self._serving is not None:
            self._serving.check()
        holds = self._cache.inventory() if self._cache else ()
        owned = {state.key for state in holds if state.phase == Phase.OWNED.value}
        running = set(self._serving.sequences) if self._serving else set()
        if owned != running:
            raise InternalError("what runs is not what owns blocks", field="running", value=str(owned ^ running))

    # --- parts ------------------------------------------------------------------------------------

    def _served(self) -> ServedFormation:
        if self._serving is None:
            raise FormationEndedError("no formation is in service", formation=self.standing.formation)
        return self._serving

    def _is_held(self, key: HoldKey) -> bool:
        return self._cache is not None and self._cache.hold_state(key) is not None

    def _has_news(self) -> bool:
        """Residency changed, or there is more room than readers were last told."""
        now, told = self.capacity(), self._room
        blocks = now.free_blocks + now.evictable_blocks - now.escrowed_blocks
        states = now.recurrent_free + now.recurrent_evictable - now.recurrent_escrowed
        news = blocks > told[0] or states > told[1] or self._feed.changes != self._told
        self._room, self._told = (blocks, states), self._feed.changes
        return news
