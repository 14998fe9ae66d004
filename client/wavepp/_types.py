"""What the SDK hands back: results, outcomes of many, the description of a pipeline.

Owns the public value types that exist only on the client; events, sampling and errors are the
wire's own (`wavepp_proto.terms`, `wavepp_proto.errors`). No behaviour, no protobuf, no event loop.

Annotations are evaluated here (no `__future__` import): these classes carry the module name
`wavepp`, under which a postponed annotation could not be resolved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from wavepp_proto.errors import WaveppError
from wavepp_proto.terms import Sampling, StageIndex, Timings, TokenLogprob

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """One finished request: its first token, how much was reused, and where the time went."""

    request_id: str
    pipeline: str
    """The pipeline that computed it; empty if the controller never said."""
    first_token: int
    first_text: str | None = None
    """The first token as text; None unless text went in."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens whose cache was reused on every stage instead of computed."""
    endpoint: int
    """Token position where reuse ended: what the stages agreed on."""
    candidate: int
    """Endpoint that the controller's hint proposed (tokens)."""
    limiting_stage: StageIndex | None
    """Stage whose own hit set the endpoint; None when every stage could reuse the same."""
    best_stage_hit: int
    """Longest prefix that any one stage could have reused (tokens)."""
    lost_to_snapshots: int = 0
    """Tokens beyond `endpoint` that every stage's blocks held, but no recurrent snapshot let it use."""
    shared_tokens: int = 0
    """Tokens of `endpoint` won by waiting behind another request with the same prefix."""
    rounds: int
    """Prepare rounds until all stages agreed."""
    attempt: int
    """Try of the controller that succeeded, from 1."""
    waves: int
    """Waves that carried a chunk of the request."""
    timings: Timings
    """Measured on the controller (ms)."""
    elapsed_ms: float
    """From the call to the first token, measured here: retries, network and tokenizing included."""
    top_logprobs: tuple[TokenLogprob, ...] = ()
    """Most likely first; as many as `Sampling.top_logprobs` asked for."""
    logits_bytes: bytes = field(default=b"", repr=False)
    """Packed little-endian float32, vocabulary order; empty unless `Sampling.full_logits`."""
    handoff: str = ""
    """Opaque handle for a decode worker; empty when the cache is not held for one."""
    trace_id: str
    """32 hexadecimal digits; the same id names the request's spans in every process."""

    @property
    def logits(self) -> "npt.NDArray[np.float32] | None":
        """Read-only float32 of shape (vocabulary,), a view on `logits_bytes`; None unless asked for."""
        if not self.logits_bytes:
            return None
        import numpy as np

        return np.frombuffer(self.logits_bytes, dtype="<f4")


@dataclass(frozen=True, slots=True)
class PrefillOutcome:
    """What became of one of many prompts: exactly one of `result` and `error` is set."""

    index: int
    """Position of the prompt in what was given to `prefill_many`, from 0."""
    result: PrefillResult | None = None
    error: WaveppError | None = None

    def unwrap(self) -> PrefillResult:
        """The result, or the error raised."""
        if self.result is None:
            raise self.error or AssertionError("an outcome without result and error")
        return self.result


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a client may know of a pipeline before it sends tokens."""

    pipeline: str
    model: str
    model_path: str
    """Folder of the model on the stages' hosts; it may not exist on this one."""
    model_fingerprint: str
    vocabulary: int
    window: int
    """Longest prompt (tokens)."""
    block_tokens: int
    stages: int
    ready: bool
    """False: no formation at the moment."""


class Tokenizer(Protocol):
    """What text prompts need; tokenizers of transformers fit as they are."""

    def encode(self, text: str, /) -> Sequence[int]:
        """Token ids, special tokens included."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Text of the ids, special tokens included."""


class SharedOptions(TypedDict, total=False):
    """Options that several requests can share, each with its default."""

    pipeline: str | None
    """None lets the controller choose. Name one if pipelines serve different models."""
    deadline: float | None
    """Seconds from the call until the answer is worthless; None takes the client's own."""
    priority: int
    """-9..9, higher first; 0."""
    cache_salt: str
    """Separates tenants in the cache: reuse only among requests with the same salt."""
    adapter: str
    """Name of the adapter the stages apply; empty for none. Refused unless every engine of the pipeline applies
    adapters: none of those that WavePP brings does."""
    sampling: Sampling
    """How the first token is chosen and what is reported beside it; greedy, nothing."""


class RequestOptions(SharedOptions, total=False):
    """Options of one request."""

    request_id: str | None
    """Unique among live requests; None makes one."""


if TYPE_CHECKING:
    Prompt = str | Sequence[int] | bytes | bytearray | memoryview | npt.NDArray[np.integer[Any]]
else:
    Prompt = Any
