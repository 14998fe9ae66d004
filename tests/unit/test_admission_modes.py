"""Admission modes: which rounds and waves go when, in exact order (two stages, R = 4, waves of 64 tokens)."""

from __future__ import annotations

import pytest

from tests.harness.fake_pipeline import FakePipeline
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import AnnounceRequest, SendRound, SendWave
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.terms import Finished


def start(mode: str, **settings: int) -> FakePipeline:
    """Rounds and waves are held back until the test lets them through."""
    pipeline = FakePipeline(config=ControllerConfig(wave_tokens=64, floor_blocks=0, mode=mode, **settings))  # type: ignore[arg-type]
    pipeline.hold = {SendRound, SendWave}
    return pipeline


def story(pipeline: FakePipeline) -> list[str]:
    """Prepares and waves in the order in which they were sent, since the last look."""
    told = []
    for action in pipeline.log:
        if isinstance(action, SendRound) and action.key.stage == 0:
            entries = [f"-{entry.key.request_id}" for entry in action.round.revises]
            entries += [str(entry.key.request_id) for entry in action.round.prepares]
            if entries:
                told.append("round " + " ".join(entries))
        elif isinstance(action, SendWave):
            told.append("wave " + " ".join(str(row.key.request_id) for row in action.rows))
    pipeline.log.clear()
    return told


def vote(pipeline: FakePipeline) -> None:
    pipeline.release_held(SendRound)


def finish(pipeline: FakePipeline, waves: int = 1) -> None:
    """Every stage reports the oldest waves in flight."""
    for _ in range(waves):
        oldest = next(action for action in pipeline.held if isinstance(action, SendWave))
        pipeline.held.remove(oldest)
        pipeline._queue.append(oldest)
        pipeline._drain()


def done(pipeline: FakePipeline, *names: str) -> None:
    pipeline.hold.clear()
    pipeline.release_held()
    pipeline.pass_time(1.0)
    assert all(isinstance(pipeline.outcome(name), Finished) for name in names)
    assert pipeline.nothing_held()


def test_rounds_and_waves_ignore_each_other_when_overlapped() -> None:
    pipeline = start("overlapped")
    pipeline.submit("a", 640, seed=1)
    vote(pipeline)
    assert story(pipeline) == ["round a", "wave a", "wave a", "wave a", "wave a"]
    pipeline.submit("b", 64, seed=2)
    assert story(pipeline) == ["round b"]  # at once
    finish(pipeline)
    assert story(pipeline) == ["wave a"]  # though the round is open
    done(pipeline, "a", "b")


def test_round_waits_for_a_wave_to_end_when_lockstep() -> None:
    pipeline = start("lockstep")
    pipeline.submit("a", 640, seed=1)
    vote(pipeline)
    assert story(pipeline) == ["round a", "wave a", "wave a", "wave a", "wave a"]
    pipeline.submit("b", 64, seed=2)
    assert story(pipeline) == []
    finish(pipeline)
    assert story(pipeline) == ["round b"]
    done(pipeline, "a", "b")


def test_no_wave_is_sent_while_a_round_is_open_when_lockstep() -> None:
    pipeline = start("lockstep")
    pipeline.submit("a", 640, seed=1)
    vote(pipeline)
    pipeline.submit("b", 64, seed=2)
    story(pipeline)
    finish(pipeline, 3)
    assert story(pipeline) == ["round b"]  # three slots are free; one wave still computes
    vote(pipeline)
    assert story(pipeline) == ["wave b", "wave a", "wave a"]  # what ends within a wave goes first
    done(pipeline, "a", "b")


def test_request_that_is_ready_during_a_round_waits_for_the_next_boundary_when_lockstep() -> None:
    pipeline = start("lockstep")
    pipeline.submit("a", 640, seed=1)
    vote(pipeline)
    pipeline.submit("b", 64, seed=2)
    finish(pipeline)
    pipeline.submit("c", 64, seed=3)
    story(pipeline)
    vote(pipeline)
    assert story(pipeline) == ["wave b"]
    finish(pipeline)
    assert story(pipeline) == ["round c"]
    done(pipeline, "a", "b", "c")


def test_boundary_passes_when_nothing_is_ready_in_lockstep() -> None:
    pipeline = start("lockstep")
    pipeline.submit("a", 640, seed=1)
    vote(pipeline)
    finish(pipeline)
    story(pipeline)
    pipeline.submit("b", 64, seed=2)
    assert story(pipeline) == []
    finish(pipeline)
    assert story(pipeline) == ["round b"]
    done(pipeline, "a", "b")


def test_revision_belongs_to_its_boundary_when_lockstep() -> None:
    """Stage 1 holds less than was asked: the revision follows at once, and waves wait for it too."""
    pipeline = start("lockstep")
    pipeline.submit("a", 640, seed=1)
    vote(pipeline)
    pipeline.submit("b", 160, seed=2)
    request = pipeline.machine.pipelines[next(iter(pipeline.machine.pipelines))].book.living["b"]  # type: ignore[index]
    assert request.hashes is not None
    for stage in (0, 1):
        pipeline.digest(stage, request.hashes)
    pipeline.daemon(0).hits["b"] = 128
    pipeline.daemon(1).hits["b"] = 64
    story(pipeline)
    finish(pipeline)
    assert story(pipeline) == ["round b"]
    vote(pipeline)
    assert story(pipeline)[:1] == ["round -b"]
    done(pipeline, "a", "b")


def test_empty_pipeline_is_a_boundary_when_lockstep() -> None:
    pipeline = start("lockstep")
    pipeline.submit("a", 64, seed=1)
    assert story(pipeline) == ["round a"]
    pipeline.submit("b", 64, seed=2)
    vote(pipeline)
    assert story(pipeline) == ["round b"]  # no wave yet: still the same boundary
    vote(pipeline)
    assert story(pipeline) == ["wave a", "wave b"]
    done(pipeline, "a", "b")


def test_nobody_is_prepared_before_everything_has_ended_when_drain() -> None:
    pipeline = start("drain")
    pipeline.submit("a", 192, seed=1)
    vote(pipeline)
    assert story(pipeline) == ["round a", "wave a", "wave a", "wave a"]
    pipeline.submit("b", 64, seed=2)
    pipeline.submit("c", 64, seed=3)
    finish(pipeline, 2)
    assert story(pipeline) == []
    finish(pipeline)
    assert story(pipeline) == ["round b c"]
    done(pipeline, "a", "b", "c")


def test_everything_ready_is_admitted_over_several_rounds_when_drain() -> None:
    pipeline = start("drain")
    pipeline.hold.add(AnnounceRequest)
    names = [f"r{number:02}" for number in range(40)]
    for number, name in enumerate(names):
        pipeline.submit(name, 16, seed=number)
    pipeline.release_held(AnnounceRequest)
    assert story(pipeline) == ["round r00"]
    vote(pipeline)
    assert story(pipeline) == ["round " + " ".join(names[1:33])]
    vote(pipeline)
    assert story(pipeline) == ["round " + " ".join(names[33:])]
    vote(pipeline)
    waves = ["wave " + " ".join(names[at : at + 4]) for at in range(0, 16, 4)]
    assert story(pipeline) == waves
    done(pipeline, *names)


def test_request_for_which_there_is_no_room_does_not_hold_waves_back_when_drain() -> None:
    pipeline = start("drain")
    for stage in (0, 1):
        pipeline.daemon(stage).short["b"] = 3
    pipeline.submit("a", 64, seed=1)
    pipeline.submit("b", 64, seed=2)
    vote(pipeline)
    assert story(pipeline) == ["round a", "round b"]
    vote(pipeline)
    assert story(pipeline) == ["wave a"]
    deadline = pipeline.machine.next_deadline()
    assert deadline is not None
    assert deadline > pipeline.now  # nobody is woken for a retry that may not be
    for stage in (0, 1):
        pipeline.daemon(stage).short.clear()
    done(pipeline, "a", "b")


@pytest.mark.parametrize("mode", ["lockstep", "drain"])
def test_pipeline_goes_on_when_running_requests_are_cancelled(mode: str) -> None:
    pipeline = start(mode)
    pipeline.submit("a", 640, seed=1)
    vote(pipeline)
    pipeline.submit("b", 64, seed=2)
    pipeline.cancel("a")
    story(pipeline)
    finish(pipeline, 4)
    assert story(pipeline) == ["round b"]
    done(pipeline, "b")


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="unknown mode sometimes"):
        ControllerConfig(mode="sometimes")
