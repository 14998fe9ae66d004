"""When admission leaves daemons alone: pauses between rounds, and releases that wait for company.

Owns two instants of one formation. A message costs a daemon, and the controller, far more than an entry in it. So
beside running requests a round is followed by a pause as long as the round took: what becomes ready meanwhile shares
the next, and the slower the daemons answer, the fewer rounds ask them. And a release without a round to ride in waits
for one a little, if nobody needs the room. Nothing waits on an idle pipeline. Called by `admission`.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_REST_S = 0.02
"""Longest pause after a round, however long it took."""
ROUND_REST = 1.0
"""What a controller process sets: a busy pipeline spends half of its time in rounds at most. With it, 64 requests in
flight take a quarter less CPU."""
RELEASE_LAG_MS = 20
"""What a controller process sets: shorter than what stages need for a wave of a busy pipeline; on an idle one the next
request takes releases along."""


@dataclass(slots=True)
class RoundPace:
    rest: float
    """Length of a pause, in times that the round took; 0 = none."""
    lag_s: float
    """How long a release may wait for a round; 0 = not at all."""
    wake_at: float | None = None
    """When something that waits here is due; None while nothing does."""
    _rests_until: float = 0.0
    _release_by: float | None = None

    def round_ended(self, started: float, now: float) -> None:
        self._rests_until = now + min(MOST_REST_S, self.rest * (now - started))

    def rests(self, now: float, *, idle: bool) -> bool:
        """Whether the next round waits. `idle`: nobody holds anything, so nothing would be gained by it."""
        return not idle and now < self._rests_until

    def holds_back(self, now: float, *, needed: bool) -> bool:
        """Whether releases wait for a round, now that there is none. `needed`: somebody waits for what they free."""
        if needed or not self.lag_s:
            return False
        if self._release_by is None:
            self._release_by = now + self.lag_s
        return now < self._release_by

    def released(self) -> None:
        """Whatever was to be released is on its way."""
        self._release_by = None

    def wait(self, *, ready: bool, releases: bool) -> None:
        """The pump is over: note when to pump again for a request that is `ready`, or for `releases` held back."""
        times = [self._rests_until] if ready else []
        if releases and self._release_by is not None:
            times.append(self._release_by)
        self.wake_at = min(times, default=None)
