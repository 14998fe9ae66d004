"""What the options of scenario commands mean: a cluster's shape, and spans of time.

Pure: text in, values out; ValueError says what cannot be understood. Called by `console`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from wavepp_controller.core.config import ControllerConfig
from wavepp_proto.terms import LinkKind
from wavepp_simulator.executor import Costs
from wavepp_simulator.world import Shape

_CONFIG = {field.name for field in fields(ControllerConfig)} - {"policy", "link", "wave_tokens"}


def shape_of(options: dict[str, str]) -> Shape:
    """cluster [pools=64,64,64] [block=16] [wave=64] [wave_ms=1] [token_us=10] and settings of the controller."""
    options = dict(options)
    pools = tuple(int(blocks) for blocks in options.pop("pools", "64,64,64").split(","))
    costs = Costs(float(options.pop("wave_ms", "1")) / 1e3, float(options.pop("token_us", "10")) / 1e6)
    block, wave = int(options.pop("block", "16")), int(options.pop("wave", "64"))
    window = int(options.pop("window", "4096"))
    unknown = options.keys() - _CONFIG
    if unknown:
        raise ValueError(f"no setting {' '.join(sorted(unknown))}; known: {' '.join(sorted(_CONFIG))}")
    settings: dict[str, Any] = {name: int(value) for name, value in options.items()}
    config = ControllerConfig(wave_tokens=wave, link=LinkKind.GRPC, **settings)
    return Shape(pools=pools, block_tokens=block, window=window, costs=costs, config=config)


def seconds(span: str) -> float:
    """`250ms` or `2s`. ValueError for anything else."""
    for unit, size in (("ms", 1e-3), ("s", 1.0)):
        if span.endswith(unit):
            return float(span.removesuffix(unit)) * size
    raise ValueError(f"{span} has no unit")
