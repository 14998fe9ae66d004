"""TensorRT-LLM's own cache manager behind the core's CacheManager protocol (DESIGN.md section "The trtllm engine").

    lease (pin) ─▶ escrow (row, exactly R, all pages) ─▶ commit ─▶ materialise ─▶ publish for each row ─▶ release

Owns the holds, and what is known of the manager between its jobs (rooms, residents). Methods from `lease` to
`release`, and `executor_stopped`, run on the executor's thread; all others read plain data. What cannot be had is a
shortfall and never an exception; what fails unexpectedly fences the desk. The core holds the shell's mutex.
"""

from __future__ import annotations

from wavepp_proto.errors import InternalError
from wavepp_proto.hashing import blocks_for, reuse_cap
from wavepp_proto.terms import CacheGroup, GroupEndpoint, HoldKey, JoinPlan
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.block_tree import NO_BLOCKS
from wavepp_stage.core.cache_manager import ENOUGH, Escrow, Lease, Materialised, Shortfall, TokenIds
from wavepp_stage.core.digest_feed import DigestFeed
from wavepp_stage.core.holds import HoldInput, Phase
from wavepp_stage.core.work import BlockTable, CopyLot, StateWork
from wavepp_stage.engine.trtllm.desk import Desk, DeskOwner
from wavepp_stage.engine.trtllm.figures import Figures
from wavepp_stage.engine.trtllm.holds import TrtllmHold, namespace
from wavepp_stage.engine.trtllm.kv_events import Residents


class TrtllmCache(Figures):
    """Implements cache_manager.CacheManager."""

    def __init__(self, owner: DeskOwner, plan: JoinPlan, feed: DigestFeed) -> None:
        """`owner` is the engine: its desk stands for as long as a load does."""
        super().__init__(owner, plan, feed, Residents(feed))

    # --- admission --------------------------------------------------------------------------------

    def lease(
        self,
        key: HoldKey,
        prompt_tokens: int,
        hashes: BlockHashes,
        candidate: int,
        snapshots: int = 0,
        ignore_floor: bool = False,
        tokens: TokenIds | None = None,
    ) -> Lease:
        if key in self._holds:
            raise self._holds[key].illegal("lease")
        if tokens is None:
            raise InternalError("a prompt was announced without its tokens", field="token_ids", value=str(key))
        desk, need = self._ready(), blocks_for(prompt_tokens, self._block_tokens)
        if desk is None:
            return Lease(0, 0, shortfall=Shortfall(need))
        hold = TrtllmHold(key, prompt_tokens, hashes, ignore_floor, desk=desk, tokens=tokens.tolist(), salt=None)
        hold.salt = namespace(hold)
        with desk.guarded("hold a prefix"):
            own_hit = desk.probe(hold.tokens[: reuse_cap(prompt_tokens, self._block_tokens)], hold.salt)
            held = desk.pin(hold.tokens, hold.salt, min(candidate // self._block_tokens * self._block_tokens, own_hit))
            self._settle(desk)
        hits = (GroupEndpoint(CacheGroup.ATTENTION, own_hit),)
        if held is None:
            return Lease(0, own_hit, hits, Shortfall(1))
        hold.pin, reached = held
        hold.leased_blocks = reached // self._block_tokens
        missing = self._missing(hold)
        if missing:
            self._unpin(hold)
            return Lease(0, own_hit, hits, missing)
        self._holds[key] = hold
        return Lease(reached, own_hit, hits)

    def escrow(self, key: HoldKey) -> Escrow:
        hold = self._hold(key)
        hold.require(HoldInput.ESCROW)
        desk = self._ready()
        if desk is None or desk is not hold.desk:
            return self._answer(hold, Shortfall(1), self._demand(hold))
        demand = self._demand(hold)
        missing = self._missing(hold)
        if missing or not self._reserve(hold, hold.endpoint(self._block_tokens)):
            return self._answer(hold, missing or Shortfall(1), demand)
        self._unpin(hold)
        hold.advance(HoldInput.ESCROW)
        return self._answer(hold, ENOUGH, demand)

    def commit(self, key: HoldKey) -> Escrow:
        """What was escrowed is taken already: nothing can have become short."""
        hold = self._hold(key)
        hold.advance(HoldInput.COMMIT)
        return self._answer(hold, ENOUGH, hold.own_blocks(self._block_tokens))

    def revise(self, key: HoldKey, endpoint: int, snapshots: int = 0) -> Escrow:
        hold = self._hold(key)
        if hold.phase not in (Phase.ESCROWED, Phase.COMMITTED):
            raise hold.illegal("revise")
        desk, own = self._ready(), hold.own_blocks(self._block_tokens)
        if desk is None or desk is not hold.desk:
            return self._answer(hold, Shortfall(1), own)
        old = hold.endpoint(self._block_tokens)
        reached = self._lower(desk, hold, min(endpoint // self._block_tokens * self._block_tokens, old))
        if reached is None:
            return self._answer(hold, Shortfall(1), own)
        hold.leased_blocks = reached // self._block_tokens
        hold.advance(HoldInput.UNCOMMIT if hold.phase is Phase.COMMITTED else HoldInput.REVISE)
        if reached == endpoint:
            hold.advance(HoldInput.COMMIT)
        return self._answer(hold, ENOUGH, hold.own_blocks(self._block_tokens))

    def _lower(self, desk: Desk, hold: TrtllmHold, endpoint: int) -> int | None:
        """Exchange the reservation for one with a shorter prefix, which is pinned before anything is given up. None,
        and everything as it was, where that cannot be had: nobody takes pages in between on this thread."""
        old = hold.endpoint(self._block_tokens)
        if endpoint == old:
            return old
        with desk.guarded("lower a hold"):
            pinned = desk.pin(hold.tokens, hold.salt, endpoint)
            if pinned is None:
                return None
            hold.pin, reached = pinned
            self._give_back(hold)
            need = blocks_for(hold.prompt_tokens, self._block_tokens) - reached // self._block_tokens
            desk.look()
            if need <= desk.rooms[0].available and self._reserve(hold, reached):
                self._unpin(hold)
                return reached
            if not self._reserve(hold, old):
                raise InternalError("a hold could not be restored", field="endpoint", value=reached, limit=old)
            self._unpin(hold)
        return None

    def _reserve(self, hold: TrtllmHold, endpoint: int) -> bool:
        """Row, exact claim and pages, all or nothing; the prompt's blocks have names from now on."""
        desk = hold.desk
        with desk.guarded("reserve a prompt"):
            if not hold.keys:
                full = len(hold.hashes) * self._block_tokens
                hold.keys = desk.block_keys(hold.tokens[:full], hold.salt)
                self._residents.name(hold.keys, hold.hashes.shorts)
            device, host = desk.rooms
            need = blocks_for(hold.prompt_tokens, self._block_tokens) - endpoint // self._block_tokens
            free = min(device.free, need)
            offload = min(host.free, need - free)
            hold.backed = (free, offload, need - free - offload)
            hold.request = desk.reserve(hold.tokens, hold.salt, endpoint)
            self._settle(desk)
        return hold.request is not None

    def _answer(self, hold: TrtllmHold, missing: Shortfall, demand: int) -> Escrow:
        backed = (0, 0, 0) if missing else hold.backed
        return Escrow(hold.endpoint(self._block_tokens), demand, 0, missing, *backed)

    # --- execution --------------------------------------------------------------------------------

    def materialise(self, key: HoldKey) -> Materialised:
        """All was taken with the escrow: waves may name the sequence from now on."""
        hold = self._hold(key)
        hold.advance(HoldInput.MATERIALISE)
        hold.advance(HoldInput.INSTALL)
        if hold.request is not None:
            hold.desk.requests[key] = hold.request
        hold.tokens = []
        return Materialised.DONE

    def table(self, key: HoldKey) -> BlockTable:
        self._hold(key)
        return NO_BLOCKS

    def plan_state(self, key: HoldKey, start: int, snapshots: tuple[int, ...]) -> StateWork | None:
        self._hold(key)
        return None

    def publish(self, key: HoldKey, tokens: int) -> None:
        hold = self._hold(key)
        if hold.phase is not Phase.OWNED:
            raise hold.illegal("publish")
        if hold.void or hold.request is None or hold.desk.fault:
            return
        with hold.desk.guarded("commit blocks"):
            hold.desk.commit(hold.request)
            self._settle(hold.desk)

    def discard(self, key: HoldKey) -> None:
        """What it computes from now on is not committed."""
        hold = self._holds.get(key)
        if hold is not None:
            hold.void = True

    # --- giving back ------------------------------------------------------------------------------

    def release(self, key: HoldKey) -> None:
        hold = self._holds.pop(key, None)
        if hold is None:
            return
        hold.advance(HoldInput.RELEASE)
        self._let_go(hold)

    def end_formation(self, formation: int) -> None:
        """Any thread: what holds pages waits for the executor's thread, in quarantine."""
        for hold in self._holds.values():
            hold.advance(HoldInput.END_FORMATION)
            self._dying.setdefault(formation, []).append(hold)
        self._holds.clear()

    def executor_stopped(self, formation: int) -> None:
        for hold in self._dying.pop(formation, ()):
            self._let_go(hold)

    def _let_go(self, hold: TrtllmHold) -> None:
        self._residents.forget(hold.keys)
        hold.keys = []
        self._unpin(hold)
        self._give_back(hold)
        desk = self._ready()
        if desk is not None and desk is hold.desk:
            with desk.guarded("give pages back"):
                self._settle(desk)

    def _unpin(self, hold: TrtllmHold) -> None:
        pin, hold.pin = hold.pin, None
        if pin is not None and not hold.desk.fault:
            with hold.desk.guarded("let a prefix go"):
                hold.desk.unpin(pin)
                hold.desk.look()

    def _give_back(self, hold: TrtllmHold) -> None:
        """Once: a second release finds nothing."""
        request, hold.request = hold.request, None
        hold.desk.requests.pop(hold.key, None)
        if request is not None and not hold.desk.fault:
            with hold.desk.guarded("free a sequence"):
                hold.desk.free(request)

    # --- copies between the tiers -----------------------------------------------------------------

    def take_lots(self) -> list[CopyLot]:
        """The manager moves its own blocks."""
        return []

    def copied(self, number: int, ok: bool) -> None:
        raise InternalError("no lot was ever given out", field="lot", value=number)
