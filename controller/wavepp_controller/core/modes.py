"""When requests are prepared and when waves go: the admission modes (DESIGN.md).

Owns the difference between the modes and nothing else: cache protocol, planner and daemons are the same in all. Called
by `service` around every pump. `overlapped` is the product; the others are what it is compared with, as they are in
systems that have them, and are kept as good as they can be:

* overlapped: rounds and waves know nothing of each other.
* lockstep: admission at a common scheduling boundary, on the execution path. The boundary is the report of the last
  stage (or an empty pipeline). What is ready there is prepared, up to a round's entries, and no wave is sent before
  the round has ended, revisions included; what becomes ready later waits for the next boundary. Waves that were sent
  go on computing meanwhile. An empty pipeline is one boundary until a wave is sent.
* drain: admission only while nothing runs. Everything that is ready then is prepared, over several rounds if it does
  not fit into one; then its waves run to the end, and nobody else is prepared before.
"""

from __future__ import annotations

OVERLAPPED, LOCKSTEP, DRAIN = "overlapped", "lockstep", "drain"
MODES = (OVERLAPPED, LOCKSTEP, DRAIN)


class Gate:
    """Told what happens, asked what may happen next; one for each formation."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._open = True
        """Not overlapped: preparing may begin."""

    def wave_ended(self) -> None:
        """The last stage has reported a wave."""
        if self._mode == LOCKSTEP:
            self._open = True

    def may_prepare(self, *, in_flight: int, running: int) -> bool:
        """Whether a prepare round may begin: `in_flight` waves, `running` requests admitted and not ended.

        Revisions of what a round has begun may always follow: they are the same admission.
        """
        if not in_flight and (self._mode == LOCKSTEP or not running):
            self._open = True
        return self._open or self._mode == OVERLAPPED

    def may_send(self, *, round_open: bool) -> bool:
        return self._mode == OVERLAPPED or not round_open

    def pumped(self, *, round_begun: bool, in_flight: int) -> None:
        """One pump is over: in lockstep a boundary serves one admission, in drain the first wave ends it."""
        if (self._mode == LOCKSTEP and (round_begun or in_flight)) or (self._mode == DRAIN and in_flight):
            self._open = False
