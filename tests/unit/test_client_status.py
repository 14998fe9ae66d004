"""The status that users hold carries every field of the message, as values that cannot change."""

from __future__ import annotations

from dataclasses import fields

import pytest

from wavepp import _status
from wavepp_proto.terms import Capacity, DaemonKey, ErrorInfo, PipelineId, Rank, StageIndex, StageTimes
from wavepp_proto.v1 import admin_pb2, common_pb2

KEY = common_pb2.DaemonKey(pipeline="p", stage=2, rank=1)
FAULT = common_pb2.Error(reason="STAGE_LOST", message="gone", fields={"stage": "2"})
MESSAGE = admin_pb2.StatusResponse(
    version="1",
    epoch=7,
    ready=True,
    pipelines=[
        admin_pb2.PipelineStatus(
            pipeline="p",
            state="broken",
            missing_stages=[1, 3],
            missing=[common_pb2.DaemonKey(pipeline="p", stage=3, rank=1)],
            last_fault=FAULT,
            daemons=[
                admin_pb2.StageStatus(
                    key=KEY,
                    pool_blocks=9,
                    capacity=common_pb2.Capacity(seq=4, free_blocks=5, evictable_blocks=6),
                    times=common_pb2.StageTimes(compute_us=11),
                    costs=admin_pb2.StageCosts(c_us=8.5, b_us=2, error=0.25, samples=3, believed=True),
                )
            ],
        ),
        admin_pb2.PipelineStatus(pipeline="q", state="serving"),
    ],
    requests=[admin_pb2.RequestStatus(request_id="r", waiting_for="capacity", priority=-2)],
    refused=[admin_pb2.RefusedMember(key=KEY, address="a:1", error=FAULT)],
    counters={"finished": 3},
)


def test_status_is_equal_field_by_field() -> None:
    status = _status.cluster_status_from_pb(MESSAGE)
    key = DaemonKey(PipelineId("p"), StageIndex(2), Rank(1))
    fault = ErrorInfo("STAGE_LOST", "gone", (("stage", "2"),))
    assert (status.version, status.epoch, status.ready, status.counters) == ("1", 7, True, {"finished": 3})
    broken, serving = status.pipelines
    assert broken.missing == (DaemonKey(PipelineId("p"), StageIndex(3), Rank(1)),)
    assert (broken.missing_stages, broken.last_fault, serving.last_fault) == ((1, 3), fault, None)
    (daemon,) = broken.daemons
    assert (daemon.key, daemon.pool_blocks) == (key, 9)
    assert (daemon.capacity, daemon.times) == (Capacity(4, 5, 6), StageTimes(compute_us=11))
    assert (daemon.executing_wave, serving.ready) == (None, False)
    assert daemon.costs == _status.StageCosts(
        c_us=8.5, b_us=2.0, a_us=0.0, g_us=0.0, error=0.25, samples=3, believed=True
    )
    (request,) = status.requests
    assert (request.request_id, request.waiting_for, request.priority) == ("r", "capacity", -2)
    assert status.refused == (_status.RefusedMember(key=key, address="a:1", error=fault),)


@pytest.mark.parametrize(
    "name", ["ClusterStatus", "PipelineStatus", "RefusedMember", "RequestStatus", "StageCosts", "StageStatus"]
)
def test_no_field_of_the_message_is_left_out(name: str) -> None:
    message = admin_pb2.DESCRIPTOR.message_types_by_name["StatusResponse" if name == "ClusterStatus" else name]
    assert {field.name for field in fields(getattr(_status, name))} == {field.name for field in message.fields}
