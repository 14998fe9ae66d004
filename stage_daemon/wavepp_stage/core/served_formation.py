"""One formation in service on this stage: its waves, rounds, sequences and waiting releases.

Owns the order in which these hear of an event: a wave is materialised row by row, then built, once no
row waits for a copy; a retired wave is published, then its releases are applied. Everything here dies
with the formation; cache and announcements outlive it. machine.py is the only caller and has checked
the fence.
"""

from __future__ import annotations

from wavepp_proto.errors import InternalError, RowVoided
from wavepp_proto.terms import Formation, HoldKey, JoinPlan, Release, Row, RowFault, WaveCommand, WaveOrdinal
from wavepp_stage.core import events as ev
from wavepp_stage.core.announcements import Announcements
from wavepp_stage.core.cache_manager import CacheManager, Materialised
from wavepp_stage.core.rounds import Rounds
from wavepp_stage.core.sequences import Sequences, void_row
from wavepp_stage.core.silence import Silence
from wavepp_stage.core.waves import WaveOrder, chunks_hash
from wavepp_stage.core.work import RowWork, WaveWork


class ServedFormation:
    """From JoinAsked to the formation's end."""

    def __init__(self, plan: JoinPlan, cache: CacheManager, announcements: Announcements) -> None:
        self.plan = plan
        self.waves = WaveOrder(plan)
        self.silence = Silence(plan.silence_ms)
        self.rounds = Rounds(plan, cache, announcements, self.release)
        self.sequences = Sequences(plan, cache, announcements)
        self._cache = cache
        self._announcements = announcements
        self._releases: dict[HoldKey, tuple[WaveOrdinal, bool]] = {}
        """Releases that wait for a wave to retire: (that wave, the request is over)."""
        self._due: dict[WaveOrdinal, list[HoldKey]] = {}
        """The same by wave; of one that was put off the earlier entry stays."""

    @property
    def formation(self) -> Formation:
        return self.plan.fence.formation

    # --- releases ---------------------------------------------------------------------------------

    def release(self, release: Release) -> None:
        """Apply now, or once the last wave that contains the request has retired here.

        The sender alone is not trusted: a wave in flight that contains the request is waited for."""
        key = release.key
        after = max(release.after_wave or WaveOrdinal(0), self.waves.last_wave_of(key))
        if after > self.waves.retired:
            earlier, over = self._releases.get(key, (WaveOrdinal(0), False))
            self._releases[key] = (max(after, earlier), release.ended or over)
            if after > earlier:
                self._due.setdefault(after, []).append(key)
        else:
            self._give_up(key, release.ended)

    def _give_up(self, key: HoldKey, ended: bool) -> None:
        """A hold that never ran may be prepared again, unless its request is over."""
        self._cache.release(key)
        if ended or key in self.sequences:
            self._announcements.forget(key)
        self.rounds.forget(key)
        self.sequences.forget(key)
        self.waves.forget(key)

    # --- waves ------------------------------------------------------------------------------------

    def prepare_wave(self, ordinal: WaveOrdinal) -> list[ev.Action]:
        """The wave as work; WaveWaits while blocks of its rows are copied; nothing when a slice of the
        materialising is done and more remains."""
        command = self.waves.next_to_prepare(ordinal)
        copying = False
        for row in command.rows:
            reached = Materialised.DONE if self.waves.is_void(row.key) else self.sequences.materialise(row)
            if reached is Materialised.MORE:
                return []
            copying |= reached is Materialised.COPYING  # the next row's copies may start meanwhile
        if copying:
            return [ev.WaveWaits(ordinal)]
        self.waves.prepared = ordinal
        return [self._build(command)]

    def _build(self, command: WaveCommand) -> ev.WavePrepared:
        """Once per wave: every row is materialised, or void."""
        faults: list[RowFault] = []
        rows: list[RowWork] = []
        for index, row in enumerate(command.rows):
            try:
                rows.append(self._prepare_row(row))
            except RowVoided as error:
                self.waves.void(row.key)
                faults.append(RowFault(index, error.info()))
                rows.append(void_row(row))
        work = WaveWork(self.formation, command.ordinal, tuple(rows), chunks_hash(command))
        return ev.WavePrepared(work, tuple(faults))

    def _prepare_row(self, row: Row) -> RowWork:
        return void_row(row) if self.waves.is_void(row.key) else self.sequences.prepare(row)

    def retire_wave(self, event: ev.WaveRetired) -> list[ev.Action]:
        """Publish what the wave computed, then apply the releases that waited for it."""
        void = event.void_bitmap | self.waves.void_bitmap(event.ordinal)
        command = self.waves.retire(event.ordinal)
        for index, row in enumerate(command.rows):
            self._settle(row, bool(void >> index & 1))
        for key in self._due.pop(event.ordinal, ()):
            if self._releases[key][0] == event.ordinal:
                _, ended = self._releases.pop(key)
                self._give_up(key, ended)
        running, capacity = self.waves.running_hash, self._cache.capacity()
        return [ev.WaveDone(event.ordinal, void, running, event.faults, event.results, capacity)]

    def _settle(self, row: Row, void: bool) -> None:
        """What a row of a retired wave computed becomes reusable, unless it was void."""
        if void:
            self.waves.void(row.key)
        if row.key not in self.sequences:
            if not self._is_known(row.key):
                self.waves.forget(row.key)
            return
        if void:
            self._cache.discard(row.key)
        else:
            self._cache.publish(row.key, row.start + row.length)

    def _is_known(self, key: HoldKey) -> bool:
        """A release of it is still to come, or waits."""
        return (
            self._announcements.get(key) is not None or self._cache.hold_state(key) is not None or key in self._releases
        )

    def check(self) -> None:
        """Verify what the parts say of each other; raises InternalError naming the broken rule."""
        self.waves.check()
        self.rounds.check()
        for key, (after, _) in self._releases.items():
            if after <= self.waves.retired:
                raise InternalError("a release waits for a wave that has retired", field="after_wave", value=str(key))
            if key not in self._due.get(after, ()):
                raise InternalError("a release is due at no wave", field="after_wave", value=str(key), limit=after)
