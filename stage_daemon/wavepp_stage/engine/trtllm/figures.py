"""What is known of a TensorRT-LLM cache without asking its manager, and how that is brought up to date.

Owns counts, digest and invariants of `cache.py`, whose base it is: everything that any thread may read beside a wave.
The two steps that bring news are `_ready` and `_settle`, on the executor's thread, around each job.
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp_proto.errors import InternalError
from wavepp_proto.hashing import blocks_for
from wavepp_proto.terms import CacheGroup, Capacity, Digest, HoldKey, HoldState, JoinPlan
from wavepp_stage.core.cache_manager import ENOUGH, Shortfall
from wavepp_stage.core.census import Census
from wavepp_stage.core.digest_feed import DigestFeed
from wavepp_stage.core.digest_feed import Residents as Shown
from wavepp_stage.core.holds import Phase
from wavepp_stage.engine.trtllm.desk import NO_ROOM, Desk, DeskOwner
from wavepp_stage.engine.trtllm.holds import TrtllmHold
from wavepp_stage.engine.trtllm.kv_events import Residents
from wavepp_stage.engine.trtllm.plain import Room

_RESERVED = (Phase.ESCROWED, Phase.COMMITTED, Phase.OWNED)
_WAITING = (Phase.LEASED, Phase.ESCROWED, Phase.COMMITTED)


class Figures:
    """State of the cache adapter, and its facts."""

    def __init__(self, owner: DeskOwner, plan: JoinPlan, feed: DigestFeed, residents: Residents) -> None:
        self.floor_blocks = plan.floor_blocks
        self._block_tokens = plan.block_tokens
        self._planned = (Room(plan.pool_blocks, plan.pool_blocks, 0), NO_ROOM)
        self._feed = feed
        self._residents = residents
        self._owner = owner
        self._desk: Desk | None = None
        self._lost_events = False
        """The digest shows nothing until the manager can be made to have nothing."""
        self._holds: dict[HoldKey, TrtllmHold] = {}
        self._dying: dict[int, list[TrtllmHold]] = {}
        """Holds of ended formations, until the executor's thread gives their pages back."""
        self._capacity = Capacity(seq=0, free_blocks=0, evictable_blocks=0)
        self._waits: tuple[int, ...] = ()

    # --- news -------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Any thread: another load means another manager, of which nothing is known to be resident."""
        desk = self._owner.desk
        if desk is not self._desk:
            self._desk = desk
            self._lost_events = False
            self._residents.lose()

    def _ready(self) -> Desk | None:
        """The desk, if it may be asked. Holds of another cache on it are over, and so is what that one knew."""
        self._adopt()
        desk = self._desk
        if desk is None or desk.fault:
            return None
        if desk.user is not self:
            with desk.guarded("start over"):
                desk.start_over()
            desk.user = self
        return desk

    def _settle(self, desk: Desk) -> None:
        """After a job: take the manager's events, and look how full it is."""
        events = desk.take_events()
        if not self._lost_events and not self._residents.apply(events):
            self._lost_events = True
            self._residents.lose()
        if self._lost_events and not self._holds and not self._dying:
            desk.forget_reuse()
            self._lost_events = False
        desk.look()

    # --- holds ------------------------------------------------------------------------------------

    def _hold(self, key: HoldKey) -> TrtllmHold:
        hold = self._holds.get(key)
        if hold is None:
            raise InternalError("no such hold", request_id=key.request_id, attempt=key.attempt)
        return hold

    def _demand(self, hold: TrtllmHold) -> int:
        """Blocks of the prompt that are not leased on the device."""
        leased = self._residents.on_device(hold.hashes.shorts[: hold.leased_blocks])
        return blocks_for(hold.prompt_tokens, self._block_tokens) - leased

    def _missing(self, hold: TrtllmHold) -> Shortfall:
        """What lacks for the rest of the prompt, the floor respected."""
        alone = not any(other is not hold and other.phase in _WAITING for other in self._holds.values())
        floor = 0 if hold.ignore_floor and alone else self.floor_blocks
        short = self._demand(hold) + floor - hold.desk.rooms[0].available
        return Shortfall(short) if short > 0 else ENOUGH

    # --- facts ------------------------------------------------------------------------------------

    def _rooms(self) -> tuple[Room, Room]:
        self._adopt()
        return self._planned if self._desk is None else self._desk.rooms

    def capacity(self) -> Capacity:
        device, host = self._rooms()
        counts = (device.free, device.evictable, 0, host.free)
        waits = (*counts, self.floor_blocks, sum(hold.phase in _WAITING for hold in self._holds.values()))
        if waits != self._waits:
            self._waits = waits
            self._capacity = Capacity(self._capacity.seq + 1, *counts)
        return self._capacity

    @property
    def pool_blocks(self) -> int:
        """What the manager got, which may be more or less than was planned."""
        return self._rooms()[0].total

    @property
    def cached_blocks(self) -> int:
        return self._rooms()[0].evictable

    @property
    def quarantined_blocks(self) -> int:
        device = self._rooms()[0]
        dying = sum(hold.own_blocks(self._block_tokens) for group in self._dying.values() for hold in group)
        return min(dying, device.total - device.available)

    @property
    def state_slots(self) -> int:
        return 0

    @property
    def cached_states(self) -> int:
        return 0

    @property
    def quarantined_states(self) -> int:
        return 0

    @property
    def host_pool_blocks(self) -> int:
        return self._rooms()[1].total

    @property
    def host_cached_blocks(self) -> int:
        return self._rooms()[1].evictable

    def census(self) -> Census:
        device, host = self._rooms()
        quarantined = self.quarantined_blocks
        return Census(
            free=device.free,
            cached=device.evictable,
            held=device.total - device.available - quarantined,
            quarantined=quarantined,
            evicted=self._residents.evicted,
            leases=sum(hold.phase in _WAITING for hold in self._holds.values()),
            offloaded=self._residents.offloaded,
            onboarded=self._residents.onboarded,
            host_free=host.free,
            host_cached=host.evictable,
            host_held=host.total - host.available,
        )

    def hold_state(self, key: HoldKey) -> HoldState | None:
        hold = self._holds.get(key)
        return None if hold is None else hold.state(self._block_tokens)

    def inventory(self) -> tuple[HoldState, ...]:
        return tuple(hold.state(self._block_tokens) for hold in self._holds.values())

    def digests_since(self, seq: int) -> Sequence[Digest]:
        self._adopt()
        return self._feed.since(seq, self._shown, self.capacity())

    def _shown(self) -> Shown:
        return {CacheGroup.ATTENTION: self._residents.shorts()}

    def check(self) -> None:
        """Verify what is ours to verify, from plain data alone; raises InternalError naming the broken rule."""
        for hold in self._holds.values():
            _require((hold.request is not None) is (hold.phase in _RESERVED), "a reservation from the escrow on", hold)
            _require(hold.pin is None or hold.phase is Phase.LEASED, "a pin while leased alone", hold)
        if self._desk is not None and self._desk.user is self and not self._desk.fault:
            running = {key for key, hold in self._holds.items() if hold.phase is Phase.OWNED}
            running |= {hold.key for group in self._dying.values() for hold in group if hold.key in self._desk.requests}
            _require(set(self._desk.requests) == running, "waves may name what is owned", None)
        self._feed.check(self._shown())


def _require(condition: bool, rule: str, hold: TrtllmHold | None) -> None:
    if not condition:
        raise InternalError(f"broken invariant: {rule}", field=rule, value=str(hold.key) if hold else "")
