"""What a daemon holds, compared with what it should hold (DESIGN.md).

Owns when inventories are asked for and the comparison: holds and announcements that nobody owns, admitted
requests whose hold is gone, waves that were executed differently. Acting on the findings is `service`'s
business. An inventory is older than its arrival, so nothing is judged by what may have changed since:

    ask: who must be held there ──▶ taken on the daemon ──▶ arrives: who may not be held there
         (admitted by now)          at some moment between       (ended before every round and wave it shows)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wavepp_controller.core.admission import Admission
from wavepp_controller.core.book import RequestBook
from wavepp_controller.core.events import AskInventory
from wavepp_controller.core.execution import Execution
from wavepp_controller.core.formation import Daemon, PipelineFormation
from wavepp_controller.core.outbox import Outbox
from wavepp_controller.core.request import Request
from wavepp_controller.core.rounds import RoundBook
from wavepp_proto.errors import InternalError
from wavepp_proto.terms import DaemonKey, HoldKey, Inventory, Release, RoundOrdinal, WaveOrdinal


@dataclass(frozen=True, slots=True)
class _Asked:
    number: int
    """In the fence's ordinal, and given back: an earlier inventory that comes late is not taken for this one."""
    answered: RoundOrdinal
    reported: WaveOrdinal
    admitted: dict[HoldKey, Request]
    """Committed on every daemon by now: the inventory must show a hold of each that still runs when it comes."""


@dataclass(slots=True)
class Findings:
    orphans: list[Release] = field(default_factory=list)
    """Holds and announcements to be let go of."""
    lost: list[Request] = field(default_factory=list)
    """Admitted requests that this daemon holds nothing for."""


class InventoryCheck:
    """Of all daemons of one serving formation."""

    def __init__(
        self,
        formation: PipelineFormation,
        rounds: RoundBook,
        admission: Admission,
        execution: Execution,
        book: RequestBook,
        period_s: float,
        out: Outbox,
        now: float,
    ) -> None:
        self._formation, self._rounds, self._book, self._out = formation, rounds, book, out
        self._admission, self._execution = admission, execution
        self._period_s = period_s
        self._due = dict.fromkeys(formation.daemons, now + period_s)
        self._asked: dict[DaemonKey, _Asked] = {}
        self._numbers = 0
        self._suspects: dict[DaemonKey, dict[HoldKey, tuple[RoundOrdinal, WaveOrdinal]]] = {}
        """Keys that nobody owned when they were last seen, with the last round and wave sent by then: once both
        are done on the daemon, nothing under way can let go of them any more."""

    def next_deadline(self) -> float:
        return min(self._due.values())

    def expire(self, now: float) -> None:
        """Ask whoever is due; one that does not answer is asked again a period later."""
        for key, due in self._due.items():
            if now >= due:
                self.ask(key, now)

    def ask(self, key: DaemonKey, now: float) -> None:
        """Ask one daemon now, unless its streams are broken: it is asked once they are open again."""
        daemon = self._formation.daemons[key]
        self._due[key] = now + self._period_s
        if daemon.streams.reconnecting:
            return
        self._numbers += 1
        self._asked[key] = _Asked(
            self._numbers,
            self._rounds.answered(key),
            self._execution.ring.reported(key),
            dict(self._execution.running),
        )
        self._out.send(AskInventory(key, daemon.fence(self._numbers)))

    def forget(self, key: DaemonKey) -> None:
        """Its streams broke: an inventory from before is judged no more."""
        self._asked.pop(key, None)

    def take(self, key: DaemonKey, inventory: Inventory, now: float) -> Findings:
        """Compare; InternalError if the daemon executed something else than it was sent."""
        asked = self._asked.get(key)
        if asked is None or inventory.fence.ordinal != asked.number or _went_back(inventory, asked):
            self._out.count("inventories_stale")
            return Findings()
        del self._asked[key]
        daemon = self._formation.daemons[key]
        daemon.inventory_at = now
        self._check_waves(key, inventory)
        findings = Findings(self._orphans(daemon, inventory))
        held = {hold.key for hold in inventory.holds}
        findings.lost = [r for hold, r in asked.admitted.items() if hold not in held and _must_hold(r, hold, inventory)]
        self._count(daemon, findings, held)
        return findings

    # --- comparisons ------------------------------------------------------------------------------

    def _orphans(self, daemon: Daemon, inventory: Inventory) -> list[Release]:
        """Keys on the daemon that no living request accounts for, once nothing under way can explain them."""
        sent = (self._rounds.sent(daemon.key), self._execution.ring.sent)
        before, suspects = self._suspects.get(daemon.key, {}), {}
        orphans = []
        held = {hold.key for hold in inventory.holds}
        for key in sorted(held.union(inventory.announced), key=lambda one: (one.request_id, one.attempt)):
            owner = self._owner(key)
            if self._admission.releasing(key) or (owner is not None and (owner.holding or key not in held)):
                continue
            # Who waits may be prepared and released again meanwhile: it is judged by this inventory alone.
            since = sent if owner is not None else before.get(key, sent)
            if inventory.last_round >= since[0] and inventory.last_wave >= since[1]:
                orphans.append(Release(key, ended=owner is None))
            elif owner is None:
                suspects[key] = since
        self._suspects[daemon.key] = suspects
        return orphans

    def _owner(self, key: HoldKey) -> Request | None:
        request = self._book.living.get(key.request_id)
        return request if request is not None and request.key == key and request.current.announced else None

    def _check_waves(self, key: DaemonKey, inventory: Inventory) -> None:
        ring = self._execution.ring
        known = ring.running_hash(inventory.last_wave)
        if inventory.last_wave > ring.sent or (known is not None and known != inventory.running_hash):
            raise InternalError(
                f"{key.place} executed other rows than its pipeline up to wave {inventory.last_wave}, it says",
                field="running_hash",
                value=inventory.running_hash.hex(),
                limit=None if known is None else known.hex(),
                stage=key.stage,
                wave=inventory.last_wave,
            )

    def _count(self, daemon: Daemon, findings: Findings, held: set[HoldKey]) -> None:
        holds = sum(release.key in held for release in findings.orphans)
        for name, found in (
            ("orphan_holds", holds),
            ("orphan_announcements", len(findings.orphans) - holds),
            ("lost_holds", len(findings.lost)),
        ):
            if found:
                self._out.count(name, found)
        daemon.orphans += len(findings.orphans)


def _went_back(inventory: Inventory, asked: _Asked) -> bool:
    """It has ended the formation by itself, and says so on its streams."""
    return inventory.last_round < asked.answered or inventory.last_wave < asked.reported


def _must_hold(request: Request, key: HoldKey, inventory: Inventory) -> bool:
    """Admitted when the inventory was asked for and still so, with chunks that the daemon has not executed."""
    if request.key != key or not request.admitted:
        return False
    last = request.current.last_wave
    done = request.current.scheduled == request.prompt_tokens and last is not None and last <= inventory.last_wave
    return not done
