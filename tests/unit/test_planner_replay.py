"""The same events give the same waves, byte for byte, whatever the policy and the mode: through the whole core."""

from __future__ import annotations

import pytest

from tests.harness.fake_pipeline import FakePipeline
from wavepp_controller.core.config import POLICIES, ControllerConfig
from wavepp_controller.core.events import SendWave
from wavepp_controller.core.modes import MODES
from wavepp_proto.terms import Finished

PROMPTS = (640, 100, 33, 250, 64, 16, 500, 90, 640, 31, 128, 77)


def played(policy: str, mode: str) -> FakePipeline:
    """Prompts that come while waves are held back, so that the ring fills and policies have something to decide."""
    config = ControllerConfig(wave_tokens=64, min_wave_tokens=16, floor_blocks=0, policy=policy, mode=mode)
    pipeline = FakePipeline(stages=3, config=config)
    for number, length in enumerate(PROMPTS):
        pipeline.hold = {SendWave}
        pipeline.submit(f"r{number}", length, seed=number)
        pipeline.pass_time(0.05)
        pipeline.hold.clear()
        if number % 3 == 2:
            pipeline.release_held(SendWave)
    pipeline.release_held(SendWave)
    pipeline.pass_time(1.0)
    return pipeline


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_replay_is_equal_and_everything_finishes(policy: str, mode: str) -> None:
    one, other = played(policy, mode), played(policy, mode)
    assert repr(one.log) == repr(other.log)
    assert all(isinstance(one.outcome(f"r{number}"), Finished) for number in range(len(PROMPTS)))
    assert one.nothing_held()
    status = one.machine.status().pipelines[0]
    assert (status.policy, status.mode) == (policy, mode)
    assert all(daemon.costs_samples == len(one.waves()) for daemon in status.daemons)


def test_models_survive_in_another_controller() -> None:
    one = played("adaptive", "overlapped")
    other = FakePipeline(stages=3, start=False)
    other.machine.seed_latency(one.machine.latency_models())
    other.start()
    first, second = (pipeline.machine.status().pipelines[0].daemons for pipeline in (one, other))
    assert [daemon.costs for daemon in first] == [daemon.costs for daemon in second]
