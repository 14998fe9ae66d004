"""What an operator says about one stage daemon, validated.

Owns defaults and checks; the command (`__main__`) and tests build it, `daemon.py` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime.channels import ClientSecurity, ServerSecurity
from wavepp_proto.runtime.record import check_name
from wavepp_proto.terms import DaemonKey, PipelineId, Rank, StageIndex

ENGINES = ("torch", "emulated", "trtllm")
MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class StageSettings:
    stage: int
    stages: int
    model: str
    """Folder of a Hugging Face causal model (torch, trtllm), or an `emulated:` preset."""
    engine: str = "torch"
    cluster: str = "default"
    pipeline: str = "default"
    layers: tuple[int, int] | None = None
    """Band [first, last); None splits the model evenly over the stages."""
    block_tokens: int = 64
    pool_blocks: int = 1024
    host_pool_blocks: int = 0
    """Blocks of the host tier; 0 = none."""
    state_slots: int = 64
    """Slots for recurrent states, where the band has recurrent layers: one a running request, the rest snapshots."""
    wave_tokens: int = 16_384
    lanes: int = limits.MAX_LANES
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    device: str | None = None
    """None: cpu for torch, cuda:0 for trtllm."""
    dtype: str | None = None
    """None: float32 for torch, the model's own for trtllm."""
    threads: int | None = None
    """Intra-op threads of the torch engine; None leaves a core's share to the event loop."""
    server_security: ServerSecurity = field(default_factory=ServerSecurity)
    client_security: ClientSecurity = field(default_factory=ClientSecurity)
    reflection: bool = False
    metrics: str | None = None
    """host:port of the Prometheus endpoint; None serves none."""
    rank: int = 0
    ranks: int = 1
    """Daemons of the stage, and which of them this is."""

    def __post_init__(self) -> None:
        _between("stages", self.stages, 1, limits.MAX_STAGES)
        _between("stage", self.stage, 0, self.stages - 1)
        _between("ranks", self.ranks, 1, limits.MAX_RANKS)
        _between("rank", self.rank, 0, self.ranks - 1)
        _between("block_tokens", self.block_tokens, 1, limits.MAX_BLOCK_TOKENS)
        _between("pool_blocks", self.pool_blocks, 1, limits.MAX_POOL_BLOCKS)
        _between("host_pool_blocks", self.host_pool_blocks, 0, limits.MAX_POOL_BLOCKS)
        _between("state_slots", self.state_slots, 1, limits.MAX_STATE_SLOTS)
        _between("wave_tokens", self.wave_tokens, self.block_tokens, limits.MAX_WAVE_TOKENS)
        _between("lanes", self.lanes, 1, limits.MAX_LANES)
        if self.threads is not None:
            _between("threads", self.threads, 1, MAX_THREADS)
        if self.engine not in ENGINES:
            raise InvalidRequest(
                f"unknown engine {self.engine!r}", field="engine", value=self.engine, limit=str(ENGINES)
            )
        if self.dtype is not None and self.dtype not in limits.DTYPES:
            raise InvalidRequest(
                f"unknown dtype {self.dtype!r}", field="dtype", value=self.dtype, limit=", ".join(limits.DTYPES)
            )
        if self.engine == "torch" and self.ranks > 1:
            raise InvalidRequest("engine torch has no ranks", field="ranks", value=self.ranks, limit=1)
        for name in ("cluster", "pipeline"):
            check_name(name, getattr(self, name))
        if len(self.model) > limits.MAX_PATH_CHARS:
            raise InvalidRequest(
                f"model has {len(self.model)} characters, at most {limits.MAX_PATH_CHARS}",
                field="model", value=len(self.model), limit=limits.MAX_PATH_CHARS,
            )  # fmt: skip

    @property
    def key(self) -> DaemonKey:
        return DaemonKey(PipelineId(self.pipeline), StageIndex(self.stage), Rank(self.rank))

    def band(self, layers: int) -> tuple[int, int]:
        """[first, last) of this stage: as given, or an even split (earlier stages get the remainder)."""
        if self.layers is not None:
            first, last = self.layers
            if not 0 <= first < last <= layers:
                raise InvalidRequest(
                    f"layers {first}:{last} are not inside 0:{layers}",
                    field="layers", value=f"{first}:{last}", limit=f"0:{layers}",
                )  # fmt: skip
            return first, last
        if layers < self.stages:
            raise InvalidRequest(
                f"{layers} layers cannot fill {self.stages} stages", field="stages", value=self.stages, limit=layers
            )
        share, rest = divmod(layers, self.stages)
        first = self.stage * share + min(self.stage, rest)
        return first, first + share + (self.stage < rest)


def parse_layers(text: str) -> tuple[int, int]:
    """`first:last` as a band."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise InvalidRequest(f"layers must be first:last, got {text!r}", field="layers", value=text)
    return int(first), int(last)


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} {value} is not in {low}..{high}", field=name, value=value, limit=f"{low}..{high}")
