"""What a stage engine and an activation link are (DESIGN.md).

Owns the two Protocols that the executor drives, and the plain data they exchange. One executor
thread per daemon calls every method of an engine; nothing else does. Three engines implement
`StageEngine`: emulated, torch, trtllm.

One wave on one stage:

    WaveCommand + block tables ──▶ WaveWork ─┐
    previous stage ──▶ link ──▶ payload ─────┼──▶ engine.run ──▶ WaveOutcome.payload ──▶ link ──▶ next
                                             └──▶ RowResult per final row (last stage)

"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from wavepp_proto import limits
from wavepp_proto.errors import LinkFault, NonFinite, RowVoided
from wavepp_proto.terms import CacheGroup, LinkKind, RowResult, WaveOrdinal
from wavepp_stage.core.work import BlockTable, CopyDirection, CopyLot, RowWork, StateWork, WaveWork

__all__ = [
    "HEADER_BYTES",
    "ActivationLink",
    "BlockTable",
    "CopyDirection",
    "CopyLot",
    "EngineFacts",
    "EnginePlan",
    "EngineTraits",
    "LinkListener",
    "LinkPlan",
    "Payload",
    "RowWork",
    "StageEngine",
    "StageGroup",
    "StateWork",
    "WaveHeader",
    "WaveOutcome",
    "WaveWork",
    "not_finite",
    "row_voided",
]

Payload = Any
"""Activations of one wave: the engine's own type (torch.Tensor [tokens, hidden], numpy array...)."""


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What an engine declares before it is loaded: how its daemon must deal with it."""

    cache_thread: str = "any"
    """`any`: the cache manager is ours, and every thread may ask it. `engine`: it is the engine's own, so what may
    touch it runs on the executor's thread, between two waves."""
    needs_tokens: bool = False
    """Its cache matches on tokens: they are announced to every stage, not to the first alone."""
    eager_escrow: bool = False
    """An escrow takes its room at once: materialising takes nothing more, and block tables are empty."""
    collective: bool = False
    """All stages load together, in `EnginePlan.group`, and one that has nothing loaded makes all load again."""
    adapters: bool = False
    """It applies the adapter that a request names: a pipeline takes such requests if all its engines do."""


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Who loads together, of an engine whose load is collective. What was loaded serves every plan that names the same
    load, with the same bands and pools."""

    load: int
    """Number of the load: the one that all engines come from already, or that of this join."""
    bands: tuple[tuple[int, int], ...]
    """[first, last) of each stage."""
    pools: tuple[int, ...]
    """Blocks of each daemon by place."""
    name: str = field(compare=False)
    """`epoch.formation` of the join that loads: nothing of an earlier try is mistaken for one of this."""
    store: str = field(compare=False)
    """host:port of the torch.distributed store of place 0."""
    timeout_s: float = field(compare=False)
    """Longest wait for the others, all steps of the load together."""
    abandoned: threading.Event = field(default_factory=threading.Event, compare=False)
    """Set once the join that loads is given up: whoever still waits for the others (`meeting.gather`) stops."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """How to load one stage. Loading again with another plan replaces band, pool and budget."""

    model: str
    """Folder (torch, trtllm) or preset (emulated)."""
    stage: int
    stages: int
    first_layer: int
    last_layer: int
    """Band [first_layer, last_layer), global layer numbers."""
    block_tokens: int
    pool_blocks: int
    wave_tokens: int
    """M: most tokens in one wave."""
    lanes: int
    host_pool_blocks: int = 0
    state_slots: int = 0
    """Slots for recurrent states; 0 where the band has no recurrent layer."""
    rank: int = 0
    ranks: int = 1
    """Tensor-parallel daemons of this stage, of which this is number `rank`. All get the same waves, and only rank 0 of
    the last stage is asked to sample. A row may be void on one alone: an engine whose ranks compute together agrees
    on the rows first, and reports those that another rank cannot run as faults, so that nobody publishes them."""
    group: StageGroup | None = None
    """Set for engines whose load is collective."""

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def place(self) -> int:
        """Number of this daemon among all of its pipeline, stage by stage."""
        return self.stage * self.ranks + self.rank


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a loaded engine declares."""

    hidden: int
    """Width of a payload row; 0 for engines without tensors."""
    bytes_per_block: int
    device: str
    loaded_layers: tuple[int, ...]
    """Global layer numbers really loaded."""
    groups: tuple[CacheGroup, ...] = (CacheGroup.ATTENTION,)
    """Of the band that was loaded. A stage without attention layers still numbers blocks, of 0 bytes each."""
    bytes_per_state: int = 0
    """One slot of recurrent state over all layers of the band."""
    wave_allowance_s: float = limits.FIRST_WAVE_MS / 1000
    """Longest that one wave may take as long as nobody has learnt how long waves take: the first may compile."""


@dataclass(frozen=True, slots=True)
class WaveOutcome:
    payload: Payload | None
    """For the next stage; None on the last one."""
    results: tuple[RowResult, ...] = ()
    """One per row that carried `sampling` and is not void: rows do on rank 0 of the last stage."""
    faults: dict[int, str | NonFinite] = field(default_factory=dict)
    """Row index to cause, for rows this engine found wrong (bad canary, NaN...); they become void. Their payload rows
    are zero, they have no result, and nothing that they wrote is left to be read."""


def not_finite(plan: EnginePlan, row: int, what: str, layer: int | None = None) -> NonFinite:
    """The fault of a row that computed NaN or infinity; `layer` is where it was seen first, if that is known."""
    where = f"stage {plan.stage}" if layer is None else f"layer {layer} of stage {plan.stage}"
    rank = plan.rank if plan.ranks > 1 else None
    return NonFinite(f"{what} of {where} are not finite", stage=plan.stage, rank=rank, layer=layer, row=row)


def row_voided(cause: str | NonFinite, stage: int, row: int) -> RowVoided:
    """What the report says of a row that an engine found wrong."""
    return cause if isinstance(cause, NonFinite) else RowVoided(cause, stage=stage, row=row)


class StageEngine(Protocol):
    """Executes one stage's layers against a paged cache it owns.

    The cache manager decides which block holds what; the engine only reads and writes the blocks
    that a RowWork names. Any exception from `run` ends the formation; a fault of one row does not. A row that computed
    NaN or infinity (what it sends on, stores or samples from) is such a fault, and must not reach any other row.
    """

    name: ClassVar[str]

    def load(self, plan: EnginePlan, progress: Callable[[int, int], None]) -> EngineFacts:
        """Load weights of the band and allocate the pool; report (done, total) units.

        A collective engine meets the others of `plan.group` here, and ends at its time-out if they do not come.
        Raises errors.EngineFault naming the field when the plan cannot be served."""

    def run(self, wave: WaveWork, payload: Payload | None) -> WaveOutcome:
        """Compute one wave. `payload` is None on the first stage only."""

    def copy(self, lot: CopyLot) -> None:
        """Copy blocks between device and host; returns when the copies are complete.

        Called from ONE thread of its own, beside `run`: the blocks of a lot are in no running wave. Raises
        EngineFault when the engine has no host tier or an id leaves its pool."""

    def receive_buffer(self, tokens: int) -> Payload:
        """A fresh payload of `tokens` rows for a link to receive into."""

    def encode(self, payload: Payload) -> bytes:
        """Payload as bytes, for links that carry bytes."""

    def decode(self, data: bytes, tokens: int) -> Payload:
        """Inverse of `encode`; raises ValueError when the size does not match `tokens` rows."""

    def close(self) -> None:
        """Free weights and pool. Safe to call twice."""


HEADER = struct.Struct("<QQ16sIII4x16s")
HEADER_BYTES = 64
assert HEADER.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class WaveHeader:
    """The 64 bytes ahead of every payload (DESIGN.md, execution rules)."""

    formation: int
    ordinal: int
    chunks: bytes
    """First 16 bytes of the chunk-list hash: both stages run the same rows or stop."""
    tokens: int
    hidden: int
    payload_bytes: int
    void_bitmap: int

    def pack(self) -> bytes:
        return HEADER.pack(
            self.formation, self.ordinal, self.chunks, self.tokens, self.hidden, self.payload_bytes,
            self.void_bitmap.to_bytes(16, "little"),
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes) -> WaveHeader:
        """Raises LinkFault when `data` is no header."""
        if len(data) != HEADER_BYTES:
            raise LinkFault("a payload's header has another size", field="header", value=len(data), limit=HEADER_BYTES)
        formation, ordinal, chunks, tokens, hidden, size, void = HEADER.unpack(data)
        return cls(formation, ordinal, chunks, tokens, hidden, size, int.from_bytes(void, "little"))

    def check(self, stage: int, **expected: int | bytes) -> None:
        """LinkFault, naming both stages, unless every field named here is what `stage` expects of the one before it.

        Links keep their order and lose nothing while they live: another wave is a gap or a repetition, and what was
        left out never comes."""
        for name, want in expected.items():
            got = getattr(self, name)
            if got == want:
                continue
            shown = [value.hex() if isinstance(value, bytes) else str(value) for value in (got, want)]
            why = f"wave {shown[1]}" if name == "ordinal" else f"{name} {shown[1]}, not {shown[0]},"
            raise LinkFault(
                f"stage {stage} refused wave {self.ordinal} of stage {stage - 1}: {why} was expected",
                field=name, value=shown[0], limit=shown[1], stage=stage, refused_stage=stage - 1,
            )  # fmt: skip


class LinkListener(Protocol):
    """The executor's side of a link; called from the link's own thread, never blocking it."""

    def on_activation(self, header: WaveHeader, payload: Payload) -> None:
        """Raises LinkFault for a payload that is not the next one: the link is lost, and tells the other side if it
        can."""

    def on_link_lost(self, reason: str | LinkFault) -> None:
        """The link carries no further wave. A LinkFault names what was refused, by whom."""


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """One formation's link on one stage. A plan is used once; a new formation makes a new link."""

    kind: LinkKind
    epoch: int
    formation: int
    stage: int
    stages: int
    store: str
    """host:port of stage 0's torch.distributed store."""
    next_address: str
    """gRPC address of the same rank of the next stage; empty on the last."""
    next_incarnation: int
    advertise_host: str
    """Address others reach us by; gloo binds to it."""
    connect_timeout_s: float
    wave_timeout_s: float
    """Longest that one payload may travel once its header is there."""
    rank: int = 0
    """A link leads from rank to rank: each rank has its own chain through the stages."""
    fill_timeout_s: float = limits.FILL_TIMEOUT_MS / 1000
    """Longest that a header may be under way. It waits for whatever the other end does before it: waves of any length,
    of which the controller knows whether they take too long."""


class ActivationLink(Protocol):
    """Carries payloads to the next stage and from the previous one, for one formation."""

    def open(self) -> None:
        """Connect; blocks up to `connect_timeout_s`. Raises errors.LinkFault."""

    def expect(self, ordinal: WaveOrdinal, tokens: int) -> None:
        """Post the receive of one wave (in ordinal order; at most two outstanding)."""

    def send(self, header: WaveHeader, payload: Payload) -> None:
        """Hand over one payload; returns at once, the link owns the buffers until completion."""

    def close(self) -> None:
        """End the link without waiting for a peer: a blocked thread is abandoned and counted."""
