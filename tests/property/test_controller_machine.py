"""Any interleaving of submissions, cancels, losses, shortages and late answers, on made-up daemons.

After every event the core's own invariants hold (the driver calls `check`); in the end every request
has exactly one outcome (I4) and no daemon holds or remembers anything (I2).
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.fake_pipeline import BLOCK, FakePipeline, record, tokens
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import (
    Action,
    AnnounceRequest,
    EndFormation,
    FormPipeline,
    HashPrompt,
    MemberUp,
    SendRound,
    SendWave,
    WatchAgain,
)
from wavepp_proto.hashing import HashScope, hash_blocks
from wavepp_proto.terms import Failed, Finished, Queued

HELD: list[type[Action]] = [HashPrompt, AnnounceRequest, SendRound, SendWave]
NAMES = [f"r{number}" for number in range(6)]
STAGES = 3

name, stage = st.sampled_from(NAMES), st.integers(0, STAGES - 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), name, st.integers(1, 400)),
        st.tuples(st.just("cancel"), name, st.just(0)),
        st.tuples(st.just("hold"), st.sampled_from(HELD), st.booleans()),
        st.tuples(st.just("answer"), st.sampled_from(HELD), st.just(0)),
        st.tuples(st.just("pass"), st.just(0), st.sampled_from([0.05, 0.3, 1.1])),
        st.tuples(st.just("short"), name, stage),
        st.tuples(st.just("room"), name, stage),
        st.tuples(st.just("hit"), name, st.tuples(stage, st.integers(0, 25))),
        st.tuples(st.just("fall"), name, st.tuples(stage, st.integers(0, 25))),
        st.tuples(st.just("fault"), name, stage),
        st.tuples(st.just("lose"), st.just(0), stage),
        st.tuples(st.just("forget"), name, stage),
    ),
    max_size=60,
)


class Story:
    def __init__(self, attempts: int, lanes: int) -> None:
        config = ControllerConfig(wave_tokens=64, attempts=attempts, lanes=lanes, default_deadline_ms=6_000)
        self.pipeline = FakePipeline(STAGES, config)
        self.lives = [1] * STAGES
        for at in range(STAGES):
            self.pipeline.digest(at, hash_blocks(HashScope("f1", f"B{BLOCK}"), tokens(400), BLOCK))

    def step(self, what: str, one: object, two: object) -> None:
        pipeline = self.pipeline
        match what, one, two:
            case "submit", str() as who, int() as count:
                pipeline.submit(who, count)
            case "cancel", str() as who, _:
                pipeline.cancel(who)
            case "hold", type() as kind, bool() as on:
                pipeline.hold = pipeline.hold | {kind} if on else pipeline.hold - {kind}
            case "answer", type() as kind, _:
                pipeline.release_held(kind)
            case "pass", _, float() as seconds:
                pipeline.pass_time(seconds)
            case "short", str() as who, int() as at:
                pipeline.daemon(at).short[who] = 3
            case "room", str() as who, int() as at:
                pipeline.daemon(at).short.pop(who, None)
            case "hit", str() as who, (int() as at, int() as blocks):
                pipeline.daemon(at).hits[who] = blocks * BLOCK
            case "fall", str() as who, (int() as at, int() as blocks):
                pipeline.daemon(at).lower[who] = [blocks * BLOCK]
            case "fault", str() as who, int() as at:
                pipeline.daemon(at).faults[who] = "BAD_CANARY"
            case "forget", str() as who, int() as at:
                daemon = pipeline.daemon(at)
                daemon.announced = {key for key in daemon.announced if key.request_id != who or key in daemon.holds}
            case "lose", _, int() as at:
                self.lose(at)

    def lose(self, at: int) -> None:
        """The stage dies and comes back; what it was sent is lost with its streams."""
        pipeline = self.pipeline
        if pipeline.machine.status().pipelines[0].state != "serving":
            return
        pipeline.lose(at)
        self.lives[at] += 1
        pipeline.held = [action for action in pipeline.held if isinstance(action, HashPrompt)]
        pipeline.post(MemberUp(record(at, STAGES, self.lives[at]), pipeline.now))

    def end(self) -> None:
        """Let everything go on, for longer than any deadline."""
        pipeline = self.pipeline
        for daemon in pipeline.daemons.values():
            daemon.short.clear()
        pipeline.hold = set()
        pipeline.release_held()
        pipeline.pass_time(1.0)
        for daemon in pipeline.daemons.values():
            daemon.short.clear()
        pipeline.pass_time(6.0)


@settings(max_examples=200)
@given(steps, st.integers(1, 2), st.sampled_from([2, 128]))
def test_every_request_ends_once_and_nothing_is_held_when_anything_happens_in_any_order(
    script: list[tuple[str, object, object]], attempts: int, lanes: int
) -> None:
    story = Story(attempts, lanes)
    for what, one, two in script:
        story.step(what, one, two)
    story.end()
    pipeline = story.pipeline
    began = Counter(e.request_id for e in pipeline.events if isinstance(e, Queued))
    ended = Counter(e.request_id for e in pipeline.events if isinstance(e, Finished | Failed))
    assert began == ended
    assert pipeline.machine.live_requests == 0
    assert pipeline.nothing_held()
    assert pipeline.counter("formations_broken") == 0
    assert pipeline.counter("stale_messages") == 0
    lost = len(pipeline.of(EndFormation))
    assert len(pipeline.of(FormPipeline)) == lost + 1
    assert not pipeline.of(WatchAgain) or lost
