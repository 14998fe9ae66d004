"""Planner policies by name (DESIGN.md).

Owns the one place where a name becomes an object. A policy belongs to one formation, the latency model that it feeds
and reads outlives it.
"""

from __future__ import annotations

from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.latency_model import LatencyModel
from wavepp_controller.core.plan_adaptive import AdaptivePolicy
from wavepp_controller.core.plan_fixed import FixedPolicy
from wavepp_controller.core.plan_mpu import MpuPolicy
from wavepp_controller.core.planning import Policy


def make_policy(config: ControllerConfig, model: LatencyModel) -> Policy:
    """A planner for one formation."""
    match config.policy:
        case "adaptive":
            return AdaptivePolicy(model, config.min_wave_tokens, config.fills)
        case "mpu":
            return MpuPolicy(model, config.min_wave_tokens, config.fills)
        case _:
            return FixedPolicy(model)
