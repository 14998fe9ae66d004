"""Protocol bugs to plant in the real cores, and in what their shells owe them, each as one change of one function's
source.

A mutant names a function and a piece of its text that occurs there once; a text that no longer occurs is an
error, so a mutant cannot quietly stop being one. Planting changes the running process only: `hunt.py` is the
process. The simulator imports the mutated cores like the honest ones.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass
from types import FunctionType
from typing import Any

STAGE = "wavepp_stage.core"
CONTROLLER = "wavepp_controller.core"
SHELL = "wavepp_simulator"
"""The shells of the cores in virtual time, which follow those of the processes."""


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    module: str
    function: str
    """`Class.method` or a function of the module."""
    old: str
    new: str
    quick: bool = True
    """Caught soon enough for every test run."""


MUTANTS = (
    Mutant(
        "publish before compute",
        f"{STAGE}.block_cache",
        "BlockCache.publish",
        "tokens // self._block_tokens",
        "hold.prompt_tokens // self._block_tokens",
    ),
    Mutant(
        "lease released before escrow",
        f"{STAGE}.block_cache",
        "BlockCache.materialise",
        "hold.advance(HoldInput.MATERIALISE)",
        "hold.advance(HoldInput.MATERIALISE)\n        store.tree.drop(hold.chain)",
    ),
    Mutant(
        "lease not charged against evictable",
        f"{STAGE}.ledger",
        "Ledger.room",
        "self._store.tree.device.cached - self.escrowed",
        "self._store.tree.device.cached + len(hold.chain) - self.escrowed",
    ),
    Mutant(
        "restored snapshot not charged",
        f"{STAGE}.ledger",
        "Ledger.missing",
        "self._store.states.cached - self.escrowed_states",
        "self._store.states.cached + (hold.snapshot is not None) - self.escrowed_states",
    ),
    Mutant(
        "a stage forgotten in the minimum",
        f"{CONTROLLER}.reconcile",
        "decide",
        "min(hold.endpoint for hold in held.values())",
        "min(hold.endpoint for hold in [*held.values()][: max(1, len(held) - 1)])",
    ),
    Mutant(
        "ranks behind the first forgotten in the minimum",
        f"{CONTROLLER}.reconcile",
        "decide",
        "min(hold.endpoint for hold in held.values())",
        "min(hold.endpoint for key, hold in held.items() if key.rank == 0)",
    ),
    Mutant(
        "slot freed by the first rank of the last stage",
        f"{CONTROLLER}.ring",
        "Ring._free_slot",
        "if not flight.slot_held or flight.waiting_for & self._last_stage:",
        "if not flight.slot_held:",
    ),
    Mutant(
        "wave ordinal applied twice",
        f"{STAGE}.waves",
        "WaveOrder.accept",
        "        return False\n    if command.ordinal > wanted:",
        "        return command.ordinal in self._commands\n    if command.ordinal > wanted:",
    ),
    Mutant(
        "round ordinal applied twice",
        f"{STAGE}.rounds",
        "Rounds.apply",
        "if self._in_order and ordinal <= self.last:",
        "if self._in_order and ordinal < self.last:",
    ),
    Mutant(
        "round gap not noticed",
        f"{STAGE}.rounds",
        "Rounds.apply",
        "if self._in_order and ordinal != self.last + 1:",
        "if False:",
        quick=False,
    ),
    Mutant(
        "release without after_wave",
        f"{STAGE}.served_formation",
        "ServedFormation.release",
        "if after > self.waves.retired:",
        "if False:",
    ),
    Mutant(
        "inventory before fence",
        f"{STAGE}.machine",
        "StageMachine._take_inventory",
        "ended = self._install_epoch(event.fence.epoch)",
        "ended: list = []",
        quick=False,
    ),
    Mutant(
        "subtree dropped in two deltas, the root first",
        f"{STAGE}.digest_feed",
        "DigestFeed._number",
        "_packed([change for change in net if not change.added])",
        "({group: keys[at : at + 1]} for change in net if not change.added"
        " for group, keys in change.hashes.items() for at in range(len(keys) - 1, -1, -1))",
    ),
    Mutant(
        "blocks and snapshots published from a void row",
        f"{STAGE}.served_formation",
        "ServedFormation._settle",
        "self._cache.discard(row.key)",
        "self._cache.publish(row.key, row.start + row.length)",
    ),
    Mutant(
        "what computed NaN is published",
        f"{STAGE}.served_formation",
        "ServedFormation.retire_wave",
        "void = event.void_bitmap | self.waves.void_bitmap(event.ordinal)",
        "void = self.waves.void_bitmap(event.ordinal)",
    ),
    Mutant(
        "gap on a link not noticed",
        f"{SHELL}.executor",
        "SimExecutor.arrive",
        "ordinal=serving.last_arrived + 1",
        "ordinal=header.ordinal",
    ),
    Mutant(
        "payload of another wave not refused",
        "wavepp_stage.engine.base",
        "WaveHeader.check",
        "if got == want:",
        "if True:",
    ),
    Mutant(
        "onboard not awaited",
        f"{STAGE}.block_cache",
        "BlockCache.materialise",
        "if hold.after_lot > store.copies.ended:",
        "if False:",
    ),
    Mutant(
        "device block rewritten before its off-load is complete",
        f"{STAGE}.residency",
        "Residency.take_blocks",
        "lots[-1].copy.number if lots else 0",
        "0",
    ),
    Mutant(
        "host block freed before its copy is complete",
        f"{STAGE}.residency",
        "Residency.bring_back",
        "self._incoming[lot.nodes] = lot.copy.number",
        "self._incoming[lot.nodes] = lot.copy.number\n        self.tree.bring_back(nodes, blocks)",
    ),
    Mutant(
        "stale digest applied after a gap",
        "wavepp_proto.digest",
        "DigestCursor.offer",
        "if not self.in_sync or digest.seq != self.seq + 1:",
        "if self.in_sync and digest.seq > self.seq + 1:\n"
        "        for group in digest.groups:\n"
        "            self.sums[group.group] = _GroupSum(group.count, group.checksum)\n"
        "        self.seq = digest.seq\n"
        "        return Verdict.APPLY\n"
        "    if not self.in_sync:",
        quick=False,
    ),
    Mutant(
        "self-fence missing",
        f"{STAGE}.silence",
        "Silence.lapsed",
        "return deadline is not None and now > deadline",
        "return False",
        quick=False,
    ),
    Mutant(
        "engine that hangs not noticed",
        f"{CONTROLLER}.wave_watch",
        "WaveWatch.overdue",
        "if spent_s > limit_s else None",
        "if False else None",
    ),
    Mutant(
        "resend of waves forgotten",
        f"{CONTROLLER}.service",
        "Service.resume",
        "self._out.send(*self.execution.again(key))",
        "pass",
    ),
    Mutant(
        "resend of rounds forgotten",
        f"{CONTROLLER}.service",
        "Service.resume",
        "self._out.send(*self.rounds.again(key, now))",
        "pass",
    ),
    Mutant(
        "revise does not acquire the earlier snapshot",
        f"{STAGE}.block_cache",
        "BlockCache._lower",
        "self._store.states.hold(new.snapshot)",
        "pass",
    ),
    Mutant(
        "duplicate report counted twice",
        f"{CONTROLLER}.hearing",
        "Hearing._take_report",
        'self._out.count("duplicate_reports")',
        "service.report(daemon.key, event.report, event.now)",
    ),
    Mutant(
        "no quarantine at the end of a formation",
        f"{STAGE}.block_cache",
        "BlockCache.end_formation",
        "self._store.pool.quarantine(formation, hold.private_blocks)",
        "self._store.pool.give(hold.private_blocks)",
    ),
    Mutant(
        "wake-up for room lost",
        f"{CONTROLLER}.ready",
        "ReadyOrder._due",
        "return bool(shortages) and all(",
        "return False and all(",
    ),
    Mutant(
        "cancel leaves no tombstone",
        f"{STAGE}.announcements",
        "Announcements.forget",
        "_remember(self._tombstones, key)",
        "pass",
    ),
    Mutant(
        "round applied before what was announced in front of it",
        f"{STAGE}.rounds",
        "Rounds.apply",
        "    for frame in announces:\n        self._hear(frame)\n    for release in asked.releases:\n"
        "        self._release(release)\n    votes = [self._revise(revise) for revise in asked.revises]\n"
        "    votes += [self._prepare(prepare) for prepare in asked.prepares]\n",
        "    for release in asked.releases:\n"
        "        self._release(release)\n    votes = [self._revise(revise) for revise in asked.revises]\n"
        "    votes += [self._prepare(prepare) for prepare in asked.prepares]\n"
        "    for frame in announces:\n        self._hear(frame)\n",
    ),
    Mutant(
        "a stage of another dtype is taken",
        f"{CONTROLLER}.members",
        "_disagreement",
        "if value == limit:",
        'if value == limit or name == "dtype":',
    ),
    Mutant(
        "what rides is forgotten when streams are opened again",
        f"{SHELL}.link",
        "SimLink._connected",
        "self._opening, self._lost = Opening(self), False",
        "self._opening, self._lost = Opening(self), False\n    self._riding = Riding()",
    ),
)


def plant(name: str) -> None:
    """Change the running process. KeyError for an unknown mutant, ValueError for one whose text is gone."""
    mutant = {known.name: known for known in MUTANTS}[name]
    module = importlib.import_module(mutant.module)
    owner: Any = module
    *path, last = mutant.function.split(".")
    for part in path:
        owner = getattr(owner, part)
    honest = getattr(owner, last)
    source = textwrap.dedent(inspect.getsource(honest))
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.old!r} occurs {source.count(mutant.old)} times in {mutant.function}")
    changed: dict[str, Any] = {}
    text = "from __future__ import annotations\n" + source.replace(mutant.old, mutant.new)
    exec(compile(text, f"<{mutant.name}>", "exec"), module.__dict__, changed)
    made = changed[last]
    assert isinstance(made, FunctionType), "a mutant is a function"
    setattr(owner, last, made)
    if not path:  # whoever imported the function by its name has the honest one
        for other in [loaded for loaded in sys.modules.values() if getattr(loaded, last, None) is honest]:
            setattr(other, last, made)
