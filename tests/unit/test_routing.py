"""Several pipelines behind one controller: where requests go, and that one's faults are its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.harness.fake_pipeline import fault, record, request
from wavepp_controller.core.events import (
    Event,
    FormPipeline,
    Joined,
    LeadershipLost,
    LeadershipWon,
    MemberUp,
    StreamLost,
    Submit,
)
from wavepp_controller.core.machine import ControllerMachine
from wavepp_proto.errors import ControllerUnavailable, UnknownPipeline
from wavepp_proto.terms import (
    CacheGroup,
    Capacity,
    DaemonKey,
    Epoch,
    JoinReply,
    PipelineId,
    Queued,
    RequestId,
    StageIndex,
)


class TwoPipelines:
    """Pipelines p and q of one stage each; nobody answers anything but Join."""

    def __init__(self, *serving: str) -> None:
        self.machine = ControllerMachine()
        self.post(LeadershipWon(Epoch(1), 1.0))
        for name in "pq":
            place = DaemonKey(PipelineId(name), StageIndex(0))
            actions = self.machine.handle(MemberUp(replace(record(0, 1), key=place), 1.0))
            (form,) = [action for action in actions if isinstance(action, FormPipeline)]
            if name in serving:
                (plan,) = form.plans
                capacity = Capacity(1, 100, 0)
                reply = JoinReply(plan.fence, place, 10_000, False, (CacheGroup.ATTENTION,), 8, 64, capacity)
                self.post(Joined(place, plan.fence.formation, reply, 1.0))

    def post(self, event: Event) -> list[object]:
        actions = self.machine.handle(event)
        self.machine.check()
        return [getattr(action, "event", action) for action in actions]

    def goes_to(self, name: str, pipeline: str | None = None) -> str:
        wanted = None if pipeline is None else PipelineId(pipeline)
        events = self.post(Submit(request(name, 40, pipeline=wanted), 2.0))
        return next(event.pipeline for event in events if isinstance(event, Queued))


def test_named_pipeline_is_taken_when_there_are_several() -> None:
    both = TwoPipelines("p", "q")
    assert [both.goes_to(name, "q") for name in "abc"] == ["q", "q", "q"]


def test_fewest_queued_are_chosen_when_no_pipeline_is_named() -> None:
    both = TwoPipelines("p", "q")
    assert both.goes_to("a", "p") == "p"
    assert [both.goes_to(name) for name in "bcd"] == ["q", "p", "q"]


def test_only_serving_pipeline_is_chosen_when_the_other_is_still_forming() -> None:
    both = TwoPipelines("q")
    assert [both.goes_to(name) for name in "abc"] == ["q", "q", "q"]


def test_id_is_refused_when_it_lives_in_another_pipeline() -> None:
    both = TwoPipelines("p", "q")
    both.goes_to("a", "p")
    events = both.post(Submit(request("a", 40, pipeline=PipelineId("q")), 2.0))
    assert [type(event).__name__ for event in events] == ["RefuseSubmit"]


def test_other_pipelines_go_on_when_one_loses_a_stage() -> None:
    both = TwoPipelines("p", "q")
    both.goes_to("a", "q")
    place = DaemonKey(PipelineId("p"), StageIndex(0))
    plan = both.machine.pipelines[PipelineId("p")].forming.present
    assert plan is not None
    both.post(StreamLost(place, plan.plans[0].fence.incarnation, plan.number, fault("STAGE_LOST"), 3.0))
    states = {status.pipeline: status.state for status in both.machine.status().pipelines}
    assert states == {"p": "broken", "q": "serving"}
    assert [status.request_id for status in both.machine.status().requests] == [RequestId("a")]


def test_pipeline_is_looked_up_only_by_a_controller_that_leads() -> None:
    """A follower may not know every member: its answer must be one that a client tries again."""
    both = TwoPipelines("q")
    assert both.machine.pipeline_of(None) == both.machine.pipeline_of(PipelineId("q")) == "q"
    with pytest.raises(UnknownPipeline):
        both.machine.pipeline_of(PipelineId("r"))
    both.post(LeadershipLost(2.0))
    for named in (None, PipelineId("q"), PipelineId("r")):
        with pytest.raises(ControllerUnavailable):
            both.machine.pipeline_of(named)
