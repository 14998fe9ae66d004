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
from wavepp_stage.core.announcements import MAX_ANNOUNCED

_CONFIG = {field.name for field in fields(ControllerConfig)} - {"link", "wave_tokens", "traced"}
_WORDS = {"policy", "mode"}
"""Settings that are no numbers."""
_COSTS: dict[str, tuple[str, float]] = {
    "wave_ms": ("wave_s", 1e-3),
    "token_us": ("token_s", 1e-6),
    "copy_us": ("copy_block_s", 1e-6),
    "copy_failures": ("copy_failures", 1.0),
}
"""Option to (field of Costs, its unit)."""


def shape_of(options: dict[str, str]) -> Shape:
    """cluster [pools=64,64,64] [ranks=1] [host=8,0] [groups=a,ar,r] [states=8] [block=16] [wave=64] [wave_ms=1]
    [token_us=10] [copy_us=100] [copy_failures=0] [latency_us=200] [jitter=0] [seed=0] [check_every=1]
    [riding_bytes=0] [announced=2048], settings of the controller. Pools, host and states are of daemons, groups of
    stages. Waves are planned by policy=fixed unless said otherwise: what a story sends can be told in advance."""
    options = dict(options)
    costs = {name: float(options.pop(key)) * unit for key, (name, unit) in _COSTS.items() if key in options}
    given: dict[str, Any] = {
        "pools": _numbers(options.pop("pools", "64,64,64")),
        "ranks": int(options.pop("ranks", "1")),
        "host_pools": _numbers(options.pop("host", "")),
        "groups": tuple(options.pop("groups", "").split(",")),
        "state_slots": _numbers(options.pop("states", "")),
        "block_tokens": int(options.pop("block", "16")),
        "window": int(options.pop("window", "4096")),
        "latency_s": float(options.pop("latency_us", "200")) / 1e6,
        "jitter": float(options.pop("jitter", "0")),
        "seed": int(options.pop("seed", "0")),
        "check_every": int(options.pop("check_every", "1")),
        "riding_bytes": int(options.pop("riding_bytes", "0")),
        "most_announced": int(options.pop("announced", str(MAX_ANNOUNCED))),
    }
    if given["ranks"] < 1 or len(given["pools"]) % given["ranks"]:
        raise ValueError(f"{len(given['pools'])} pools are not those of stages with {given['ranks']} ranks")
    wave = int(options.pop("wave", "64"))
    unknown = options.keys() - _CONFIG
    if unknown:
        raise ValueError(f"no setting {' '.join(sorted(unknown))}; known: {' '.join(sorted(_CONFIG))}")
    settings: dict[str, Any] = {name: value if name in _WORDS else int(value) for name, value in options.items()}
    config = ControllerConfig(wave_tokens=wave, link=LinkKind.GRPC, **{"policy": "fixed", **settings})
    return Shape(costs=Costs(**costs), config=config, **given)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def seconds(span: str) -> float:
    """`200us`, `250ms` or `2s`. ValueError for anything else."""
    for unit, size in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if span.endswith(unit):
            return float(span.removesuffix(unit)) * size
    raise ValueError(f"{span} has no unit")
