"""Which requests are prepared, in what order, and what becomes of the votes (DESIGN.md).

Owns the holders and the pending releases of one formation. One prepare/revise round is in flight; what
becomes ready meanwhile shares the next. Does not own who is next (`choosing`), what entries say (`demand`),
wires (`rounds`) nor waves.

    parked (WAITING behind a holder)
        ▲ │ shown
        │ ▼
    ready (HINTED, WAITING) ──prepare──▶ holders (PREPARING) ──agreed──▶ holders (ADMITTED, RUNNING)
        ▲                                   │ no room, round lost                │ ended
        └── release on ALL daemons ◀────────┘                release on ALL ◀────┘
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wavepp_controller.core import traced
from wavepp_controller.core.book import RequestBook
from wavepp_controller.core.causes import stages_of
from wavepp_controller.core.choosing import Choosing
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.demand import Demand, shortage
from wavepp_controller.core.formation import PipelineFormation
from wavepp_controller.core.index import ReuseIndex
from wavepp_controller.core.outbox import Outbox
from wavepp_controller.core.ready import ReadyOrder
from wavepp_controller.core.reconcile import Agreed, GiveUp, Lower, decide, held_after
from wavepp_controller.core.request import Request
from wavepp_controller.core.request_table import RequestInput, RequestState
from wavepp_controller.core.round_pace import RoundPace
from wavepp_controller.core.rounds import OpenRound, RoundBook
from wavepp_controller.core.sharing import Sharing
from wavepp_proto import limits
from wavepp_proto.errors import InternalError
from wavepp_proto.terms import DaemonKey, HoldKey, Release, Votes


@dataclass(slots=True)
class Resolved:
    """What a finished round decided, for the caller to carry on."""

    admitted: list[Request] = field(default_factory=list)
    unknown: list[Request] = field(default_factory=list)
    """Some daemon does not know them: to be announced again, under the next attempt."""
    stuck: list[tuple[Request, InternalError]] = field(default_factory=list)
    """Reconciling them made no progress: a daemon breaks the protocol."""


class Admission:
    def __init__(
        self,
        formation: PipelineFormation,
        index: ReuseIndex,
        rounds: RoundBook,
        config: ControllerConfig,
        out: Outbox,
    ) -> None:
        self._formation, self._rounds = formation, rounds
        self._config, self._out = config, out
        self._retry_s = config.capacity_retry_ms / 1e3
        self._demand = Demand(formation, config)
        self.holders: dict[str, Request] = {}
        """PREPARING, ADMITTED and RUNNING, by request id; at most `lanes`."""
        self.choosing = Choosing(formation, index, config, self._demand, self.holders, out)
        self._releases: list[tuple[Release, int]] = []
        """To be sent, each with the tokens of its prompt."""
        self._pace = RoundPace(config.round_rest, config.release_lag_ms / 1e3)
        self._closed = False
        """The admission mode lets no request be prepared now."""

    @property
    def ready(self) -> ReadyOrder:
        return self.choosing.ready

    @property
    def sharing(self) -> Sharing:
        return self.choosing.sharing

    @property
    def waiting(self) -> int:
        """Requests that are ready or parked."""
        return len(self.ready) + sum(1 for _ in self.sharing)

    @property
    def round_open(self) -> bool:
        return self._rounds.open is not None

    @property
    def wake_at(self) -> float | None:
        """When to pump again, exactly: a pause between rounds ends then."""
        return None if self.round_open else self._pace.wake_at

    def next_deadline(self) -> float | None:
        """When something here must be looked at again without any event."""
        if self._rounds.open is not None:
            return self._rounds.open.deadline
        return None if self._closed else self.choosing.next_retry()

    def enter(self, request: Request, now: float) -> None:
        """A request is hashed and announced everywhere."""
        self.choosing.enter(request, now)

    def tokens_before(self, request: Request) -> int:
        """Tokens still to compute of everything that is served before a ready request, as far as is known."""
        return self.choosing.tokens_before(request)

    def published(self, request: Request, now: float) -> None:
        """The request has finished: every stage has published its full blocks."""
        self.choosing.published(request, now)

    def release(self, request: Request, now: float, *, ended: bool = True) -> None:
        """Let go of the request on every daemon, whatever it holds there, in whichever state it is.

        Unless `ended`, daemons keep its announcement: it will be prepared again.
        """
        self.choosing.leave(request, now)
        self.holders.pop(request.id, None)
        if request.current.announced:
            release = Release(request.key, request.current.last_wave, ended)
            self._releases.append((release, request.prompt_tokens))

    def let_go(self, release: Release) -> None:
        """Release what a daemon holds for nobody, or no longer for its request."""
        self._releases.append((release, 0))

    def releasing(self, key: HoldKey) -> bool:
        """A release of `key` waits for the next round."""
        return any(release.key == key for release, _ in self._releases)

    def votes(self, key: DaemonKey, votes: Votes, now: float) -> Resolved:
        """Take one daemon's votes; decides once all are there."""
        self._formation.daemons[key].has(votes.capacity)
        if not self._rounds.answer(key, votes, now):
            self._out.count("late_votes")
        if self._rounds.open is None or not self._rounds.open.complete:
            return Resolved()
        done = self._rounds.close()
        self._pace.round_ended(done.started, now)
        return self._resolve(done, now)

    def expire(self, now: float) -> None:
        """Past its deadline, a round is resolved by release on ALL daemons, the silent one included."""
        if self._rounds.open is None or now < self._rounds.open.deadline:
            return
        lost = self._rounds.close()
        self._out.count("rounds_expired")
        for request in _preparing(lost):
            traced.round_lost(request, lost, now)
            self._wait(request, RequestInput.ROUND_LOST, now)

    @property
    def more_soon(self) -> bool:
        """Requests may be admitted within a round trip."""
        head = self.ready.head
        return self.round_open or (head is not None and head.state is RequestState.HINTED and not self._closed)

    def pump(self, now: float, *, closed: bool = False) -> None:
        """Begin the next round if there is one to begin; else send pending releases alone.

        While a round is open they wait for the next, which frees what they held before it asks for more. While the
        admission mode is `closed` nobody new is prepared: what was begun is still brought to its end.
        After a round there may be a pause, in which what becomes ready, and what is to be released, comes together.
        """
        self._closed = closed
        self.choosing.bring_back(now)
        if self._rounds.open is not None or self._rounds.full:
            return
        revising = [r for r in self.holders.values() if r.current.revise_to is not None]
        revising = revising[: limits.MAX_ROUND_ENTRIES]
        rests = not revising and self._rests(now)
        preparing = [] if closed or rests else self.choosing.choose(limits.MAX_ROUND_ENTRIES - len(revising), now)
        if revising or preparing:
            self._pace.released()
            self._begin(revising, preparing, self._take_releases(), now)
        elif self._releases and not self._pace.holds_back(now, needed=self._room_needed()):
            self._pace.released()
            while self._releases and not self._rounds.full:
                self._out.count("rounds_release_only")
                self._out.send(*self._rounds.release_only(self._take_releases(), now))
        self._pace.wait(ready=rests and not closed, releases=bool(self._releases))

    def _rests(self, now: float) -> bool:
        """Somebody could be prepared, and waits for company."""
        full = len(self.ready) >= limits.MAX_ROUND_ENTRIES
        return not full and self._pace.rests(now, idle=not self.holders) and self.ready.first(now) is not None

    def _take_releases(self) -> list[Release]:
        """Those that the next round tells: one at least, and no more than it may have tokens."""
        count, tokens = 0, self._formation.round_tokens
        for _, prompt_tokens in self._releases:
            tokens -= prompt_tokens
            if count and tokens < 0:
                break
            count += 1
        taken, self._releases = self._releases[:count], self._releases[count:]
        return [release for release, _ in taken]

    def _room_needed(self) -> bool:
        """Releases must not wait: for a request without room, a daemon that wants to go, or their own number."""
        head = self.ready.head
        waits = head is not None and head.state is RequestState.WAITING
        return waits or self._formation.draining or len(self._releases) >= limits.MAX_ROUND_ENTRIES

    def check(self, book: RequestBook) -> list[str]:
        """Findings in words: every hold has its request, every request its place, nothing is forgotten."""
        findings = []
        opened = self._rounds.open
        in_round = {id(request) for request in opened.requests} if opened is not None else set()
        for request in book.living.values():
            waits = int(request.state in (RequestState.HINTED, RequestState.WAITING))
            if self.choosing.places(request) != waits or request.holding != (request.id in self.holders):
                findings.append(f"{request.id} is {request.state.value} and in the wrong place")
            revising = request.current.revise_to is not None
            if request.state is RequestState.PREPARING and not revising and id(request) not in in_round:
                findings.append(f"{request.id} prepares in no round")
        if self.holders.keys() - book.living.keys() or self.waiting > len(book.waiting):
            findings.append("a request that ended is still ready or holds something")
        if len(self.holders) > self._config.lanes:
            findings.append(f"{len(self.holders)} holders are more than {self._config.lanes} lanes")
        if self._releases and opened is None and not self._rounds.full and self._pace.wake_at is None:
            findings.append("releases were not sent")
        barred = self._closed or self._formation.draining or self._rounds.full
        if (
            opened is None
            and not self.holders
            and not barred
            and (head := self.ready.head) is not None
            and head.state is RequestState.HINTED
        ):
            findings.append("something is ready, nothing runs, and no round was begun")
        return findings + self.choosing.check()

    # --- building a round -----------------------------------------------------------------------

    def _begin(self, revising: list[Request], preparing: list[Request], releases: list[Release], now: float) -> None:
        entries = self._demand.entries(revising, preparing)
        for request in (*revising, *preparing):
            request.current.rounds += 1
            request.current.revise_to = None
        self._out.count("rounds")
        self._out.send(*self._rounds.begin([*revising, *preparing], entries, releases, now))

    # --- resolving a round ----------------------------------------------------------------------

    def _resolve(self, done: OpenRound, now: float) -> Resolved:
        resolved = Resolved()
        for request in _preparing(done):
            votes = done.votes_on(request.key)
            traced.round_done(request, done, votes, now)
            for key, vote in votes.items():
                request.current.held[key] = held_after(vote)
                if request.current.rounds == 1:
                    self._demand.note_hits(request, key, vote)
            match decide(votes, request.current.held):
                case Agreed(endpoint):
                    request.advance(RequestInput.COMMIT, now)
                    self._demand.admit(request, endpoint, now)
                    resolved.admitted.append(request)
                case GiveUp(RequestInput.NOT_ANNOUNCED):
                    self._out.count("not_announced")
                    resolved.unknown.append(request)
                case GiveUp(given, daemons):
                    self._note_shortages(request, done, daemons)
                    self._wait(request, given, now)
                case Lower() as lower:
                    if not self._lower(request, lower, now):
                        resolved.stuck.append((request, _no_progress(request, lower)))
        return resolved

    def _lower(self, request: Request, lower: Lower, now: float) -> bool:
        """Revise in the next round; False if this one brought nobody closer."""
        left = (lower.endpoint, len(lower.daemons))
        if request.current.left_to_agree is not None and left >= request.current.left_to_agree:
            return False
        request.current.left_to_agree = left
        request.current.revise_to = lower.endpoint
        if request.current.differed_at is None:
            request.current.differed_at = now
        request.advance(RequestInput.REVISE, now)
        return True

    def _note_shortages(self, request: Request, done: OpenRound, daemons: tuple[DaemonKey, ...]) -> None:
        self._out.count("no_capacity")
        for key in daemons:
            answer = done.answers[key]
            request.current.waited_for.add(key.stage)
            request.current.shortages[key] = shortage(request, answer.votes[request.key], answer)

    def _wait(self, request: Request, given: RequestInput, now: float) -> None:
        """Back to the ready order, holding nothing anywhere."""
        self.release(request, now, ended=False)
        request.advance(given, now)
        request.current.retry_at = now + self._retry_s
        self.ready.add(request)


def _preparing(done: OpenRound) -> list[Request]:
    """Requests of the round that still want its answer: the others ended meanwhile, and were released."""
    return [request for request in done.requests if request.state is RequestState.PREPARING]


def _no_progress(request: Request, lower: Lower) -> InternalError:
    stages = stages_of(lower.daemons)
    return InternalError(
        f"stages {stages} neither lowered nor committed request {request.id} at {lower.endpoint}",
        field="endpoint",
        value=lower.endpoint,
        stages=stages,
    )
