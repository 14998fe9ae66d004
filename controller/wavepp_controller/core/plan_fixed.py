"""Policy `fixed` (DESIGN.md): every wave takes up to M tokens, and goes at once.

Owns nothing but the name: `planner` packs. It feeds the latency model all the same, so that a pipeline that ran
with it is calibrated for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp_controller.core.latency_model import LatencyModel
from wavepp_controller.core.planner import plan_fixed
from wavepp_controller.core.planning import Decision, PlanView
from wavepp_proto.terms import DaemonKey, Row, StageTimes


class FixedPolicy:
    name = "fixed"

    def __init__(self, model: LatencyModel) -> None:
        self._model = model

    def plan(self, view: PlanView) -> Decision:
        return Decision(plan_fixed(view.lanes, view.wave_tokens, view.max_rows, view.block_tokens))

    def observe(self, key: DaemonKey, rows: Sequence[Row], void_bitmap: int, times: StageTimes, now: float) -> None:
        self._model.observe(key, rows, void_bitmap, times)
