"""What a cluster on one machine shall be: model, stages, pools, addresses, security.

Owns the values and their checks; `local_cluster.py` runs them, `wavepp up`, the demo and tests draw
them up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wavepp_proto.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What to run. Sequences have one entry a stage, or one entry for all."""

    model: str
    engine: str = "torch"
    stages: int = 4
    pool_blocks: Sequence[int] = (1024,)
    layers: Sequence[str] = ()
    """Bands first:last, one a stage; empty splits evenly."""
    block_tokens: int = 64
    wave_tokens: int = 16_384
    link: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
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
    log_level: str = "info"
    timeout_s: float = 120.0
    tls: Mapping[str, str] = field(default_factory=dict)
    """--tls-ca, --tls-cert, --tls-key, --tls-server-name by name without dashes."""

    def __post_init__(self) -> None:
        if self.engine == "torch" and not Path(self.model).is_dir():
            raise InvalidRequest(f"no model folder {self.model!r}", field="model", value=self.model)
        if self.stages < 1:
            raise InvalidRequest("a pipeline has at least one stage", field="stages", value=self.stages, limit=1)
        for name in ("pool_blocks", "layers"):
            given = len(getattr(self, name))
            if given not in (0, 1, self.stages) or (name == "pool_blocks" and not given):
                raise InvalidRequest(
                    f"{name} needs one value, or one for each of {self.stages} stages",
                    field=name, value=given, limit=self.stages,
                )  # fmt: skip
