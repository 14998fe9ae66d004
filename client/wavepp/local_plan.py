"""What a cluster on one machine shall be: model, stages, pools, addresses, security.

Owns the values and their checks; `local_cluster.py` runs them, `wavepp up`, the demo and tests draw
them up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.preset import values_of
from wavepp_proto.runtime.channels import parse_address
from wavepp_proto.runtime.logs import check_level
from wavepp_proto.runtime.options import link_kind
from wavepp_proto.runtime.record import check_name
from wavepp_proto.terms import LinkKind

POLICIES: Final = ("adaptive", "mpu", "fixed")
MODES: Final = ("overlapped", "lockstep", "drain")
"""The controller's own names, which the client cannot import: a test compares them."""
PRESET_FORM: Final = "write emulated:key=value,... such as emulated:layers=32,vocabulary=32000,window=65536"


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What to run. `pool_blocks`, `host_pool_blocks` and `state_slots` have one entry for all, one a stage or one a
    daemon (in the order of `places`); `layers` one a stage, or none."""

    model: str
    engine: str = "torch"
    stages: int = 4
    ranks: int = 1
    """Tensor-parallel daemons of each stage."""
    pool_blocks: Sequence[int] = (1024,)
    host_pool_blocks: Sequence[int] = (0,)
    """Blocks of the host tier; 0 = none."""
    state_slots: Sequence[int] = (64,)
    """Recurrent states, on stages whose layers have any."""
    layers: Sequence[str] = ()
    """Bands first:last, one a stage; empty splits evenly."""
    block_tokens: int = 64
    wave_tokens: int = 16_384
    policy: str | None = None
    """How the controller plans waves; None leaves it to the controller, as with the next five."""
    mode: str | None = None
    """How admission and execution share time."""
    min_wave_tokens: int | None = None
    fills: int | None = None
    short_share: float | None = None
    """Part of the tokens of waves that short prompts may take before a long one."""
    model_file: Path | None = None
    """Where it keeps what it learns of stage times."""
    link: str | None = None
    device: str | None = None
    """None leaves it to the engine; a stage of trtllm not on `cpu` is shown one GPU of this machine, by its place."""
    dtype: str | None = None
    threads: int | None = None
    listen: str = "127.0.0.1:7411"
    cluster: str = "default"
    pipeline: str = "default"
    etcd: str | None = None
    """Endpoints of an etcd that runs already; None brings a throw-away one."""
    etcd_ca: Path | None = None
    """CA of the etcd that runs already; turns TLS towards it on."""
    etcd_cert: Path | None = None
    etcd_key: Path | None = None
    otlp: str | None = None
    trace_sample: float = 1.0
    silence_ms: int = 1250
    hang_ms: int | None = None
    """Least by which a wave may exceed its prediction; None leaves it to the controller, as the next."""
    first_wave_ms: int | None = None
    """What a stage may take for its first wave."""
    headroom_blocks: int | None = None
    """Blocks of every pool that are promised to nobody; None leaves it to the controller."""
    snapshot_tokens: int = 8192
    """Between two periodic recurrent snapshots; 0 = none."""
    share_tokens: int | None = None
    """Least that waiting for another request's prefix must win (tokens); None leaves it to the controller."""
    log_level: str = "info"
    timeout_s: float = 120.0
    tls: Mapping[str, str] = field(default_factory=dict)
    """--tls-ca, --tls-cert, --tls-key, --tls-server-name by name without dashes."""

    def __post_init__(self) -> None:
        _check_model(self.engine, self.model)
        check_name("cluster", self.cluster)
        check_name("pipeline", self.pipeline)
        _between("stages", self.stages, limits.MAX_STAGES)
        _between("ranks", self.ranks, limits.MAX_RANKS)
        if self.engine == "torch" and self.ranks > 1:
            raise InvalidRequest("engine torch has no ranks", field="ranks", value=self.ranks, limit=1)
        a_daemon = (1, self.stages, self.stages * self.ranks)
        each = {"pool_blocks": a_daemon, "host_pool_blocks": a_daemon, "state_slots": a_daemon}
        for name, counts in {**each, "layers": (0, self.stages)}.items():
            given = len(getattr(self, name))
            if given not in counts:
                raise InvalidRequest(
                    f"{name} has {given} values for {self.stages} stages", field=name, value=given, limit=self.stages
                )
        for blocks in self.pool_blocks:
            _between("pool_blocks", blocks, limits.MAX_POOL_BLOCKS)
        for blocks in self.host_pool_blocks:
            _between("host_pool_blocks", blocks, limits.MAX_POOL_BLOCKS, least=0)
        for slots in self.state_slots:
            _between("state_slots", slots, limits.MAX_STATE_SLOTS)
        _between("block_tokens", self.block_tokens, limits.MAX_BLOCK_TOKENS)
        _between("wave_tokens", self.wave_tokens, limits.MAX_WAVE_TOKENS, least=self.block_tokens)
        _between("snapshot_tokens", self.snapshot_tokens, limits.MAX_PROMPT_TOKENS, least=0)
        if self.share_tokens is not None:
            _between("share_tokens", self.share_tokens, limits.MAX_PROMPT_TOKENS, least=0)
        if self.headroom_blocks is not None:
            _check_headroom(self.headroom_blocks, min(self.pool_blocks))
        _one_of("policy", self.policy, POLICIES)
        _one_of("dtype", self.dtype, limits.DTYPES)
        parse_address(self.listen, field="listen")
        _one_of("mode", self.mode, MODES)
        if self.min_wave_tokens is not None:
            _between("min_wave_tokens", self.min_wave_tokens, limits.MAX_WAVE_TOKENS)
        for name in ("hang_ms", "first_wave_ms"):
            if getattr(self, name) is not None:
                _between(name, getattr(self, name), limits.MAX_DEADLINE_MS)
        if self.fills is not None:
            _between("fills", self.fills, limits.MAX_STAGES, least=0)
        if self.short_share is not None and not 0 <= self.short_share <= limits.MOST_SHORT_SHARE:
            raise InvalidRequest(
                f"short_share must be from 0 to {limits.MOST_SHORT_SHARE:g}, got {self.short_share}",
                field="short_share", value=self.short_share, limit=limits.MOST_SHORT_SHARE,
            )  # fmt: skip
        _at_least_one_thread(self.threads)
        _check_share(self.trace_sample)
        _check_timeout(self.timeout_s)
        _check_bands(self.layers)
        if self.link is not None:
            _check_link(self.link, self.device or ("cuda:0" if self.engine == "trtllm" else "cpu"))
        check_level(self.log_level)
        _check_folder(self.engine, self.model)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(stage, rank) of every daemon, in order."""
        return tuple((stage, rank) for stage in range(self.stages) for rank in range(self.ranks))

    def gpus(self, allowed: str | None) -> dict[tuple[int, int], str]:
        """The only GPU that each daemon of the trtllm engine may see, in the order of places.

        `allowed`: CUDA_VISIBLE_DEVICES as the operator set it, None if unset. InvalidRequest if it names too few;
        how many the machine has is for the daemons to find out."""
        if self.engine != "trtllm" or self.device == "cpu":
            return {}
        if allowed is None:
            return {place: str(number) for number, place in enumerate(self.places)}
        found = [gpu.strip() for gpu in allowed.split(",") if gpu.strip()]
        if len(found) < len(self.places):
            raise InvalidRequest(
                f"{len(self.places)} daemons of the trtllm engine need a GPU each, of {len(found)} that may be seen",
                field="CUDA_VISIBLE_DEVICES", value=allowed, limit=len(self.places),
            )  # fmt: skip
        return dict(zip(self.places, found, strict=False))

    def name(self, stage: int, rank: int) -> str:
        """Of a daemon's process: `stage-1`, or `stage-1.0` where stages have several."""
        return f"stage-{stage}.{rank}" if self.ranks > 1 else f"stage-{stage}"

    def of(self, values: Sequence[object], stage: int, rank: int) -> str:
        """What a daemon gets of values for all, for each stage or for each daemon."""
        if len(values) == len(self.places):
            return str(values[stage * self.ranks + rank])
        return str(values[stage if len(values) > 1 else 0])


def _between(field: str, value: int, most: int, least: int = 1) -> None:
    if not least <= value <= most:
        limit = f"{least}..{most}"
        raise InvalidRequest(f"{field} {value} is not in {limit}", field=field, value=value, limit=limit)


def _one_of(field: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise InvalidRequest(f"unknown {field} {value!r}", field=field, value=value, limit=", ".join(known))


def _check_model(engine: str, model: str) -> None:
    """A folder for torch and trtllm, a preset that stages take for emulated; what is in folders, they find out."""
    if engine in ("torch", "trtllm") and not Path(model).is_dir():
        hint = f"; without a model: {PRESET_FORM}" if model.startswith("emulated") else ""
        raise InvalidRequest(f"no model folder {model!r}{hint}", field="model", value=model)
    _, colon, settings = model.partition(":")
    if engine == "emulated" and colon and not all(_is_setting(part) for part in settings.split(",")):
        raise InvalidRequest(f"{model!r} is no emulated model: {PRESET_FORM}", field="model", value=model)
    if engine == "emulated":
        values_of(settings, InvalidRequest)


def _is_setting(text: str) -> bool:
    key, _, value = text.partition("=")
    return bool(key and value)


def _check_folder(engine: str, model: str) -> None:
    """Behind the checks of the options: those need no look at the disk."""
    if engine in ("torch", "trtllm") and not (Path(model) / "config.json").is_file():
        raise InvalidRequest(f"{model} is no model folder: it has no config.json", field="model", value=model)


def _check_headroom(blocks: int, smallest_pool: int) -> None:
    if not 0 <= blocks < smallest_pool:
        limit = f"0..{smallest_pool - 1}"
        raise InvalidRequest(
            f"--headroom-blocks {blocks} must be less than the smallest pool has ({smallest_pool} blocks)",
            field="headroom_blocks", value=blocks, limit=limit,
        )  # fmt: skip


def _at_least_one_thread(threads: int | None) -> None:
    if threads is not None and threads < 1:
        raise InvalidRequest(f"--threads must be at least 1, got {threads}", field="threads", value=threads, limit=1)


def _check_share(sample: float) -> None:
    if not 0 <= sample <= 1:  # NaN is not either
        message = f"--trace-sample is a share of requests from 0 to 1, got {sample:g}"
        raise InvalidRequest(message, field="trace_sample", value=sample, limit="0..1")


def _check_link(link: str, device: str) -> None:
    if link_kind(link) is LinkKind.NCCL and not device.startswith("cuda"):
        raise InvalidRequest(f"link nccl needs cuda, not {device}", field="link", value=link, limit="gloo, grpc")


def _check_timeout(seconds: float) -> None:
    if not seconds > 0:
        raise InvalidRequest(
            f"--timeout-s must be over 0 seconds, got {seconds:g}", field="timeout_s", value=seconds, limit=">0"
        )


def _check_bands(layers: Sequence[str]) -> None:
    """Bands must parse and tile from layer 0; how many layers the model has, the stages find out."""
    expected = 0
    for band in layers:
        first, colon, last = band.partition(":")
        if not (colon and first.isdecimal() and last.isdecimal()):
            raise InvalidRequest(f"layers must be first:last, got {band!r}", field="layers", value=band)
        if int(first) != expected or int(last) <= expected:
            limit = f"{expected}:>{expected}"
            raise InvalidRequest(
                f"band {band} must begin at layer {expected} and not be empty", field="layers", value=band, limit=limit
            )
        expected = int(last)
