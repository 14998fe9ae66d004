"""Who goes first: places within classes, and classes with bounded bypass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.fake_pipeline import BLOCK, FakePipeline, request
from wavepp_controller.core import order as order_module
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import SendRound, SendWave
from wavepp_controller.core.order import RankedOrder, goes_before
from wavepp_controller.core.phases import PhaseLog
from wavepp_controller.core.request import Request
from wavepp_proto.hashing import HashScope
from wavepp_proto.terms import Finished


def prepared(pipeline: FakePipeline) -> list[str]:
    """Request ids in the order in which they were prepared."""
    rounds = [action.round for action in pipeline.of(SendRound) if action.key.stage == 0]
    return [entry.key.request_id for one in rounds for entry in one.prepares]


def one_at_a_time(most_bypasses: int = 8, aged_every: int = 16) -> FakePipeline:
    """One lane, taken by `z`, so that everybody else stands in the ready order."""
    config = ControllerConfig(wave_tokens=64, lanes=1, most_bypasses=most_bypasses, aged_every=aged_every)
    pipeline = FakePipeline(config=config)
    pipeline.hold = {SendWave}
    pipeline.submit("z", 20)
    return pipeline


def finish(pipeline: FakePipeline) -> None:
    pipeline.hold = set()
    pipeline.release_held()
    assert pipeline.machine.live_requests == 0
    assert pipeline.nothing_held()


def test_higher_classes_go_first_and_places_count_within_a_class() -> None:
    pipeline = one_at_a_time()
    for name, priority in (("a", 0), ("b", -1), ("c", 5), ("d", 0), ("e", 5)):
        pipeline.submit(name, 20, priority=priority)
    finish(pipeline)
    assert prepared(pipeline) == ["z", "c", "e", "a", "d", "b"]


def test_request_is_first_when_it_was_overtaken_as_often_as_may_be() -> None:
    pipeline = one_at_a_time(most_bypasses=2)
    pipeline.submit("low", 20, priority=-9)
    for name in "abcd":
        pipeline.submit(name, 20, priority=9)
    pipeline.submit("normal", 20)
    finish(pipeline)
    assert prepared(pipeline) == ["z", "a", "b", "low", "c", "d", "normal"]


def test_classes_are_not_inverted_when_everything_below_them_is_aged() -> None:
    """One in so many that are served may be an aged one; all of them went before `urgent` as soon as they were."""
    order, served = RankedOrder(most_bypasses=2, aged_every=4), list[str]()
    for place in range(8):
        order.add(made(place, -1))
    for place in range(8, 24):
        order.add(made(place, 9))
    while order.head is not None:
        head = order.head
        order.discard(head)
        order.serve(head)
        served.append("high" if head.prefill.priority > 0 else "low")
        assert order.check() == []
    assert served[:13] == ["high"] * 2 + ["low"] + (["high"] * 3 + ["low"]) * 2 + ["high"] * 2
    assert served.count("low") == 8


def test_nobody_is_overtaken_when_no_bypass_is_allowed() -> None:
    pipeline = one_at_a_time(most_bypasses=0)
    for name, priority in (("a", -9), ("b", 9), ("c", 0)):
        pipeline.submit(name, 20, priority=priority)
    finish(pipeline)
    assert prepared(pipeline) == ["z", "a", "b", "c"]


def test_holders_stay_ahead_when_a_more_urgent_request_becomes_ready() -> None:
    pipeline = one_at_a_time()
    pipeline.submit("urgent", 20, priority=9)
    assert (pipeline.state("z"), pipeline.state("urgent")) == ("running", "hinted")
    finish(pipeline)


def test_bypass_is_counted_once_when_the_one_that_overtakes_runs_short_and_comes_back() -> None:
    pipeline = one_at_a_time(most_bypasses=2)
    pipeline.daemon(0).short["urgent"] = 5
    pipeline.submit("low", 20)
    pipeline.submit("urgent", 20, priority=1)
    pipeline.hold = set()
    pipeline.release_held()
    pipeline.pass_time(0.5)  # it waits for room at the head, again and again
    assert (pipeline.state("urgent"), pipeline.state("low")) == ("waiting", "hinted")
    pipeline.submit("next", 20, priority=1)
    pipeline.daemon(0).short.clear()
    pipeline.pass_time(0.15)
    assert prepared(pipeline)[-2:] == ["next", "low"]
    finish(pipeline)


def test_waiting_request_keeps_what_is_behind_it_waiting_when_a_class_above_passes() -> None:
    pipeline = one_at_a_time()
    pipeline.daemon(0).short["big"] = 50
    pipeline.submit("big", 20)
    pipeline.submit("small", 20)
    pipeline.hold = set()
    pipeline.release_held()
    pipeline.submit("urgent", 20, priority=1)
    assert isinstance(pipeline.outcome("urgent"), Finished)
    assert (pipeline.state("big"), pipeline.state("small")) == ("waiting", "hinted")
    pipeline.daemon(0).short.clear()
    pipeline.pass_time(0.15)
    finish(pipeline)


def lanes(pipeline: FakePipeline) -> list[list[str]]:
    return [[row.key.request_id for row in rows] for rows in pipeline.waves()]


def made(place: int, priority: int, tokens: int = 1) -> Request:
    prefill = request(f"r{place}", tokens, priority=priority)
    scope = HashScope("m", "l")
    one = Request(prefill, scope, BLOCK, 0.0, 1.0, 0.0, PhaseLog(prefill.request_id, 0.0, 0.0), life=place)
    one.place = place
    return one


@given(st.lists(st.one_of(st.integers(-2, 2), st.none()), max_size=60), st.integers(0, 4))
def test_aged_request_goes_next_when_every_served_one_may_be_aged(script: list[int | None], most: int) -> None:
    """A number lets a request of that class come, None serves the head."""
    order, served = RankedOrder(most, aged_every=1), list[Request]()

    def serve() -> None:
        head = order.head
        if head is not None:
            order.discard(head)
            order.serve(head)
            served.append(head)

    for place, priority in enumerate(script):
        if priority is None:
            serve()
        else:
            order.add(made(place, priority))
        assert order.check() == []
    while order:
        serve()
    for at, one in enumerate(served):
        before = [other for other in served[:at] if other.place > one.place]
        assert len(before) <= most
        assert all(other.prefill.priority > one.prefill.priority for other in before)


@pytest.mark.parametrize("queued", [256, 4096])
def test_serving_looks_only_at_those_that_are_overtaken(queued: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    honest = order_module._rank

    def counted(one: Request) -> tuple[bool, int, float]:
        nonlocal looks
        looks += 1
        return honest(one)

    order = RankedOrder(most_bypasses=8, aged_every=1)
    low = [made(place, -1) for place in range(queued)]
    early, late = made(2, 1), made(queued, 1)
    for one in (*low[:2], *low[3:]):
        order.add(one)
    monkeypatch.setattr(order_module, "_rank", counted)
    order.serve(early)
    assert [one.place for one in low if one.overtaken_by] == [0, 1]
    assert looks <= 4 + 3 * queued.bit_length()
    order.serve(late)
    looks = 0
    order.serve(late)  # it lacked room, and is tried again
    assert looks == 0
    assert [len(one.overtaken_by) for one in (low[0], low[1], low[3], low[-1])] == [2, 2, 1, 1]
    back = made(3, -2)
    order.add(back)
    order.serve(late)
    assert back.overtaken_by == {late.life}


@given(st.lists(st.one_of(st.integers(-2, 2), st.sampled_from(["serve", "again"])), max_size=60), st.integers(0, 4))
def test_overtaken_are_those_that_came_earlier_and_stand_behind(script: list[int | str], most: int) -> None:
    """`again`: the head lacks room and comes back; what is counted is compared with a walk over everybody."""
    order = RankedOrder(most, aged_every=1)
    for place, step in enumerate(script):
        if isinstance(step, int):
            order.add(made(place, step))
            continue
        if (head := order.head) is None:
            continue
        order.discard(head)
        behind = [one for one in order if goes_before(head, one) and one.place < head.place]
        wanted = {one.life: one.overtaken_by | ({head.life} if one in behind else set()) for one in order}
        order.serve(head)
        assert {one.life: one.overtaken_by for one in order} == wanted
        assert all(len(one.overtaken_by) >= most for one in order if one.promoted)
        if step == "again":
            order.add(head)


def test_lanes_follow_classes_when_several_prompts_are_in_work() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("long", 64 * 8, seed=1)  # four of its chunks fill the ring
    pipeline.submit("normal", 64, seed=2)
    pipeline.submit("urgent", 64, seed=3, priority=1)
    pipeline.hold = set()
    pipeline.release_held()
    assert lanes(pipeline)[:6] == [["long"]] * 4 + [["urgent"], ["normal"]]
    finish(pipeline)


def test_lane_is_not_passed_for_ever_when_urgent_prompts_keep_coming() -> None:
    pipeline = FakePipeline(config=ControllerConfig(wave_tokens=64, most_bypasses=2))
    pipeline.hold = {SendWave}
    pipeline.submit("long", 64 * 8, seed=1)
    for number in range(4):
        pipeline.submit(f"u{number}", 64, seed=number + 2, priority=9)
    pipeline.hold = set()
    pipeline.release_held()
    assert lanes(pipeline)[4:7] == [["u0"], ["u1"], ["long"]]
    finish(pipeline)


def test_block_size_prompts_of_all_classes_finish_once_each() -> None:
    pipeline = one_at_a_time(most_bypasses=3)
    names = [f"r{number}" for number in range(40)]
    for number, name in enumerate(names):
        pipeline.submit(name, BLOCK + number, priority=number % 19 - 9)
    finish(pipeline)
    assert sorted(prepared(pipeline)) == sorted([*names, "z"])


def test_long_aged_request_is_paid_for_by_its_tokens() -> None:
    order, served = RankedOrder(most_bypasses=1, aged_every=4), list[int]()
    for place, tokens in ((0, 5), (1, 1)):
        order.add(made(place, -1, tokens))
    for place in range(2, 40):
        order.add(made(place, 9))
    while (head := order.head) is not None:
        order.discard(head)
        order.serve(head)
        served.append(head.place)
    # the first is aged at once; 3 x 5 tokens of the high class before the second may be
    assert [served.index(0), served.index(1)] == [1, 17]
