"""What belongs to one attempt of one request.

Owns the facts of a try, from its announcement over its rounds and its wait behind another request to its
positions in waves. They are replaced as a whole when the request starts over (`request`), so that nothing of
a lost try can leak into the next. Decides nothing: `admission`, `sharing`, `demand` and `execution` write here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from wavepp_proto.terms import CacheGroup, DaemonKey, GroupEndpoint, HoldKey, Row, StageIndex, WaveOrdinal


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
