"""Prefill: the clients' door.

Owns the assembly of framed prompts and the event stream of each request. The stream IS the request:
when the client closes it, the request is cancelled. Verdicts are the core's; only what would cost
memory before the core could see it (sizes of frames, a live duplicate id) is refused here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from wavepp_controller.core.events import Cancel, Submit
from wavepp_controller.runtime.request_spans import RequestSpans
from wavepp_controller.runtime.shell import ControllerShell
from wavepp_proto import convert
from wavepp_proto.errors import (
    DeadlineExpired,
    DuplicateRequest,
    InternalError,
    InvalidRequest,
    UnknownPipeline,
    WaveppError,
    from_info,
)
from wavepp_proto.runtime.context import Context
from wavepp_proto.terms import (
    Admitted,
    Failed,
    Finished,
    PipelineId,
    PrefillEvent,
    PrefillRequest,
    Queued,
    RequestId,
)
from wavepp_proto.v1 import prefill_pb2 as pb
from wavepp_proto.v1 import prefill_pb2_grpc

FRAME_DEADLINE_S = 30.0
"""Longest pause between two frames of one prompt."""


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, shell: ControllerShell, spans: RequestSpans) -> None:
        self._shell = shell
        self._spans = spans

    async def Submit(
        self, request_iterator: AsyncIterator[pb.SubmitRequest], context: Context
    ) -> AsyncIterator[pb.SubmitResponse]:
        # A failure is an event, not a status: gRPC masks a status that comes while the client still writes.
        assembler = convert.PromptAssembler()
        try:
            request = await _assemble(assembler, request_iterator)
            async for event in self._events(request):
                yield pb.SubmitResponse(event=convert.prefill_event_to_pb(event))
        except WaveppError as error:
            request_id = assembler.header.request_id if assembler.header is not None else RequestId("unknown")
            yield pb.SubmitResponse(event=convert.prefill_event_to_pb(Failed(request_id, error.info())))

    async def Run(self, request: pb.RunRequest, context: Context) -> pb.RunResponse:
        pipeline: PipelineId | None = None
        admitted: Admitted | None = None
        try:
            async for event in self._events(convert.run_request_from_pb(request)):
                match event:
                    case Queued():
                        pipeline = event.pipeline
                    case Admitted():
                        admitted = event
                    case Failed() if pipeline is None:
                        raise from_info(event.error)
                    case (Finished() | Failed()) as outcome if pipeline is not None:
                        return convert.run_response_to_pb(pipeline, admitted, outcome)
            raise InternalError("a request ended without an outcome")
        except WaveppError as error:
            await convert.abort(context, error)
        raise AssertionError("abort raises")

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        request_id = RequestId(request.request_id)
        found = self._shell.is_open(request_id)
        self._shell.post(Cancel(request_id, time.monotonic()))
        return pb.CancelResponse(found=found)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        pipelines = self._shell.machine.status().pipelines
        wanted = request.pipeline
        chosen = next((p for p in pipelines if p.pipeline == wanted or not wanted), None)
        if chosen is None:
            error = UnknownPipeline(f"no pipeline {wanted!r}", field="pipeline", value=wanted)
            await convert.abort(context, error)
        assert chosen is not None
        reply = pb.DescribeResponse(
            pipeline=chosen.pipeline,
            block_tokens=chosen.block_tokens or 0,
            stages=chosen.stages,
            ready=chosen.state == "serving",
        )
        if (model := chosen.model) is not None:
            reply.model, reply.model_path, reply.model_fingerprint = model.name, model.path, model.fingerprint
            reply.vocabulary, reply.window = model.vocabulary, model.window
        return reply

    async def _events(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        """Submit, then everything that happens up to the outcome."""
        request_id = request.request_id
        if self._shell.is_open(request_id):
            raise DuplicateRequest(f"request {request_id!r} is live", field="request_id", value=request_id)
        queue = self._shell.open_request(request_id)
        self._spans.began(request_id, request.trace, request.prompt_tokens)
        try:
            self._shell.post(Submit(request, time.monotonic()))
            while True:
                event = await queue.get()
                yield event
                if isinstance(event, Finished | Failed):
                    return
        finally:
            self._shell.close_request(request_id, queue)


async def _assemble(assembler: convert.PromptAssembler, frames: AsyncIterator[pb.SubmitRequest]) -> PrefillRequest:
    """The whole request, its deadline shortened by what its frames took."""
    arrived = time.monotonic()
    while True:
        try:
            async with asyncio.timeout(FRAME_DEADLINE_S):
                frame = await anext(frames)
        except TimeoutError:
            message = "the next frame of the prompt did not come"
            raise DeadlineExpired(message, field="frame", limit=FRAME_DEADLINE_S) from None
        except StopAsyncIteration:
            raise InvalidRequest("the prompt ended before its last frame", field="last", value="false") from None
        request = assembler.add(frame)
        if request is not None:
            return _aged(request, time.monotonic() - arrived)


def _aged(request: PrefillRequest, seconds: float) -> PrefillRequest:
    """The deadline counts from when the first frame came; framing a long prompt takes time."""
    if request.deadline_ms is None or request.deadline_ms <= 0:
        return request
    left = request.deadline_ms - round(seconds * 1000)
    if left <= 0:
        raise DeadlineExpired(
            "the deadline passed while the prompt arrived", field="deadline_ms", value=request.deadline_ms
        )
    return replace(request, deadline_ms=left)
