"""What must be true of the whole cluster, beyond what each core checks of itself (DESIGN.md section 11).

Owns the list of rows that each formation executed (I1), what a drained stage may still hold (I2), and
that stages agree with what a client is told. Reads both cores, changes neither. The engine has I3, the
clients I4, the world I5.
"""

from __future__ import annotations

from collections.abc import Iterable

from wavepp_proto.hashing import blocks_for
from wavepp_proto.terms import Admitted, Epoch, Formation, HoldKey, Inventory, Row, WaveOrdinal
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
        self, epoch: Epoch, formation: Formation, stage: int, ordinal: WaveOrdinal, rows: Iterable[Row]
    ) -> None:
        waves, mine = self._executed.setdefault((epoch, formation), []), tuple(rows)
        if ordinal == len(waves) + 1:
            waves.append(mine)
        elif ordinal > len(waves) + 1:
            raise Violation("I1", f"stage {stage} skipped to wave {ordinal} of formation {formation}")
        elif waves[ordinal - 1] != mine:
            raise Violation("I1", f"stage {stage} executed other rows in wave {ordinal} of formation {formation}")


def check_sums(stage: int, found: Inventory) -> None:
    """Always: free + cached + held + quarantined = pool, as far as an inventory shows it."""
    capacity = found.capacity
    rest = found.pool_blocks - capacity.free_blocks - found.cached_blocks - found.quarantined_blocks
    private = sum(hold.owned_blocks for hold in found.holds)
    if rest < private or capacity.evictable_blocks != found.cached_blocks:
        raise Violation("I2", f"stage {stage}: {private} private blocks of {rest} held; {capacity}")
    if capacity.escrowed_blocks != sum(hold.escrow_blocks for hold in found.holds):
        raise Violation("I2", f"stage {stage}: escrows do not add up to {capacity.escrowed_blocks}")


def check_drained(stage: int, found: Inventory) -> None:
    """I2, when every request ended and nothing is under way."""
    if found.holds or found.quarantined_blocks or found.capacity.escrowed_blocks:
        raise Violation("I2", f"stage {stage} still holds {found.holds or found.capacity} after everything ended")
    if found.announced:
        raise Violation("I2", f"stage {stage} still remembers {found.announced} after everything ended")
    if found.capacity.free_blocks + found.cached_blocks != found.pool_blocks:
        raise Violation("I2", f"stage {stage} lost blocks: {found.capacity} of {found.pool_blocks}")


def check_admitted(stage: int, machine: StageMachine, event: Admitted, prompt_tokens: int, block_tokens: int) -> None:
    """The endpoint that a client is told is held on every stage, with room for the rest."""
    key = HoldKey(event.request_id, event.attempt)
    held = next((hold for hold in machine.inventory().holds if hold.key == key), None)
    where = f"stage {stage} at the admission of {key}"
    if held is None or held.phase != "committed":
        raise Violation("agreement", f"{where} holds {held}")
    blocks = held.leased_blocks + held.escrow_blocks
    if held.endpoint != event.endpoint or blocks != blocks_for(prompt_tokens, block_tokens):
        raise Violation("agreement", f"{where}: endpoint {held.endpoint}, not {event.endpoint}; {blocks} blocks")
