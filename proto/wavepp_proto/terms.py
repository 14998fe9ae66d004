"""The words of the wire, as types (DESIGN.md).

Owns: identities, the fence tuple and every message that crosses a process border, as frozen
dataclasses. Does not own: their protobuf form (`convert.py`), the rules that compare them
(`fence.py`, `hashing.py`, `digest.py`). Both cores and both runtimes speak only these types.

Units: token positions and counts are tokens unless the name ends in `_blocks`; durations end in
`_ms` or `_us`; remaining time crosses the wire, never a clock reading.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

RequestId = NewType("RequestId", str)
PipelineId = NewType("PipelineId", str)
StageIndex = NewType("StageIndex", int)
Rank = NewType("Rank", int)
Incarnation = NewType("Incarnation", int)
Epoch = NewType("Epoch", int)
Formation = NewType("Formation", int)
Attempt = NewType("Attempt", int)
RoundOrdinal = NewType("RoundOrdinal", int)
WaveOrdinal = NewType("WaveOrdinal", int)
BlockHash = NewType("BlockHash", bytes)
"""32 bytes of SHA-256 over a whole prefix (hashing.py)."""
ShortHash = NewType("ShortHash", int)
"""First 8 bytes of a BlockHash, little-endian: the key of every map."""


class CacheGroup(Enum):
    """Kind of cached state with its own reuse rule."""

    ATTENTION = "attention"  # dense: every block reusable
    RECURRENT = "recurrent"  # sparse snapshots


@dataclass(frozen=True, slots=True)
class Fence:
    """The fence tuple, compared in `fence.py` before any handler runs.

    `ordinal` is a round ordinal in rounds and votes, a wave ordinal in waves and reports, a frame
    number in announcements, and 0 where order does not matter.
    """

    epoch: Epoch
    formation: Formation
    incarnation: Incarnation
    ordinal: int = 0


@dataclass(frozen=True, slots=True, order=True)
class DaemonKey:
    """A place in a pipeline. A daemon is a DaemonKey plus its incarnation."""

    pipeline: PipelineId
    stage: StageIndex
    rank: Rank = Rank(0)

    def __str__(self) -> str:
        return f"{self.pipeline}/{self.stage}.{self.rank}"

    @property
    def short(self) -> str:
        """`1`, or `1.2`. Rank 0 goes without saying: most stages have no other."""
        return f"{self.stage}.{self.rank}" if self.rank else str(self.stage)

    @property
    def place(self) -> str:
        """In words, as `short`."""
        return f"stage {self.stage} rank {self.rank}" if self.rank else f"stage {self.stage}"


@dataclass(frozen=True, slots=True)
class HoldKey:
    """Owner of leases, escrows and sequences: one attempt of one request."""

    request_id: RequestId
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context carried inside our messages (never ambient)."""

    traceparent: str = ""
    tracestate: str = ""


# --- prefill: client and controller -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the last stage chooses the first token, and what it reports beside it."""

    temperature: float = 0.0
    """0 is greedy (argmax); otherwise softmax(logits / temperature), sampled with `seed`."""
    seed: int = 0
    top_logprobs: int = 0
    """How many (token, log probability) pairs to report; 0..limits.MAX_TOP_LOGPROBS."""
    full_logits: bool = False
    """Report the whole last-position logits row (float32)."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    request_id: RequestId
    token_ids: bytes
    """Packed little-endian int32, prompt order."""
    pipeline: PipelineId | None = None
    """None lets the controller choose."""
    deadline_ms: int | None = None
    """Remaining milliseconds at the moment of sending; None = the controller's default."""
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    sampling: Sampling = Sampling()
    trace: TraceContext = TraceContext()

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids) // 4


@dataclass(frozen=True, slots=True)
class Queued:
    """The controller took the request; it is admitted once its turn comes."""

    request_id: RequestId
    pipeline: PipelineId
    position: int
    """Requests ahead in the queue when this one entered it."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """Every stage holds the request's reused prefix and room for the rest; nothing of it is computed yet."""

    request_id: RequestId
    attempt: Attempt
    endpoint: int
    """Tokens reused on every stage; a multiple of B, < prompt_tokens."""
    candidate: int
    """The hint that the first round proposed (tokens)."""
    limiting_stage: StageIndex | None
    """Stage whose own hit set the endpoint; None when every stage could reuse the same."""
    best_stage_hit: int
    """Longest prefix any one stage could have reused (tokens, capped below the prompt)."""
    rounds: int
    lost_to_snapshots: int = 0
    """Tokens that every stage's blocks would have allowed beyond `endpoint`, had a snapshot been there."""
    shared_tokens: int = 0
    """Tokens of `endpoint` that waiting behind another request won."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The last stage has computed more of the prompt."""

    request_id: RequestId
    computed_tokens: int
    """Tokens of the prompt whose cache is complete on the last stage (reused ones included)."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went, measured on the controller (ms)."""

    queue_ms: float = 0.0
    hash_ms: float = 0.0
    hint_ms: float = 0.0
    announce_ms: float = 0.0
    rounds_ms: float = 0.0
    capacity_wait_ms: float = 0.0
    admission_ms: float = 0.0
    """From Submit to admitted: all of the above."""
    prefill_ms: float = 0.0
    """From admitted to the first token."""
    sharing_wait_ms: float = 0.0
    """Waiting behind a request that computed the same prefix; part of `admission_ms`."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The outcome of a request that succeeded: its first token, and what it took."""

    request_id: RequestId
    attempt: Attempt
    first_token: int
    prompt_tokens: int
    cached_tokens: int
    timings: Timings
    waves: int
    top_logprobs: tuple[TokenLogprob, ...] = ()
    logits: bytes = b""
    """Packed little-endian float32, vocabulary order; empty unless asked for."""
    handoff: str = ""
    """Opaque hand-off handle; empty until hand-off exists."""


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: RequestId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """A typed error as data (errors.py builds and re-raises it)."""

    reason: str
    """Stable upper-case reason, the key of errors.BY_REASON."""
    message: str
    fields: tuple[tuple[str, str], ...] = ()
    """Sorted (name, value) pairs."""
    retry_after_ms: int | None = None


PrefillEvent = Queued | Admitted | Progress | Finished | Failed


# --- admission: controller and daemon -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnnounceFrame:
    """Part of a request's description; the last frame of a request carries `last`."""

    fence: Fence
    key: HoldKey
    prompt_tokens: int
    first_block: int
    """Index of the first block hash in this frame."""
    block_hashes: bytes
    """Packed 32-byte hashes of full blocks."""
    first_token: int
    """Index of the first token id in this frame."""
    token_ids: bytes
    """Packed int32; empty for daemons that do not need tokens."""
    last: bool
    sampling: Sampling = Sampling()
    trace: TraceContext = TraceContext()


@dataclass(frozen=True, slots=True)
class AnnounceAck:
    fence: Fence
    key: HoldKey
    behind: tuple[HoldKey, ...] = ()
    """Requests acknowledged by the same message."""
    refused: ErrorInfo | None = None
    """The announcement of `key` was refused: only this request fails."""


@dataclass(frozen=True, slots=True)
class GroupEndpoint:
    group: CacheGroup
    endpoint: int
    """Tokens; for the recurrent group the position of the snapshot to be used."""


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """A count of one group's cache units (blocks, or snapshots for the recurrent group)."""

    group: CacheGroup
    blocks: int


@dataclass(frozen=True, slots=True)
class Release:
    key: HoldKey
    after_wave: WaveOrdinal | None = None
    """Last wave ordinal ever sent that contains the request; None if it was never sent."""
    ended: bool = False
    """The request is over: its announcement goes too. False: it may be prepared again."""


@dataclass(frozen=True, slots=True)
class Revise:
    key: HoldKey
    endpoint: int
    """The lower endpoint to hold (tokens)."""
    group_endpoints: tuple[GroupEndpoint, ...] = ()
    snapshots: int = 0
    """As in Prepare, counted from the lower endpoint."""


@dataclass(frozen=True, slots=True)
class Prepare:
    key: HoldKey
    candidate: int
    """Endpoint to lease (tokens, a multiple of B, < prompt_tokens)."""
    group_endpoints: tuple[GroupEndpoint, ...] = ()
    snapshots: int = 0
    """Recurrent snapshots this request will take (their room is part of the escrow)."""
    ignore_headroom: bool = False
    """The one oversized request (DESIGN.md, limits)."""


@dataclass(frozen=True, slots=True)
class Round:
    """Applied in the order releases, revises, prepares; each entry atomic, the round not."""

    fence: Fence
    deadline_ms: int
    releases: tuple[Release, ...] = ()
    revises: tuple[Revise, ...] = ()
    prepares: tuple[Prepare, ...] = ()


class VoteOutcome(Enum):
    COMMITTED = "committed"  # lease, escrow and endpoint fixed at the asked endpoint
    LOWER = "lower"  # holds a shorter lease with escrow, not committed
    NO_CAPACITY = "no_capacity"  # holds nothing new; see shortfall
    NOT_ANNOUNCED = "not_announced"
    NO_HOLD = "no_hold"  # revise of something not held


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room on one daemon. `seq` grows with every change, so answers compare by seq."""

    seq: int
    free_blocks: int
    evictable_blocks: int
    escrowed_blocks: int = 0
    host_free_blocks: int = 0
    recurrent_free: int = 0
    recurrent_evictable: int = 0
    recurrent_escrowed: int = 0
    """Recurrent counts are slots: each is a working state or a snapshot."""


@dataclass(frozen=True, slots=True)
class Vote:
    key: HoldKey
    outcome: VoteOutcome
    endpoint: int
    """Endpoint really held after this entry (tokens); 0 when nothing is held."""
    own_hit: int
    """Longest prefix this daemon alone could reuse (tokens, capped below the prompt)."""
    group_endpoints: tuple[GroupEndpoint, ...] = ()
    """Own hit of each cache group this daemon has (tokens, capped below the prompt), whatever was asked."""
    demand_blocks: int = 0
    shortfall: tuple[GroupBlocks, ...] = ()
    backed_free: int = 0
    backed_offload: int = 0
    backed_evict: int = 0
    """What backs the escrow: free blocks, blocks to off-load, blocks to evict."""


@dataclass(frozen=True, slots=True)
class Votes:
    fence: Fence
    votes: tuple[Vote, ...]
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class HoldState:
    key: HoldKey
    phase: str
    """leased, escrowed, committed, materialising or owned."""
    endpoint: int
    leased_blocks: int
    escrow_blocks: int
    owned_blocks: int
    escrow_states: int = 0
    owned_states: int = 0


@dataclass(frozen=True, slots=True)
class Inventory:
    fence: Fence
    holds: tuple[HoldState, ...]
    announced: tuple[HoldKey, ...]
    last_round: RoundOrdinal
    last_wave: WaveOrdinal
    running_hash: bytes
    capacity: Capacity
    pool_blocks: int
    cached_blocks: int
    quarantined_blocks: int
    handoffs: tuple[str, ...] = ()
    state_slots: int = 0
    cached_states: int = 0
    quarantined_states: int = 0
    host_pool_blocks: int = 0
    host_cached_blocks: int = 0
    """Host blocks that nobody holds."""


# --- digests ------------------------------------------------------------------------------------


class DigestKind(Enum):
    SNAPSHOT = "snapshot"  # one page of an atomic copy
    DELTA = "delta"


@dataclass(frozen=True, slots=True)
class GroupDigest:
    """What changed (delta) or what is there (snapshot page) in one group."""

    group: CacheGroup
    added: bytes
    """Packed 8-byte short hashes whose residency on any tier went 0 to 1."""
    removed: bytes
    count: int
    """Hashes resident after this digest (for a snapshot: of the whole snapshot)."""
    checksum: int
    """Sum of resident short hashes mod 2^64 after this digest."""


@dataclass(frozen=True, slots=True)
class Digest:
    incarnation: Incarnation
    seq: int
    """Grows by one per delta; every page of a snapshot carries the seq of the copy."""
    kind: DigestKind
    groups: tuple[GroupDigest, ...]
    capacity: Capacity
    page: int = 0
    last_page: bool = True


# --- execution ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One chunk of a wave: `[start, start + length)` of a request."""

    key: HoldKey
    start: int
    length: int
    final: bool = False
    """This chunk ends the prompt: the last stage reports the first token."""
    snapshots: tuple[int, ...] = ()
    """Token positions in (start, start + length], multiples of B, at which a recurrent snapshot is taken."""


@dataclass(frozen=True, slots=True)
class WaveCommand:
    fence: Fence
    rows: tuple[Row, ...]
    limit_ms: int = 0
    """Longest that an engine may take for it; 0: not told."""

    @property
    def ordinal(self) -> WaveOrdinal:
        return WaveOrdinal(self.fence.ordinal)

    @property
    def tokens(self) -> int:
        return sum(row.length for row in self.rows)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Either direction on RunWaves; a daemon's carries its state, the controller's only count."""

    fence: Fence
    count: int
    executing_wave: WaveOrdinal | None = None
    queued_waves: int = 0
    loop_delay_us: int = 0
    capacity: Capacity | None = None
    draining: bool = False
    """The daemon wants to leave: admit nothing new, end the formation when nothing runs."""
    reported_wave: WaveOrdinal = WaveOrdinal(0)
    """From the controller: last wave whose report it has; later reports are sent again on a new stream."""
    executing_ms: int = 0
    """Since the engine was given the executing wave, on the daemon's own clock."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One wave on one stage, split (microseconds)."""

    compute_us: int = 0
    activation_wait_us: int = 0
    admission_wait_us: int = 0
    preparing_us: int = 0
    idle_us: int = 0
    """Nothing to do since the previous wave."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """What the last stage says about a row that ended its prompt."""

    row: int
    token_id: int
    top_logprobs: tuple[TokenLogprob, ...] = ()
    logits: bytes = b""


@dataclass(frozen=True, slots=True)
class RowFault:
    row: int
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class WaveReport:
    fence: Fence
    done: bool
    """False: the engine, the link or a deadline failed; the formation ends."""
    void_bitmap: int
    """Bit i = row i is void (128 bits)."""
    running_hash: bytes
    """SHA-256 over all rows executed in this formation (invariant I1)."""
    times: StageTimes
    results: tuple[RowResult, ...] = ()
    faults: tuple[RowFault, ...] = ()
    """Rows voided on THIS stage, with the cause."""
    capacity: Capacity | None = None
    error: ErrorInfo | None = None
    partial: bool = False
    """Results only: the rest of this wave's report follows. Never reaches a core."""


# --- membership and control ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a controller must know of a model without reading it."""

    name: str
    """Folder or preset name, as the operator wrote it."""
    fingerprint: str
    """Equal on all stages of a pipeline (configuration plus weight index)."""
    layers: int
    vocabulary: int
    window: int
    """Longest prompt in tokens."""
    path: str = ""
    """Folder that holds the tokenizer; may not exist on other hosts."""
    recurrent_layers: tuple[int, ...] = ()
    """Global numbers of the layers with recurrent state, ascending; the others attend."""

    def groups_of(self, first_layer: int, last_layer: int) -> tuple[CacheGroup, ...]:
        """Cache groups of the band [first_layer, last_layer)."""
        recurrent = sum(first_layer <= layer < last_layer for layer in self.recurrent_layers)
        attention = last_layer - first_layer - recurrent
        groups = ((CacheGroup.ATTENTION, attention), (CacheGroup.RECURRENT, recurrent))
        return tuple(group for group, layers in groups if layers)


@dataclass(frozen=True, slots=True)
class Numerics:
    """What all stages of a pipeline must compute alike, beside the model itself: what one stage sends or caches means
    something else to a stage that differs here."""

    dtype: str = ""
    """Of weights, activations and cache."""
    hidden: int = 0
    """Width of an activation row; 0 for engines without tensors."""
    quantization: str = ""
    """Of weights and cache; empty for plain tensors."""
    packages: str = ""
    """Whose arithmetic it is, with versions: `torch 2.9.1, transformers 5.1.0`."""


NOTHING_LOADED = 1
"""As the number of a load: before the first, and after one that failed or an engine that broke."""


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A daemon's registration in etcd."""

    cluster: str
    key: DaemonKey
    incarnation: Incarnation
    stages: int
    """P: how many stages the operator planned."""
    ranks: int
    address: str
    """host:port of its gRPC server, as advertised."""
    link_address: str
    """host:port of its torch.distributed store; empty if its engine has none."""
    engine: str
    model: ModelFacts
    first_layer: int
    last_layer: int
    """Band [first_layer, last_layer), global numbers."""
    block_tokens: int
    pool_blocks: int
    host_pool_blocks: int
    protocol: int
    groups: tuple[CacheGroup, ...] = (CacheGroup.ATTENTION,)
    pid: int = 0
    version: str = ""
    state_slots: int = 0
    """Slots of the recurrent group (working states and snapshots), for any band with recurrent layers; 0 where the
    model has none."""
    engine_load: int = 0
    """Of an engine that all stages load together: the number of the load that it comes from, the same on all who loaded
    together, or NOTHING_LOADED. 0 for engines that load alone."""
    gpu: str = ""
    """What names the GPU that it computes on among all GPUs of the pipeline; empty on a CPU."""
    numerics: Numerics = Numerics()
    """All empty from a daemon of an earlier version, which agrees with its like alone."""
    adapters: bool = False
    """Its engine applies the adapter that a request names."""


class LinkKind(Enum):
    NONE = "none"  # one stage
    GLOO = "gloo"
    NCCL = "nccl"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class Peer:
    key: DaemonKey
    incarnation: Incarnation
    address: str
    link_address: str
    first_layer: int = 0
    last_layer: int = 0
    """Band [first_layer, last_layer)."""
    engine_load: int = 0
    """As in its MemberRecord: all stages load again unless all peers say the same load."""
    pool_blocks: int = 0


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """Everything a standing daemon needs to serve one formation of a pipeline."""

    fence: Fence
    key: DaemonKey
    stages: int
    ranks: int
    model_fingerprint: str
    first_layer: int
    last_layer: int
    block_tokens: int
    pool_blocks: int
    host_pool_blocks: int
    floor_blocks: int
    """Blocks that escrows may never touch."""
    wave_tokens: int
    """M: most tokens in one wave."""
    lanes: int
    """Most rows in one wave; at most 128."""
    link: LinkKind
    link_store: str
    """host:port of stage 0's store (torch.distributed links)."""
    peers: tuple[Peer, ...]
    """All daemons of the pipeline, by (stage, rank)."""
    deadline_ms: int
    heartbeat_ms: int = 250
    silence_ms: int = 1250
    state_slots: int = 0
    groups: tuple[CacheGroup, ...] = (CacheGroup.ATTENTION,)
    """Cache groups of the band: what this stage must hold for a prefix to be reusable."""
    first_round: RoundOrdinal = RoundOrdinal(0)
    """Ordinal of this formation's first round, so that its loss is noticed; 0 = any."""


@dataclass(frozen=True, slots=True)
class JoinReply:
    fence: Fence
    key: DaemonKey
    pool_blocks: int
    needs_tokens: bool
    groups: tuple[CacheGroup, ...]
    hidden: int
    """Width of an activation row; 0 for engines without tensors."""
    bytes_per_block: int
    capacity: Capacity
    device: str = ""
    loaded_layers: tuple[int, ...] = field(default=())
    state_slots: int = 0
    bytes_per_state: int = 0
    engine_load: int = 0
    """As in the member record, which follows."""
    host_pool_blocks: int | None = None
    """None from a daemon of an earlier version: as planned."""
    wave_allowance_ms: int | None = None
    """Longest that one wave may take on its engine while nothing was learnt of it; None from an earlier version."""
