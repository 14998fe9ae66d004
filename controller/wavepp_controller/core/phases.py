"""Where the time of one request went (DESIGN.md).

Owns the names of a request's admission phases and the log that sums them for `Timings` and turns them
into `Span` actions. Every moment from Submit to admitted belongs to exactly one phase.
The names equal wavepp_proto/runtime/span_names.py, which pure code cannot import; a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from wavepp_controller.core.events import Span
from wavepp_proto.terms import RequestId, Timings

ADMISSION: Final = "admission"
QUEUE: Final = "queue"
HASH: Final = "hash"
HINT: Final = "hint"
ANNOUNCE: Final = "announce"
PIN_RESERVE: Final = "pin_reserve"
VOTE: Final = "vote"
RECONCILE: Final = "reconcile"
CAPACITY_WAIT: Final = "capacity_wait"
WAIT_BEHIND: Final = "wait_behind"
SCHEDULE: Final = "schedule"
FINISH: Final = "finish"

REQUEST_ID: Final = "wavepp.request_id"
ATTEMPT: Final = "wavepp.attempt"
PIPELINE: Final = "wavepp.pipeline"
STAGE: Final = "wavepp.stage"
RANK: Final = "wavepp.rank"
OUTCOME: Final = "wavepp.outcome"
LIMITING_STAGE: Final = "wavepp.limiting_stage"
ENDPOINT: Final = "wavepp.endpoint"
CANDIDATE: Final = "wavepp.candidate"
OWN_HIT: Final = "wavepp.own_hit"
LOST_TO_AGREEMENT: Final = "wavepp.tokens_lost_to_agreement"
LOST_TO_SNAPSHOTS: Final = "wavepp.tokens_lost_to_snapshots"
SHARED: Final = "wavepp.shared_tokens"
FRONT: Final = "wavepp.front"
BOUNDARY: Final = "wavepp.boundary"
WAIT_REASON: Final = "wavepp.wait_reason"
ROUNDS: Final = "wavepp.rounds"
ROUND: Final = "wavepp.round"
SHORTFALL_BLOCKS: Final = "wavepp.shortfall_blocks"
PROMPT_TOKENS: Final = "wavepp.prompt_tokens"

Attributes = tuple[tuple[str, str | int | float | bool], ...]

MAX_SPANS: Final = 256
"""A request that waits ten minutes for room retries thousands of times; its trace keeps the first ones."""

RUNNING: Final = "running"
ENDED: Final = "ended"
UNTRACED: Final = frozenset({PIN_RESERVE, RUNNING, ENDED})
"""Phases without a span of their own: rounds are noted one by one, stages tell how they execute."""


@dataclass(slots=True)
class PhaseLog:
    request_id: RequestId
    begun: float
    """When this attempt's admission began."""
    since: float
    """When the current phase began."""
    current: str = HASH
    about: Attributes = ()
    """Attributes of the current phase's span."""
    totals: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""
    most_spans: int = MAX_SPANS
    """0 when nobody records spans: then none are made."""
    _spans: list[Span] = field(default_factory=list)

    def enter(self, name: str, now: float) -> None:
        """End the current phase and begin `name`."""
        if name == self.current:
            return
        self.totals[self.current] = self.totals.get(self.current, 0.0) + now - self.since
        if self.current not in UNTRACED and now > self.since:
            self.note(self.current, self.since, now, self.about, "" if self.current == SCHEDULE else ADMISSION)
        self.current, self.since, self.about = name, now, ()

    def restart(self, now: float) -> None:
        """Another attempt: its admission begins now."""
        self.begun = now

    def note(self, name: str, start: float, end: float, attributes: Attributes = (), parent: str = ADMISSION) -> None:
        """Keep a span of a part that has ended; children before their parent."""
        if len(self._spans) < self.most_spans:
            self._spans.append(Span(self.request_id, name, start, end, attributes, parent))

    def room_for(self, spans: int) -> bool:
        """Whether `spans` more are kept: a parent must not be lost when its children were kept."""
        return len(self._spans) + spans <= self.most_spans

    def flush(self) -> list[Span]:
        """The spans kept so far, in the order noted; the log forgets them."""
        spans, self._spans = self._spans, []
        return spans

    def timings(self, admitted: float, now: float) -> Timings:
        """Milliseconds by phase; `admitted` and `now` as event times."""

        def ms(name: str) -> float:
            return self.totals.get(name, 0.0) * 1e3

        return Timings(
            queue_ms=ms(QUEUE),
            hash_ms=ms(HASH),
            announce_ms=ms(ANNOUNCE),
            rounds_ms=ms(PIN_RESERVE),
            capacity_wait_ms=ms(CAPACITY_WAIT),
            sharing_wait_ms=ms(WAIT_BEHIND),
            admission_ms=(admitted - self.begun) * 1e3,
            prefill_ms=(now - admitted) * 1e3,
        )
