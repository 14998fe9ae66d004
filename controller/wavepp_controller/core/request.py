"""One request as the controller sees it.

Owns the facts of a request, its place in the table and its story. Its holds and positions belong to
an attempt: `Attempt` facts are replaced as a whole when the request starts over, so nothing of a lost
try can leak into the next. Does not own queues or rounds: those refer to requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from wavepp_controller.core import phases
from wavepp_controller.core.phases import PhaseLog
from wavepp_controller.core.request_table import HOLDING, TERMINAL, RequestInput, RequestState, next_state
from wavepp_proto.digest import Hashes
from wavepp_proto.hashing import HashScope, blocks_for, reuse_cap
from wavepp_proto.terms import (
    Attempt,
    CacheGroup,
    DaemonKey,
    GroupEndpoint,
    HoldKey,
    PrefillRequest,
    RequestId,
    Row,
    StageIndex,
    WaveOrdinal,
)

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
    wanted_slots: int = 0
    """The same in recurrent slots."""


@dataclass(frozen=True, slots=True)
class Behind:
    """Another request, computing a prefix that this one waits for."""

    front: HoldKey
    boundary: int
    """Tokens; a multiple of B, below the prompt."""
    since: float


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
    group_hits: dict[CacheGroup, int] = field(default_factory=dict)
    """Longest prefix that every stage with the group could reuse in that group alone (tokens), by first votes."""
    ignore_headroom: bool = False
    """The round that prepared it was its alone: it is oversized."""
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
    behind: Behind | None = None
    """Whom it waits for, holding nothing."""
    parks: int = 0
    """How often it has waited behind somebody."""
    hint_when_parked: int = 0
    """What it could have reused without its first wait (tokens)."""
    stops: tuple[int, ...] = ()
    """Positions at which a chunk must end, ascending: others wait for the prefix."""
    wanted_snapshots: tuple[int, ...] = ()
    """Snapshots that others wait for; the earliest promise first."""
    snapshots: tuple[int, ...] = ()
    """Positions of recurrent snapshots in chunks not sent yet, ascending."""
    taken_snapshots: tuple[int, ...] = ()
    """Those in chunks that were sent."""
    promised_snapshots: int = 0
    """Snapshots whose room is escrowed on every recurrent stage, once admitted."""
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
    def materialised(self) -> bool:
        """Every stage has taken its blocks: the last one has reported a chunk."""
        return self.computed > self.endpoint

    @property
    def best_stage_hit(self) -> int:
        return max(self.own_hits.values(), default=0)

    @property
    def admitted_snapshots(self) -> int:
        """Taken and to be taken."""
        return len(self.taken_snapshots) + len(self.snapshots)

    @property
    def lost_to_snapshots(self) -> int:
        """Tokens that every stage's blocks would have allowed beyond the endpoint, had a snapshot been there."""
        recurrent, attention = self.group_hits.get(CacheGroup.RECURRENT), self.group_hits.get(CacheGroup.ATTENTION)
        if recurrent is None or attention is None or recurrent >= attention:
            return 0
        return max(0, attention - self.endpoint)

    @property
    def shared_tokens(self) -> int:
        """Tokens of the endpoint that waiting behind others won."""
        return max(0, self.endpoint - self.hint_when_parked) if self.parks else 0

    def begin_rounds(self) -> None:
        """Forget what earlier rounds, all released since, had found."""
        self.rounds = 0
        self.held, self.own_hits, self.group_hits, self.shortages = {}, {}, {}, {}
        self.stops = self.wanted_snapshots = ()
        self.revise_to = self.left_to_agree = self.differed_at = None

    def note_own_hit(self, stage: StageIndex, tokens: int) -> None:
        """A stage of several ranks can reuse what its poorest rank can."""
        self.own_hits[stage] = min(tokens, self.own_hits.get(stage, tokens))

    def note_group_hits(self, hits: Iterable[GroupEndpoint]) -> None:
        for hit in hits:
            self.group_hits[hit.group] = min(hit.endpoint, self.group_hits.get(hit.group, hit.endpoint))

    def sent(self, row: Row, wave: WaveOrdinal) -> None:
        """A chunk is on every daemon's stream."""
        self.scheduled = row.start + row.length
        self.waves += 1
        self.last_wave = wave
        self.taken_snapshots += row.snapshots
        self.snapshots = tuple(place for place in self.snapshots if place > self.scheduled)
        self.stops = tuple(place for place in self.stops if place > self.scheduled)

    def admit(self, endpoint: int, now: float) -> None:
        self.endpoint = self.scheduled = self.computed = endpoint
        self.admitted_at = now
        self.stops = tuple(place for place in self.stops if place > endpoint)


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
    overtaken_by: set[int] = field(default_factory=set)
    """Lives of later requests of a higher priority that were served before it; bounded by the setting."""
    promoted: bool = False
    """It was overtaken often enough: no class goes before it."""
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
    def claims_headroom(self) -> bool:
        """It is oversized and not admitted yet: stages heed its claim while nothing else waits to be materialised."""
        return self.state is RequestState.PREPARING and self.current.ignore_headroom

    @property
    def tokens_left(self) -> int:
        """Tokens still to compute, as far as is known: before it is admitted, by its hint."""
        return self.prompt_tokens - (self.current.computed if self.admitted else self.current.candidate)

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
                return phases.CAPACITY_WAIT if self.current.behind is None else phases.WAIT_BEHIND
            case RequestState.ADMITTED:
                return phases.SCHEDULE
            case _:
                return phases.RUNNING if self.living else phases.ENDED
