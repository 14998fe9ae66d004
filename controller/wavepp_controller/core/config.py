"""Settings of the controller core: numbers that an operator may choose.

Owns the defaults and their ranges. Does not own where a setting comes from (flags and environment
belong to `__main__`) nor per-pipeline overrides (`PipelineMachine` keeps those of ReformAsked).
"""

from __future__ import annotations

from dataclasses import dataclass

from wavepp_controller.core.modes import MODES, OVERLAPPED
from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.terms import LinkKind

DEFAULT_SHORT_SHARE = 0.25
POLICIES = ("fixed", "mpu", "adaptive")


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    wave_tokens: int = 16_384
    """M: most tokens of one wave; each pipeline rounds it down to its block size."""
    lanes: int = limits.MAX_LANES
    """Most requests in one wave, and most requests that hold cache at once."""
    policy: str = "adaptive"
    """How waves are planned: one of POLICIES."""
    mode: str = OVERLAPPED
    """How admission and execution share time: one of MODES. The others are for comparison."""
    min_wave_tokens: int = 8_192
    """b_min: smallest budget of a wave under `mpu`, in whole blocks and at most M."""
    fills: int = 2
    """F: pipeline fills that `mpu` keeps available: R + (F - 1) P waves; 0 keeps P, as in the paper's K3 runs."""
    short_share: float = DEFAULT_SHORT_SHARE
    """Part of the tokens of waves that rests of at most one wave may take before a longer prompt; 0 = none."""
    link: LinkKind | None = None
    """None takes nccl where every daemon has a GPU of its own, gloo where every one has torch, else grpc."""
    floor_blocks: int | None = None
    """Blocks of every pool that escrows may never touch; None leaves the headroom that `headroom` computes."""
    snapshot_tokens: int = 8192
    """Distance of the periodic recurrent snapshots, rounded down to whole blocks (at least one); 0 = none."""
    share_tokens: int | None = None
    """Least that waiting behind a request with the same prefix must win; None = one block, 0 = never wait."""
    most_parks: int = 4
    """How often one attempt may wait behind another request."""
    most_bypasses: int = 8
    """Later requests of a higher priority that may go before a request; then it is aged. 0 = classes do not count."""
    aged_every: int = 16
    """One in so many tokens that are served may be of an aged request, which goes before every class."""
    attempts: int = 1
    """Formations that one request may hold cache in before its loss is final."""
    default_deadline_ms: int = limits.DEFAULT_DEADLINE_MS
    max_queued_requests: int = limits.MAX_QUEUED_REQUESTS
    max_queued_tokens: int = limits.MAX_QUEUED_TOKENS
    heartbeat_ms: int = limits.HEARTBEAT_MS
    silence_ms: int = limits.SILENCE_MS
    join_deadline_ms: int = limits.JOIN_DEADLINE_MS
    round_deadline_ms: int = limits.ROUND_DEADLINE_MS
    capacity_retry_ms: int = limits.CAPACITY_RETRY_MS
    round_rest: float = 0.0
    """Pause after a round while something runs, in times that the round took: several requests share the next."""
    release_lag_ms: int = 0
    """How long releases may wait for a round to ride in while nobody waits for room."""
    announce_deadline_ms: int = 30_000
    """An announcement that some daemon has not acknowledged by then is made again."""
    pipeline_wait_ms: int = limits.PIPELINE_WAIT_MS
    wave_timeout_ms: int = limits.WAVE_TIMEOUT_MS
    """Longest that a wave whose input is there may wait for its engine."""
    hang_ms: int | None = None
    """Least by which a wave may exceed its prediction on a stage before that stage counts as hung; None takes
    limits.HANG_MS, or twice the silence if that is more."""
    first_wave_ms: int | None = None
    """Longest that a stage may take for the first wave of a formation, and while little is known of it, unless its own
    waves have shown more. None takes what its engine allows, and `hang_ms`."""
    inventory_ms: int = limits.INVENTORY_MS
    """Between two comparisons of what a daemon holds with what it should hold."""
    reform_backoff_ms: int = 100
    """Pause before the second try to form a pipeline; doubles up to `reform_backoff_max_ms`."""
    reform_backoff_max_ms: int = limits.FORMING_MS
    traced: bool = True
    """False when nobody records spans: then none are made."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise InvalidRequest(
                f"unknown policy {self.policy}", field="policy", value=self.policy, limit=" ".join(POLICIES)
            )
        if self.mode not in MODES:
            raise InvalidRequest(f"unknown mode {self.mode}", field="mode", value=self.mode, limit=" ".join(MODES))
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                limit = f"{least}..{most}"
                raise InvalidRequest(f"{name} {value} is not in {limit}", field=name, value=value, limit=limit)
        if self.silence_ms <= self.heartbeat_ms:
            raise InvalidRequest(
                "silence must be longer than a heartbeat",
                field="silence_ms", value=self.silence_ms, limit=self.heartbeat_ms,
            )  # fmt: skip
        for name, value in (("hang_ms", self.hang_ms), ("first_wave_ms", self.first_wave_ms)):
            if value is not None and value <= self.silence_ms:
                raise InvalidRequest(
                    f"{name} must be longer than silence: a process that is stopped for less does not hang",
                    field=name, value=value, limit=self.silence_ms,
                )  # fmt: skip

    @property
    def hang_s(self) -> float:
        """`hang_ms`, as set or by default (seconds)."""
        return (self.hang_ms or max(limits.HANG_MS, 2 * self.silence_ms)) / 1e3


_TIME_MS: tuple[float, float] = (1, limits.MAX_DEADLINE_MS)
_MANY = 1 << 20
_RANGES: dict[str, tuple[float, float]] = {
    "wave_tokens": (1, limits.MAX_WAVE_TOKENS),
    "min_wave_tokens": (1, limits.MAX_WAVE_TOKENS),
    "fills": (0, limits.MAX_STAGES),
    "lanes": (1, limits.MAX_LANES),
    "floor_blocks": (0, limits.MAX_POOL_BLOCKS - 1),
    "snapshot_tokens": (0, limits.MAX_PROMPT_TOKENS),
    "share_tokens": (0, limits.MAX_PROMPT_TOKENS),
    "most_parks": (0, _MANY),
    "most_bypasses": (0, _MANY),
    "aged_every": (1, _MANY),
    "attempts": (1, _MANY),
    "round_rest": (0, 10),
    "short_share": (0, limits.MOST_SHORT_SHARE),
    "max_queued_requests": (1, _MANY),
    "max_queued_tokens": (1, 1 << 40),
} | {name: _TIME_MS for name in ControllerConfig.__dataclass_fields__ if name.endswith("_ms")}
_RANGES["release_lag_ms"] = (0, limits.ROUND_DEADLINE_MS)
"""What goes into messages must fit there, and what nobody can mean is better refused before anything starts."""
