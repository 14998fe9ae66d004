"""One request as the controller sees it.

Owns the facts of a request, its place in the table and its story. Its holds and positions belong to an
attempt (`attempt`) and are replaced as a whole when it starts over. Does not own queues or rounds: those
refer to requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from wavepp_controller.core import phases
from wavepp_controller.core.attempt import Try
from wavepp_controller.core.phases import PhaseLog
from wavepp_controller.core.request_table import HOLDING, TERMINAL, RequestInput, RequestState, next_state
from wavepp_proto.digest import Hashes
from wavepp_proto.hashing import HashScope, blocks_for, reuse_cap
from wavepp_proto.terms import Attempt, HoldKey, PrefillRequest, RequestId

STORY_LINES = 64
Step = tuple[float, RequestState, RequestInput, RequestState, Attempt]
"""When, from which state, by what, to which, in which attempt."""
FIRST_ATTEMPT = Attempt(1)
NO_PLACE = -1


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
    root: int | None = None
    """The first of them: requests of different roots share nothing."""
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
        self.root = int(chain[0]) if chain.size else None
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
