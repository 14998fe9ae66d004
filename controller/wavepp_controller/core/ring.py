"""The window of waves in flight (DESIGN.md): at most R = 2P, one executing and one waiting per stage.

Owns slot accounting, which daemon reported which wave, and the comparison of running hashes (invariant
I1, online). Does not own requests: it says which rows a report concerns and `execution` acts on them.

    send ──▶ in flight ──last stage reported──▶ slot free ──all daemons reported──▶ forgotten
                                              (exactly once)

The order of use: `room`, then `send`; each report through `place`, and the next in order through `report`.
Reports come again when streams were opened again, and are missed when one broke: `place` tells. A formation
that ends takes its ring with it, which frees every slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from wavepp_proto.errors import InternalError
from wavepp_proto.terms import DaemonKey, ErrorInfo, Row, RowResult, WaveOrdinal, WaveReport

LAG_RINGS = 4
"""A daemon whose reports are this many rings behind the last stage is not telling what it executes."""


class Place(Enum):
    """Where a report stands among those of its daemon."""

    NEXT = "next"
    AGAIN = "again"  # it was taken before
    AHEAD = "ahead"  # one before it has not come


@dataclass(slots=True)
class Flight:
    """One wave that was sent and not yet reported by everybody."""

    ordinal: WaveOrdinal
    rows: tuple[Row, ...]
    waiting_for: set[DaemonKey]
    running_hash: bytes | None = None
    slot_held: bool = True
    faults: dict[int, tuple[DaemonKey, ErrorInfo]] = field(default_factory=dict)
    """First cause told for each void row."""
    void_bitmap: int = 0
    """As the last stage saw it, on any of its ranks."""
    results: tuple[RowResult, ...] = ()
    """Of rank 0 of the last stage."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What a report changed."""

    flight: Flight
    slot_freed: bool
    """Every rank of the last stage is done with the wave: its results count."""
    complete: bool
    """Every daemon reported: no further cause will be told."""


class Ring:
    def __init__(self, size: int, daemons: Iterable[DaemonKey]) -> None:
        """`size` is R in waves; the last stage is the highest stage index among `daemons`."""
        self.size = size
        self._daemons = frozenset(daemons)
        last = max(key.stage for key in self._daemons)
        self._last_stage = frozenset(key for key in self._daemons if key.stage == last)
        self._flights: dict[WaveOrdinal, Flight] = {}
        self._next_report = dict.fromkeys(self._daemons, WaveOrdinal(1))
        self._next_ordinal = WaveOrdinal(1)
        self._landed: dict[WaveOrdinal, bytes] = {}
        """Running hashes of the last waves that everybody reported: inventories are compared with them."""
        self.in_flight = 0
        """Slots taken."""

    @property
    def sent(self) -> WaveOrdinal:
        """The last wave; 0 before the first."""
        return WaveOrdinal(self._next_ordinal - 1)

    def reported(self, key: DaemonKey) -> WaveOrdinal:
        """The last wave whose report of this daemon was taken; 0 before the first."""
        return WaveOrdinal(self._next_report[key] - 1)

    def flight(self, ordinal: WaveOrdinal) -> Flight | None:
        """A wave that somebody has not reported; None for any other."""
        return self._flights.get(ordinal)

    def next_of(self, key: DaemonKey) -> Flight | None:
        """The first wave that this daemon has not reported; None if it has reported all."""
        return self._flights.get(self._next_report[key])

    def unreported(self, key: DaemonKey) -> list[Flight]:
        """Waves that this daemon has not reported, in order."""
        return [flight for flight in self._flights.values() if key in flight.waiting_for]

    def running_hash(self, ordinal: WaveOrdinal) -> bytes | None:
        """What the daemons' reports said after this wave; None if nobody did, or it is long ago."""
        flight = self._flights.get(ordinal)
        return flight.running_hash if flight is not None else self._landed.get(ordinal)

    @property
    def room(self) -> bool:
        return self.in_flight < self.size

    def send(self, rows: tuple[Row, ...]) -> WaveOrdinal:
        """Take a slot for the next wave; its ordinal."""
        if not self.room:
            raise InternalError(f"no slot in the ring of {self.size} waves", field="waves", value=self.in_flight)
        ordinal = self._next_ordinal
        self._flights[ordinal] = Flight(ordinal, rows, set(self._daemons))
        self._next_ordinal = WaveOrdinal(ordinal + 1)
        self.in_flight += 1
        return ordinal

    def place(self, key: DaemonKey, ordinal: int) -> Place:
        """Where a report of wave `ordinal` stands; InternalError if that wave was never sent."""
        expected = self._next_report[key]
        if not 1 <= ordinal < self._next_ordinal:
            raise _unexpected(key, ordinal, expected)
        if ordinal == expected:
            return Place.NEXT
        return Place.AGAIN if ordinal < expected else Place.AHEAD

    def report(self, key: DaemonKey, report: WaveReport) -> Reported:
        """Account for the next report; InternalError if the daemon executed something else than the others."""
        ordinal = WaveOrdinal(report.fence.ordinal)
        expected = self._next_report[key]
        flight = self._flights.get(ordinal)
        if ordinal != expected or flight is None:
            raise _unexpected(key, ordinal, expected)
        if report.done:
            self._compare(key, flight, report.running_hash)
        self._next_report[key] = WaveOrdinal(ordinal + 1)
        self._check_lag()
        flight.waiting_for.discard(key)
        for fault in report.faults:
            flight.faults.setdefault(fault.row, (key, fault.error))
        freed = self._free_slot(key, flight, report)
        complete = not flight.waiting_for
        if complete:
            self._land(flight)
        return Reported(flight, freed, complete)

    def check(self) -> list[str]:
        """Findings in words."""
        held = sum(1 for flight in self._flights.values() if flight.slot_held)
        findings = []
        if held != self.in_flight or not 0 <= held <= self.size:
            findings.append(f"ring counts {self.in_flight} of {self.size} slots, {held} waves hold one")
        if any(not flight.waiting_for for flight in self._flights.values()):
            findings.append("a wave that everybody reported is still in the ring")
        return findings

    def _land(self, flight: Flight) -> None:
        del self._flights[flight.ordinal]
        if flight.running_hash is not None:
            self._landed[flight.ordinal] = flight.running_hash
        if len(self._landed) > LAG_RINGS * self.size:
            del self._landed[next(iter(self._landed))]

    def _free_slot(self, key: DaemonKey, flight: Flight, report: WaveReport) -> bool:
        if key not in self._last_stage:
            return False
        flight.void_bitmap |= report.void_bitmap
        if key.rank == 0:
            flight.results = report.results
        if not flight.slot_held or flight.waiting_for & self._last_stage:
            return False
        flight.slot_held = False
        self.in_flight -= 1
        return True

    def _compare(self, key: DaemonKey, flight: Flight, running_hash: bytes) -> None:
        if flight.running_hash is None:
            flight.running_hash = running_hash
        elif flight.running_hash != running_hash:
            raise InternalError(
                f"{key.place} executed other rows than its pipeline up to wave {flight.ordinal}",
                field="running_hash",
                value=running_hash.hex(),
                limit=flight.running_hash.hex(),
                stage=key.stage,
                rank=key.rank,
                wave=flight.ordinal,
            )

    def _check_lag(self) -> None:
        if len(self._flights) > LAG_RINGS * self.size:
            slow = min(self._daemons, key=lambda daemon: (self._next_report[daemon], daemon))
            raise InternalError(
                f"{slow.place} has not reported since wave {self._next_report[slow]}",
                field="unreported_waves",
                value=len(self._flights),
                limit=LAG_RINGS * self.size,
                stage=slow.stage,
            )


def _unexpected(key: DaemonKey, ordinal: int, expected: int) -> InternalError:
    return InternalError(
        f"{key.place} reported wave {ordinal}, not {expected}",
        field="wave",
        value=ordinal,
        limit=expected,
        stage=key.stage,
    )
