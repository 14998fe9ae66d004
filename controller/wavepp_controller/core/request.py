"""One request as the controller sees it.

Owns the facts of a request, its place in the table and its story. Its holds and positions belong to
an attempt: `Attempt` facts are replaced as a whole when the request starts over, so nothing of a lost
try can leak into the next. Does not own queues or rounds: those refer to requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from wavepp_controller.core import phases
from wavepp_controller.core.phases import PhaseLog
from wavepp_controller.core.request_table import HOLDING, TERMINAL, RequestInput, RequestState, next_state
from wavepp_proto.digest import Hashes
from wavepp_proto.hashing import HashScope, blocks_for, reuse_cap
from wavepp_proto.terms import Attempt, DaemonKey, HoldKey, PrefillRequest, RequestId, StageIndex, WaveOrdinal

STORY_LINES = 64
Step = tuple[float, RequestState, RequestInput, RequestState, Attempt]
"""When, from which state, by what, to which, in which attempt."""
FIRST_ATTEMPT = Attempt(1)
NO_PLACE = -1


@dataclass(slots=True)
class Held:
    """What one daemon holds for the request, by its last vote."""

    endpoint: int
    """Tokens."""
    committed: bool


@dataclass(slots=True)
class Shortage:
    """Why one daemon said no capacity, in terms that a later `Capacity` can be compared with."""

    seq: int
    """Capacity seq of the answer."""
    wanted_blocks: int
    """Room that would have been enough: the room it had plus the shortfall."""


@dataclass(slots=True)
class Try:
    """Everything that belongs to one (request, attempt)."""

    unacked: set[DaemonKey] = field(default_factory=set)
    announced: bool = False
    """Daemons may know this attempt, so ending it takes a release."""
    announced_at: float = 0.0
    candidate: int = 0
    """Endpoint proposed in the first round (tokens)."""
    hinted_version: tuple[int, int] | None = None
    """Versions of index and fresh chains that `candidate` was computed from; None before the first hint."""
    rounds: int = 0
    held: dict[DaemonKey, Held] = field(default_factory=dict)
    own_hits: dict[StageIndex, int] = field(default_factory=dict)
    """Longest prefix each stage alone could reuse (tokens), by its first vote."""
    revise_to: int | None = None
    """Common endpoint that the next round must bring daemons down to."""
    left_to_agree: tuple[int, int] | None = None
    """(common endpoint, daemons not there yet) at the last decision: it must shrink."""
    differed_at: float | None = None
    """When the first votes differed; None while they agree."""
    shortages: dict[DaemonKey, Shortage] = field(default_factory=dict)
    waited_for: set[StageIndex] = field(default_factory=set)
    """Stages that had no room in some round of this attempt."""
    retry_at: float = 0.0
    endpoint: int = 0
    """Tokens reused on every stage, once admitted."""
    admitted_at: float = 0.0
    scheduled: int = 0
    """Tokens [0, scheduled) are reused or in a wave that was sent."""
    computed: int = 0
    """Tokens [0, computed) are complete on the last stage."""
    waves: int = 0
    last_wave: WaveOrdinal | None = None
    """Last wave ever sent that contains this attempt."""

    @property
    def best_stage_hit(self) -> int:
        return max(self.own_hits.values(), default=0)

    def begin_rounds(self) -> None:
        """Forget what earlier rounds, all released since, had found."""
        self.rounds = 0
        self.held, self.own_hits, self.shortages = {}, {}, {}
        self.revise_to = self.left_to_agree = self.differed_at = None

    def note_own_hit(self, stage: StageIndex, tokens: int) -> None:
        """A stage of several ranks can reuse what its poorest rank can."""
        self.own_hits[stage] = min(tokens, self.own_hits.get(stage, tokens))

    def admit(self, endpoint: int, now: float) -> None:
        self.endpoint = self.scheduled = self.computed = endpoint
        self.admitted_at = now


@dataclass(slots=True, eq=False)
class Request:
    prefill: PrefillRequest
    scope: HashScope
    block_tokens: int
    arrived: float
    deadline: float
    """Event time after which the request fails."""
    unserved_since: float
    """Since when its pipeline has not been serving; meaningful only while it is not."""
    phases: PhaseLog
    life: int = 0
    """Which acceptance of this controller it is: ids come back, lives do not."""
    state: RequestState = RequestState.RECEIVED
    attempt: Attempt = FIRST_ATTEMPT
    losses: int = 0
    """Formations that ended while this request held cache."""
    hashes: bytes | None = None
    """Packed 32-byte hashes of the full blocks."""
    chain: Hashes | None = None
    """Their short forms, shape [full blocks], a strided view of `hashes`."""
    place: int = NO_PLACE
    """In first-come order, given when it first became ready."""
    current: Try = field(default_factory=Try)
    story: deque[Step] = field(default_factory=lambda: deque(maxlen=STORY_LINES))

    @property
    def id(self) -> RequestId:
        return self.prefill.request_id

    @property
    def key(self) -> HoldKey:
        return HoldKey(self.prefill.request_id, self.attempt)

    @property
    def prompt_tokens(self) -> int:
        return self.prefill.prompt_tokens

    @property
    def blocks(self) -> int:
        return blocks_for(self.prompt_tokens, self.block_tokens)

    @property
    def cap(self) -> int:
        """Longest endpoint that still leaves a token to compute."""
        return reuse_cap(self.prompt_tokens, self.block_tokens)

    @property
    def living(self) -> bool:
        return self.state not in TERMINAL

    @property
    def holding(self) -> bool:
        return self.state in HOLDING

    @property
    def admitted(self) -> bool:
        return self.state is RequestState.ADMITTED or self.state is RequestState.RUNNING

    def advance(self, given: RequestInput, now: float) -> None:
        """Take `given`; IllegalTransition if the table says that it cannot happen."""
        before = self.state
        self.state = next_state(self.id, before, given, self.told())
        self.story.append((now, before, given, self.state, self.attempt))
        self.phases.enter(self._phase(), now)

    def told(self) -> Iterator[str]:
        """The story in words, a line for each step."""
        for now, before, given, after, attempt in self.story:
            yield f"{now:.6f} {before.value} --{given.value}--> {after.value} (attempt {attempt})"

    def requeue(self) -> None:
        """Its formation ended while it held nothing, and daemons forgot what was announced."""
        self.current = Try()

    def start_over(self) -> None:
        """Begin the next attempt: whatever belongs to this one is never mentioned again."""
        self.attempt = Attempt(self.attempt + 1)
        self.current = Try()

    def hashed(self, block_hashes: bytes, chain: Hashes, now: float) -> None:
        self.hashes, self.chain = block_hashes, chain
        self.phases.enter(self._phase(), now)

    def _phase(self) -> str:
        match self.state:
            case RequestState.RECEIVED | RequestState.QUEUED:
                return phases.HASH if self.hashes is None else phases.QUEUE
            case RequestState.HINTED:
                return phases.QUEUE
            case RequestState.ANNOUNCED:
                return phases.ANNOUNCE
            case RequestState.PREPARING:
                return phases.PIN_RESERVE
            case RequestState.WAITING:
                return phases.CAPACITY_WAIT
            case RequestState.ADMITTED:
                return phases.SCHEDULE
            case _:
                return phases.RUNNING if self.living else phases.ENDED
