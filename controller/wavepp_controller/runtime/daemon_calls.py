"""The unary calls to one daemon in one formation: inventory, join, and the formation's end.

Owns their deadlines and typed errors. The streams beside them are `daemon_link`'s, which owns the channel.
"""

from __future__ import annotations

from typing import Final

import grpc.aio

from wavepp_proto import convert, limits
from wavepp_proto.errors import FormationEnded, JoinRefused, StageLost, WaveppError
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.terms import ErrorInfo, Fence, Inventory, JoinPlan, JoinReply
from wavepp_proto.v1 import admission_pb2_grpc, control_pb2_grpc

log = get_log(__name__)

END_DEADLINE_S: Final = 1.0
"""How long a daemon may take to answer that a formation ended; it finds out by itself otherwise."""


class DaemonCalls:
    def __init__(self, plan: JoinPlan, channel: grpc.aio.Channel) -> None:
        self._plan = plan
        self._admission = admission_pb2_grpc.StageAdmissionStub(channel)
        self._control = control_pb2_grpc.StageControlStub(channel)
        self.closed = False
        """The channel is, or is about to be: gRPC would refuse a call with an error of its own kind."""

    async def join(self) -> JoinReply:
        """Inventory first (it installs the epoch and fences the controller before us), then Join."""
        await self.inventory()
        self._check_open()
        deadline_s = self._plan.deadline_ms / 1000 + 1
        try:
            answer = await self._control.Join(convert.join_plan_to_pb(self._plan), timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        reply = convert.join_reply_from_pb(answer)
        if reply.fence != self._plan.fence:
            raise JoinRefused("the reply belongs to another join", field="fence", value=str(reply.fence))
        return reply

    async def inventory(self, fence: Fence | None = None) -> Inventory:
        """Every hold and sequence of the daemon, now; it gives the fence back (the plan's, if none is given)."""
        self._check_open()
        request = convert.inventory_request_to_pb(fence or self._plan.fence)
        try:
            answer = await self._admission.Inventory(request, timeout=limits.CALL_DEADLINE_MS / 1000)
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        return convert.inventory_from_pb(answer)

    def _failed(self, error: grpc.aio.AioRpcError) -> WaveppError:
        """What the daemon said, or that its place cannot be reached: the cause may be its certificate."""
        told, key = convert.error_from_rpc(error, StageLost), self._plan.key
        if not isinstance(told, StageLost) or told.fields:
            return told
        message = f"{key.place} cannot be reached: {told.message}"
        return StageLost(message, stage=key.stage, rank=key.rank, pipeline=key.pipeline)

    async def end_formation(self, fence: Fence, cause: ErrorInfo) -> None:
        """Tell the daemon that its formation ended: best effort, bounded."""
        try:
            self._check_open()
            await self._control.EndFormation(convert.end_formation_to_pb(fence, cause), timeout=END_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            log.info("formation end not acknowledged", stage=self._plan.key.stage, code=error.code().name)
        except FormationEnded:
            log.info("formation end not told: the link is closed", stage=self._plan.key.stage)

    def _check_open(self) -> None:
        if self.closed:
            number = self._plan.fence.formation
            raise FormationEnded("the link was closed meanwhile", stage=self._plan.key.stage, formation=number)
