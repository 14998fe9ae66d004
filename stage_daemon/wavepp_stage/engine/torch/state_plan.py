"""What one wave does to recurrent state slots: checks, and each row's scan cut at its snapshots.

    start          p1            p2        end = start + length
      |--- scan ----|---- scan ---|-- scan --|
    source      snapshot 1    snapshot 2   working

Owns no memory. Called by `batch.py` once per wave, read by the recurrent layers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.base import EnginePlan, RowWork, StateWork


@dataclass(frozen=True, slots=True)
class Scan:
    """How one row's state moves."""

    source: int | None
    """Slot read before the first token; None is the empty state."""
    segments: tuple[tuple[int, tuple[int, ...]], ...]
    """(tokens of the chunk done, slots that the state is then stored in), ascending; the last one ends the chunk."""

    @property
    def written(self) -> tuple[int, ...]:
        """Every slot that the row writes."""
        return tuple(slot for _, slots in self.segments for slot in slots)


def make_scan(row: RowWork, state: StateWork) -> Scan:
    stores: dict[int, tuple[int, ...]] = {}
    for position, slot in (*state.snapshots, (row.start + row.length, state.working)):
        done = position - row.start
        stores[done] = (*stores.get(done, ()), slot)
    # At start 0 never what the slot holds: that was another sequence's.
    source = None if row.start == 0 else state.working if state.restore is None else state.restore
    return Scan(source, tuple(stores.items()))


def check_states(rows: tuple[RowWork, ...], plan: EnginePlan) -> None:
    """Raises EngineFault where live rows break the plan, or where the outcome would depend on the rows' order."""
    live = [(index, row.state) for index, row in enumerate(rows) if not row.void]
    states = [state for _, state in live if state is not None]
    for index, state in live:
        if state is None:
            raise EngineFault("a recurrent layer needs the row's state", field=f"rows[{index}].state", value="none")
        _check_positions(index, rows[index], state, plan.block_tokens)
        for slot in _slots(state):
            if not 0 <= slot < plan.state_slots:
                raise EngineFault("state slot outside the pool", field=f"rows[{index}].state", value=slot,
                                  limit=plan.state_slots)  # fmt: skip
    written = Counter(slot for state in states for slot in _written(state))
    restored = {state.restore for state in states}
    if clash := sorted(slot for slot, times in written.items() if times > 1 or slot in restored):
        raise EngineFault("state slots written twice, or restored and written, in one wave", field="state",
                          value=str(clash))  # fmt: skip


def _check_positions(index: int, row: RowWork, state: StateWork, block_tokens: int) -> None:
    end = row.start + row.length
    if state.restore is not None and row.start == 0:
        raise EngineFault("nothing to restore at start 0", field=f"rows[{index}].state.restore", value=state.restore)
    last = row.start
    for position, _ in state.snapshots:
        if not last < position <= end or position % block_tokens:
            raise EngineFault("snapshot positions must ascend in (start, end], on block boundaries",
                              field=f"rows[{index}].state.snapshots", value=position, limit=end)  # fmt: skip
        last = position


def _written(state: StateWork) -> tuple[int, ...]:
    return (state.working, *(slot for _, slot in state.snapshots))


def _slots(state: StateWork) -> tuple[int, ...]:
    return _written(state) if state.restore is None else (*_written(state), state.restore)
