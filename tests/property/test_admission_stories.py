"""Any interleaving of prompts that share prefixes, in all classes and sizes, on pipelines of any cache groups.

After every event the core's invariants hold: nobody is parked behind a request that is gone, no order is
broken, no request takes more snapshots than were promised. In the end every request has exactly one
outcome, whatever ran was computed exactly once from its endpoint, and no daemon holds anything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.fake_pipeline import BLOCK, FakePipeline, record, tokens
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import Action, AnnounceRequest, HashPrompt, MemberUp, SendRound, SendWave
from wavepp_proto.hashing import HashScope, hash_blocks
from wavepp_proto.terms import Admitted, CacheGroup, Failed, Finished, HoldKey, Queued, Row

DENSE, SPARSE = CacheGroup.ATTENTION, CacheGroup.RECURRENT
SHAPES: list[tuple[tuple[CacheGroup, ...], ...]] = [
    ((DENSE,), (DENSE,)),
    ((DENSE, SPARSE), (DENSE, SPARSE)),
    ((SPARSE,), (DENSE,)),
    ((SPARSE,), (SPARSE,)),
]
HELD: list[type[Action]] = [HashPrompt, AnnounceRequest, SendRound, SendWave]
NAMES = [f"r{number}" for number in range(10)]
POOL = 40
"""Blocks of each pool; a quarter is headroom, so prompts of more than 480 tokens are oversized."""

name, stage, family = st.sampled_from(NAMES), st.integers(0, 1), st.integers(0, 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), name, st.tuples(st.integers(1, POOL * BLOCK), family, st.integers(-1, 1))),
        st.tuples(st.just("burst"), st.integers(150, 250), st.lists(st.sampled_from(NAMES), min_size=2, unique=True)),
        st.tuples(st.just("wave"), st.just(0), st.integers(1, 4)),
        st.tuples(st.just("wave"), st.just(0), st.integers(1, 4)),
        st.tuples(st.just("cancel"), name, st.just(0)),
        st.tuples(st.just("hold"), st.sampled_from(HELD), st.booleans()),
        st.tuples(st.just("answer"), st.sampled_from(HELD), st.just(0)),
        st.tuples(st.just("pass"), st.just(0), st.sampled_from([0.05, 0.3, 1.1])),
        st.tuples(st.just("short"), name, stage),
        st.tuples(st.just("room"), name, stage),
        st.tuples(st.just("hit"), name, st.tuples(stage, st.integers(0, POOL))),
        st.tuples(st.just("fault"), name, stage),
        st.tuples(st.just("digest"), family, st.tuples(stage, st.integers(0, POOL))),
        st.tuples(st.just("lose"), st.just(0), stage),
    ),
    max_size=60,
)


class Story:
    def __init__(self, shape: tuple[tuple[CacheGroup, ...], ...], lanes: int, slots: int) -> None:
        config = ControllerConfig(
            wave_tokens=64,
            attempts=2,
            lanes=lanes,
            default_deadline_ms=8_000,
            snapshot_tokens=64,
            most_bypasses=2,
            most_parks=2,
        )
        self.members = [
            record(at, groups=groups, state_slots=slots if SPARSE in groups else 0, pool_blocks=POOL)
            for at, groups in enumerate(shape)
        ]
        layers = tuple(
            layer
            for at, groups in enumerate(shape)
            for layer in (2 * at, 2 * at + 1)
            if SPARSE in groups and (DENSE not in groups or layer % 2 == 0)
        )
        model = replace(self.members[0].model, recurrent_layers=layers)
        self.members = [replace(member, model=model) for member in self.members]
        self.pipeline = FakePipeline(config=config, members=self.members, sharing=True)
        self.pipeline.hold = {SendWave}
        for daemon in self.pipeline.daemons.values():
            daemon.hits |= dict.fromkeys(NAMES, POOL * BLOCK)

    def step(self, what: str, one: object, two: object) -> None:
        pipeline = self.pipeline
        match what, one, two:
            case "submit", str() as who, (int() as count, int() as seed, int() as priority):
                pipeline.submit(who, count, seed, priority=priority)
            case "burst", int() as count, list() as names:
                holding, pipeline.hold = pipeline.hold, pipeline.hold | {SendRound}
                for number, each in enumerate(names):
                    pipeline.submit(each, count + number * BLOCK)
                pipeline.hold = holding
                pipeline.release_held(SendRound)
            case "wave", _, int() as most:
                self.run(most)
            case "cancel", str() as who, _:
                pipeline.cancel(who)
            case "hold", type() as kind, bool() as on:
                pipeline.hold = pipeline.hold | {kind} if on else pipeline.hold - {kind}
                if not on:  # in their order, before anything later
                    pipeline.release_held(kind)
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
            case "fault", str() as who, int() as at:
                pipeline.daemon(at).faults[who] = "BAD_CANARY"
            case "digest", int() as seed, (int() as at, int() as blocks):
                hashes = hash_blocks(HashScope("f1", f"B{BLOCK}"), tokens(blocks * BLOCK, seed), BLOCK)
                pipeline.digest(at, hashes, range(4 * BLOCK, blocks * BLOCK + 1, 4 * BLOCK))
            case "lose", _, int() as at:
                self.lose(at)

    def run(self, most: int) -> None:
        """The next waves in flight are executed and reported."""
        pipeline = self.pipeline
        waves = [action for action in pipeline.held if isinstance(action, SendWave)][:most]
        for wave in waves:
            others = [action for action in pipeline.held if action is not wave]
            pipeline.held = [wave]
            pipeline.release_held()
            pipeline.held = others + pipeline.held

    def lose(self, at: int) -> None:
        """The stage dies and comes back; what it was sent is lost with its streams."""
        pipeline = self.pipeline
        if pipeline.machine.status().pipelines[0].state != "serving":
            return
        pipeline.lose(at)
        pipeline.held = [action for action in pipeline.held if isinstance(action, HashPrompt)]
        known = self.members[at]
        self.members[at] = replace(known, incarnation=type(known.incarnation)(known.incarnation + 1))
        pipeline.post(MemberUp(self.members[at], pipeline.now))

    def end(self) -> None:
        """Let everything go on, for longer than any deadline."""
        pipeline = self.pipeline
        pipeline.hold = set()
        for daemon in pipeline.daemons.values():
            daemon.short.clear()
        pipeline.release_held()
        pipeline.pass_time(1.0)
        for daemon in pipeline.daemons.values():
            daemon.short.clear()
        pipeline.pass_time(1.0)


@settings(max_examples=150)
@given(steps, st.sampled_from(SHAPES), st.sampled_from([2, 128]), st.sampled_from([2, 8, 400]))
def test_everybody_ends_once_and_computes_its_suffix_once_when_prefixes_are_shared(
    script: list[tuple[str, object, object]], shape: tuple[tuple[CacheGroup, ...], ...], lanes: int, slots: int
) -> None:
    story = Story(shape, lanes, slots)
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
    check_work(pipeline, slots)


def check_work(pipeline: FakePipeline, slots: int) -> None:
    """Rows of whatever finished are its suffix, once; snapshots are whole blocks within one request's part."""
    chunks: dict[HoldKey, list[Row]] = {}
    for rows in pipeline.waves():
        for row in rows:
            chunks.setdefault(row.key, []).append(row)
    endpoints = {HoldKey(e.request_id, e.attempt): e for e in pipeline.events if isinstance(e, Admitted)}
    for event in pipeline.events:
        if not isinstance(event, Finished):
            continue
        key = HoldKey(event.request_id, event.attempt)
        place = endpoints[key].endpoint
        for row in chunks[key]:
            assert row.start == place
            place += row.length
            assert row.final == (place == event.prompt_tokens)
        assert place == event.prompt_tokens
        snapshots = [taken for row in chunks[key] for taken in row.snapshots]
        assert snapshots == sorted(set(snapshots))
        assert all(taken % BLOCK == 0 for taken in snapshots)
        assert len(snapshots) <= max(1, slots // 4)
