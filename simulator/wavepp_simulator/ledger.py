"""What must be true of the whole cluster, beyond what each core checks of itself (DESIGN.md).

Owns the list of rows that each formation executed (I1), what a drained stage may still hold (I2), and
that stages agree with what a client is told. Reads both cores, changes neither. The engine has I3, the
clients I4, the world I5.
"""

from __future__ import annotations

from collections.abc import Iterable

from wavepp_proto.hashing import blocks_for
from wavepp_proto.terms import Admitted, Epoch, Formation, HoldKey, Inventory, Row, VoteOutcome, Votes, WaveOrdinal
from wavepp_stage.core.machine import StageMachine


class Violation(AssertionError):
    """An invariant is broken: the history up to here is the counterexample."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class Ledger:
    """I1: within a formation all stages executed the same ordered list of rows."""

    def __init__(self) -> None:
        self._executed: dict[tuple[Epoch, Formation], list[tuple[Row, ...]]] = {}
        """Rows by wave, as the first stage to get there executed them."""

    def executed(
        self, epoch: Epoch, formation: Formation, stage: str, ordinal: WaveOrdinal, rows: Iterable[Row]
    ) -> None:
        waves, mine = self._executed.setdefault((epoch, formation), []), tuple(rows)
        if ordinal == len(waves) + 1:
            waves.append(mine)
        elif ordinal > len(waves) + 1:
            raise Violation("I1", f"stage {stage} skipped to wave {ordinal} of formation {formation}")
        elif waves[ordinal - 1] != mine:
            raise Violation("I1", f"stage {stage} executed other rows in wave {ordinal} of formation {formation}")


def check_sums(stage: str, found: Inventory) -> None:
    """Always: free + cached + held + quarantined = pool on every group and tier, as far as an inventory shows it."""
    capacity, holds = found.capacity, found.holds
    blocks = (
        found.pool_blocks - capacity.free_blocks - found.cached_blocks - found.quarantined_blocks,
        sum(hold.owned_blocks for hold in holds),
    )
    states = (
        found.state_slots - capacity.recurrent_free - found.cached_states - found.quarantined_states,
        sum(hold.owned_states for hold in holds),
    )
    for name, (rest, private) in (("blocks", blocks), ("state slots", states)):
        if rest < private:
            raise Violation("I2", f"stage {stage}: {private} private {name} of {rest} held; {capacity}")
    if found.host_pool_blocks - capacity.host_free_blocks - found.host_cached_blocks < 0:
        raise Violation("I2", f"stage {stage}: {found.host_cached_blocks} cached host blocks; {capacity}")
    if (capacity.evictable_blocks, capacity.recurrent_evictable) != (found.cached_blocks, found.cached_states):
        raise Violation("I2", f"stage {stage}: what is evictable is not what is cached; {capacity}")
    promised = (sum(hold.escrow_blocks for hold in holds), sum(hold.escrow_states for hold in holds))
    if promised != (capacity.escrowed_blocks, capacity.recurrent_escrowed):
        raise Violation("I2", f"stage {stage}: escrows add up to {promised}; {capacity}")


def check_drained(stage: str, found: Inventory) -> None:
    """I2, when every request ended and nothing is under way."""
    capacity = found.capacity
    if found.holds or found.quarantined_blocks or found.quarantined_states:
        raise Violation("I2", f"stage {stage} still holds {found.holds or found} after everything ended")
    if capacity.escrowed_blocks or capacity.recurrent_escrowed:
        raise Violation("I2", f"stage {stage} still promises {capacity} after everything ended")
    if found.announced:
        raise Violation("I2", f"stage {stage} still remembers {found.announced} after everything ended")
    sums = (
        (capacity.free_blocks + found.cached_blocks, found.pool_blocks),
        (capacity.host_free_blocks + found.host_cached_blocks, found.host_pool_blocks),
        (capacity.recurrent_free + found.cached_states, found.state_slots),
    )
    if any(there != pool for there, pool in sums):
        raise Violation("I2", f"stage {stage} lost blocks or slots: {found}")


def check_known(stage: str, machine: StageMachine, votes: Votes) -> None:
    """A daemon that has heard of a request, be it in front of this very round, does not deny it."""
    known = machine.inventory().announced
    denied = [v.key for v in votes.votes if v.outcome is VoteOutcome.NOT_ANNOUNCED and v.key in known]
    if denied:
        raise Violation("announce", f"stage {stage} says in votes {votes.fence.ordinal} that it does not know {denied}")


def check_admitted(stage: str, machine: StageMachine, event: Admitted, prompt_tokens: int, block_tokens: int) -> None:
    """The endpoint that a client is told is held on every stage, with room for the rest on the device."""
    key, found = HoldKey(event.request_id, event.attempt), machine.inventory()
    held = next((hold for hold in found.holds if hold.key == key), None)
    where = f"stage {stage} at the admission of {key}"
    if held is None or held.phase != "committed":
        raise Violation("agreement", f"{where} holds {held}")
    blocks, covered = blocks_for(prompt_tokens, block_tokens), held.leased_blocks + held.escrow_blocks
    # What is leased on the host is promised room on the device as well.
    enough = covered >= blocks and (covered == blocks or bool(found.host_pool_blocks))
    if held.endpoint != event.endpoint or not enough or bool(held.escrow_states) != bool(found.state_slots):
        raise Violation("agreement", f"{where}: admitted at {event.endpoint} of {blocks} blocks, but it holds {held}")
