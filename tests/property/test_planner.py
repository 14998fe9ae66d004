"""Chunks of any prompts, hits, budgets and block sizes: positive, contiguous, summing to the suffix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from tests.harness.planning import daemon
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.latency_model import LatencyModel
from wavepp_controller.core.planner import Lane, plan_fixed
from wavepp_controller.core.planning import InFlight, PlanView, Policy
from wavepp_controller.core.policies import make_policy
from wavepp_proto.hashing import reuse_cap
from wavepp_proto.terms import Attempt, HoldKey, RequestId, Row, StageTimes, WaveOrdinal


@dataclass
class Work:
    """One request: what is to be done, and the chunks that did it."""

    key: HoldKey
    hit: int
    prompt: int
    snapshots: tuple[int, ...]
    stops: tuple[int, ...]
    chunks: list[Row] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.chunks[-1].start + self.chunks[-1].length if self.chunks else self.hit

    def lane(self) -> Lane:
        ahead = [tuple(place for place in places if place > self.start) for places in (self.snapshots, self.stops)]
        return Lane(self.key, self.start, self.prompt, *ahead)


@st.composite
def works(draw: st.DrawFn) -> tuple[int, int, int, list[Work]]:
    block = draw(st.sampled_from([1, 2, 16, 64]))
    wave = block * draw(st.integers(1, 20))
    rows = draw(st.integers(1, 8))
    made = []
    for number, prompt in enumerate(draw(st.lists(st.integers(1, 40 * block), min_size=1, max_size=12))):
        hit = draw(st.integers(0, reuse_cap(prompt, block) // block)) * block
        inside = [at * block for at in range(hit // block + 1, prompt // block + 1)]
        places = st.sets(st.sampled_from(inside), max_size=4) if inside else st.just(set[int]())
        snapshots, stops = (tuple(sorted(draw(places))) for _ in range(2))
        made.append(Work(HoldKey(RequestId(str(number)), Attempt(1)), hit, prompt, snapshots, stops))
    return block, wave, rows, made


@given(works())
def test_chunks_cover_every_suffix_exactly_when_waves_are_planned_to_the_end(
    workload: tuple[int, int, int, list[Work]],
) -> None:
    """Field bugs 25 and 26: planned from the suffix, no empty chunk, whatever the hit."""
    block, wave, most_rows, requests = workload
    by_key = {work.key: work for work in requests}
    while lanes := [work.lane() for work in requests if work.start < work.prompt]:
        rows = plan_fixed(lanes, wave, most_rows, block)
        assert rows == plan_fixed(lanes, wave, most_rows, block)  # replayable
        take(rows, lanes, wave, most_rows, by_key)
    finish(requests, block)


@given(works(), st.sampled_from(["fixed", "mpu", "adaptive"]), st.booleans(), st.integers(1, 4))
def test_every_policy_covers_every_suffix_exactly_whatever_it_learns(
    workload: tuple[int, int, int, list[Work]], name: str, seeded: bool, stages: int
) -> None:
    """Waves end in order, each after four more were planned or the planner waits; twins stay equal throughout."""
    block, wave, most_rows, requests = workload
    by_key = {work.key: work for work in requests}
    twins = [planner(name, seeded, stages, block) for _ in range(2)]
    now, ordinal, in_flight = 0.0, 0, list[InFlight]()
    while lanes := [work.lane() for work in requests if work.start < work.prompt]:
        seen = PlanView(now, lanes, tuple(in_flight), stages, 2 * stages, wave, block, most_rows, bool(ordinal % 3))
        decision, again = (twin.plan(seen) for twin in twins)
        assert decision == again
        if decision.rows:
            take(decision.rows, lanes, wave, most_rows, by_key)
            ordinal += 1
            in_flight.append(InFlight(WaveOrdinal(ordinal), decision.rows, now))
        else:
            assert in_flight
            assert decision.wait_until is not None
            assert decision.wait_until > now
            now = decision.wait_until
        if len(in_flight) == min(4, 2 * stages):
            ended = in_flight.pop(0)
            now += 0.01
            for stage in range(stages):
                took = StageTimes(compute_us=1_000 + 7 * sum(row.length for row in ended.rows))
                for twin in twins:
                    twin.observe(daemon(stage), ended.rows, 0, took, now)
    finish(requests, block)


def planner(name: str, seeded: bool, stages: int, block: int) -> Policy:
    model = LatencyModel()
    if seeded:
        model.seed({f"{n}.0": {"c_us": 900.0, "b_us": 8.0, "a_us": 1e-3, "g_us": 0.1} for n in range(stages)})
    return make_policy(ControllerConfig(policy=name, min_wave_tokens=3 * block), model)


def take(rows: Sequence[Row], lanes: Sequence[Lane], wave: int, most_rows: int, by_key: dict[HoldKey, Work]) -> None:
    """Check one wave, and note its chunks."""
    assert 1 <= len(rows) <= most_rows
    assert 0 < sum(row.length for row in rows) <= wave
    assert rows[0].key == lanes[0].key  # the first lane always advances
    assert len({row.key for row in rows}) == len(rows)
    for row in rows:
        assert row.start == by_key[row.key].start
        by_key[row.key].chunks.append(row)


def finish(requests: Sequence[Work], block: int) -> None:
    """Check what all waves came to."""
    for work in requests:
        ends = [row.start + row.length for row in work.chunks]
        assert all(row.length > 0 for row in work.chunks)
        assert sum(row.length for row in work.chunks) == work.prompt - work.hit
        assert all(end % block == 0 for end in ends[:-1])
        assert set(work.stops) <= set(ends)
        assert tuple(place for row in work.chunks for place in row.snapshots) == work.snapshots
        assert all(row.start < place <= row.start + row.length for row in work.chunks for place in row.snapshots)
        assert [row.final for row in work.chunks] == [False] * (len(ends) - 1) + [True]
