"""Telling daemons that no pipeline can use them: once, again with another reason, and that it is over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tests.harness.eventually import eventually
from tests.harness.fake_pipeline import record
from tests.harness.ports import free_port
from wavepp_controller.core.status import RefusedMember
from wavepp_controller.runtime.refusals import Refusals
from wavepp_proto import convert
from wavepp_proto.errors import StaleMessage
from wavepp_proto.runtime.channels import ClientSecurity, bind_server, new_server
from wavepp_proto.runtime.context import Context
from wavepp_proto.terms import Epoch, ErrorInfo, Fence, Formation, Incarnation, MemberRecord
from wavepp_proto.v1 import control_pb2, control_pb2_grpc

DTYPE, MODEL = (ErrorInfo("JOIN_REFUSED", f"another {name}", (("field", name),)) for name in ("dtype", "model"))
EPOCH = Epoch(7)


@dataclass
class Daemon(control_pb2_grpc.StageControlServicer):
    """Notes what it is told."""

    told: list[tuple[Fence, ErrorInfo | None]] = field(default_factory=list)
    stale: bool = False

    async def Refuse(self, request: control_pb2.RefuseRequest, context: Context) -> control_pb2.RefuseResponse:
        self.told.append(convert.refuse_from_pb(request))
        if self.stale:
            await convert.abort(context, StaleMessage("not mine", field="incarnation"))
        return control_pb2.RefuseResponse()

    async def Join(self, request: control_pb2.JoinRequest, context: Context) -> control_pb2.JoinResponse:
        raise AssertionError("not asked here")

    async def EndFormation(
        self, request: control_pb2.EndFormationRequest, context: Context
    ) -> control_pb2.EndFormationResponse:
        raise AssertionError("not asked here")

    async def DrainStage(
        self, request: control_pb2.DrainStageRequest, context: Context
    ) -> control_pb2.DrainStageResponse:
        raise AssertionError("not asked here")

    @property
    def reasons(self) -> list[str | None]:
        return [None if error is None else error.message for _, error in self.told]


@asynccontextmanager
async def serving(daemon: Daemon, port: int = 0) -> AsyncIterator[MemberRecord]:
    """The record of a daemon that listens."""
    server = new_server()
    control_pb2_grpc.add_StageControlServicer_to_server(daemon, server)
    port = bind_server(server, f"127.0.0.1:{port}")
    await server.start()
    try:
        yield record(1, incarnation=3, address=f"127.0.0.1:{port}")
    finally:
        await server.stop(0)


@pytest.fixture
async def refusals() -> AsyncIterator[Refusals]:
    made = Refusals(ClientSecurity())
    yield made
    await made.close()


def refused(member: MemberRecord, error: ErrorInfo) -> list[RefusedMember]:
    return [RefusedMember(member.key, member.incarnation, member.address, error)]


async def test_daemon_is_told_once_for_each_reason_and_when_it_is_over(refusals: Refusals) -> None:
    daemon = Daemon()
    async with serving(daemon) as member:
        for error in (DTYPE, DTYPE, MODEL):
            refusals.tell(EPOCH, refused(member, error), [member])
            await eventually(lambda: not refusals._calls, about="the call to end")
        for _ in range(2):
            refusals.tell(EPOCH, [], [member])
            await eventually(lambda: not refusals._calls, about="the call to end")
    assert daemon.reasons == ["another dtype", "another model", None]
    assert {fence for fence, _ in daemon.told} == {Fence(EPOCH, Formation(0), Incarnation(3))}


async def test_daemon_is_told_when_it_can_be_reached_at_last(refusals: Refusals) -> None:
    daemon, port = Daemon(), free_port()
    member = record(1, incarnation=3, address=f"127.0.0.1:{port}")
    refusals.tell(EPOCH, refused(member, DTYPE), [member])
    await eventually(lambda: bool(refusals._calls))
    async with serving(daemon, port):
        await eventually(lambda: not refusals._calls, about="the call to end")
    assert daemon.reasons == ["another dtype"]


async def test_daemon_that_is_somebody_else_by_now_is_told_no_more(refusals: Refusals) -> None:
    daemon = Daemon(stale=True)
    async with serving(daemon) as member:
        refusals.tell(EPOCH, refused(member, DTYPE), [member])
        await eventually(lambda: not refusals._calls, about="the call to end")
    assert daemon.reasons == ["another dtype"]


async def test_nothing_is_told_by_a_controller_that_does_not_lead_and_all_by_the_next(refusals: Refusals) -> None:
    daemon = Daemon()
    async with serving(daemon) as member:
        refusals.tell(None, refused(member, DTYPE), [member])
        assert not refusals._calls
        for epoch in (EPOCH, None, Epoch(8)):
            refusals.tell(epoch, refused(member, DTYPE), [member])
            await eventually(lambda: not refusals._calls, about="the call to end")
    assert [fence.epoch for fence, _ in daemon.told] == [7, 8]


async def test_member_that_is_gone_is_told_nothing(refusals: Refusals) -> None:
    daemon = Daemon()
    async with serving(daemon) as member:
        refusals.tell(EPOCH, refused(member, DTYPE), [member])
        await eventually(lambda: not refusals._calls, about="the call to end")
        refusals.tell(EPOCH, [], [])
        assert not refusals._calls
    assert daemon.reasons == ["another dtype"]
