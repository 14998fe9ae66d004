"""Wave order of one formation on one stage.

Owns which ordinal comes next at each of three points (accepted, prepared, retired), the commands in
between, which requests are void, and the running hash that proves that all stages executed the same
rows. Does not own blocks or holds: served_formation.py asks the cache, and is the only caller.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from wavepp_proto.errors import InternalError, InvalidRequest, StaleMessage
from wavepp_proto.limits import MAX_LANES
from wavepp_proto.terms import Formation, HoldKey, JoinPlan, Row, WaveCommand, WaveOrdinal

CHUNKS_BYTES = 16
"""Bytes of the chunk-list hash in a wave header."""
_ROW = struct.Struct("<QIIQII")  # wave, attempt, length of the request id, start, length, number of snapshots


def pack_rows(ordinal: WaveOrdinal, rows: Iterable[Row]) -> bytes:
    """(wave, request, attempt, start, length, snapshots) of every commanded row, void or not.

    Voids are left out on purpose: a row may be void on one stage and not on the one before it."""
    parts = []
    for row in rows:
        request, marks = row.key.request_id.encode(), row.snapshots
        parts.append(_ROW.pack(ordinal, row.key.attempt, len(request), row.start, row.length, len(marks)) + request)
        if marks:
            parts.append(struct.pack(f"<{len(marks)}Q", *marks))
    return b"".join(parts)


def chunks_hash(command: WaveCommand) -> bytes:
    """What neighbours compare before they run a wave."""
    return hashlib.sha256(pack_rows(command.ordinal, command.rows)).digest()[:CHUNKS_BYTES]


class WaveOrder:
    """The waves of one formation; ordinals start at 1 and nothing is skipped."""

    def __init__(self, plan: JoinPlan) -> None:
        self.formation: Formation = plan.fence.formation
        self.accepted = WaveOrdinal(0)
        self.prepared = WaveOrdinal(0)
        self.retired = WaveOrdinal(0)
        self._wave_tokens = plan.wave_tokens
        self._lanes = plan.lanes
        self._block_tokens = plan.block_tokens
        self._commands: dict[WaveOrdinal, WaveCommand] = {}
        """Accepted and not retired."""
        self._last: dict[HoldKey, WaveOrdinal] = {}
        """The last of these with a row of each request."""
        self._void: set[HoldKey] = set()
        """Requests void from now on; a void never heals as long as the request is known here."""
        self._running = hashlib.sha256()

    @property
    def running_hash(self) -> bytes:
        """SHA-256 over the rows of all retired waves, in order."""
        return self._running.copy().digest()

    def accept(self, command: WaveCommand) -> bool:
        """True if `command` is the next wave, False if it was accepted before.

        Raises StaleMessage for a gap, InvalidRequest for a wave that breaks the plan."""
        wanted = WaveOrdinal(self.accepted + 1)
        if command.ordinal < wanted:
            return False
        if command.ordinal > wanted:
            raise StaleMessage("a wave is missing", field="ordinal", value=command.ordinal, limit=wanted)
        self._check(command)
        self.accepted = wanted
        self._commands[wanted] = command
        for row in command.rows:
            self._last[row.key] = wanted
        return True

    def next_to_prepare(self, ordinal: WaveOrdinal) -> WaveCommand:
        """The command of the next wave to prepare; the caller sets `prepared` when it is."""
        self._expect(ordinal, self.prepared, self.accepted)
        return self._commands[ordinal]

    def retire(self, ordinal: WaveOrdinal) -> WaveCommand:
        """The command of the wave that the engine is done with; it enters the running hash."""
        self._expect(ordinal, self.retired, self.prepared)
        self.retired = ordinal
        command = self._commands.pop(ordinal)
        for row in command.rows:
            if self._last[row.key] == ordinal:
                del self._last[row.key]
        self._running.update(pack_rows(ordinal, command.rows))
        return command

    def void(self, key: HoldKey) -> None:
        self._void.add(key)

    def is_void(self, key: HoldKey) -> bool:
        return key in self._void

    def forget(self, key: HoldKey) -> None:
        """The request is gone from this stage: what is void of it is kept until no queued wave has a row of it."""
        if key not in self._last:
            self._void.discard(key)

    def last_wave_of(self, key: HoldKey) -> WaveOrdinal:
        """The last accepted and not retired wave with a row of `key`; 0 if there is none."""
        return self._last.get(key, WaveOrdinal(0))

    def void_bitmap(self, ordinal: WaveOrdinal) -> int:
        """Bit i = row i of an accepted wave is void by now, whenever it was prepared."""
        command = self._commands.get(ordinal)
        if command is None:
            raise StaleMessage("no such wave is queued", field="ordinal", value=ordinal, limit=self.accepted)
        return sum((row.key in self._void) << index for index, row in enumerate(command.rows))

    def _expect(self, ordinal: WaveOrdinal, last: WaveOrdinal, most: WaveOrdinal) -> None:
        if ordinal != last + 1 or ordinal > most:
            raise StaleMessage("not the next wave", field="ordinal", value=ordinal, limit=last + 1)

    def _check(self, command: WaveCommand) -> None:
        rows = len(command.rows)
        if not 0 < rows <= min(self._lanes, MAX_LANES):
            raise InvalidRequest("a wave has 1 to `lanes` rows", field="rows", value=rows, limit=self._lanes)
        if command.tokens > self._wave_tokens:
            raise InvalidRequest(
                "a wave exceeds its budget", field="tokens", value=command.tokens, limit=self._wave_tokens
            )
        for row in command.rows:
            if row.length < 1 or row.start < 0:
                raise InvalidRequest("a chunk is empty", field="length", value=row.length, limit=1)
            self._check_snapshots(row)
        if len({row.key for row in command.rows}) != rows:
            raise InvalidRequest("a request has two rows in one wave", field="rows", value=rows)

    def _check_snapshots(self, row: Row) -> None:
        last, end = row.start, row.start + row.length
        for position in row.snapshots:
            if position % self._block_tokens or not last < position <= end:
                raise InvalidRequest(
                    "snapshots ascend on block boundaries within their chunk",
                    field="snapshots",
                    value=position,
                    limit=end,
                )
            last = position

    def check(self) -> None:
        """Verify that nothing is skipped, and the index of last waves; raises InternalError."""
        last = {row.key: ordinal for ordinal, command in self._commands.items() for row in command.rows}
        if last != self._last:
            raise InternalError("the last wave of a request is not known", field="waves", value=len(last))
        if list(self._commands) != list(range(self.retired + 1, self.accepted + 1)):
            raise InternalError("a wave is lost between accepted and retired", field="waves", value=len(self._commands))
        if not self.retired <= self.prepared <= self.accepted:
            raise InternalError("a wave retired that was not prepared", field="prepared", value=self.prepared)
