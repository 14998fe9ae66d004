"""The services of the fake controller: the real contract in front of scripted answers.

Owns assembling frames, the order of events, refusing live duplicates and unknown pipelines, cancel by
id and by a closed stream, deadlines. What is answered is `testing.py`'s. Called by FakeController.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc.aio

from wavepp._fake_answer import Answer, Outcome, Received, Step
from wavepp._fake_runs import serve_runs

if TYPE_CHECKING:
    from wavepp.testing import FakeController
from wavepp_proto import __version__, convert
from wavepp_proto.errors import (
    Cancelled,
    DeadlineExpired,
    DuplicateRequest,
    InvalidRequest,
    UnknownPipeline,
    WaveppError,
)
from wavepp_proto.terms import (
    Admitted,
    Attempt,
    Failed,
    Finished,
    PipelineId,
    PrefillEvent,
    PrefillRequest,
    Progress,
    Queued,
    RequestId,
)
from wavepp_proto.v1 import admin_pb2, admin_pb2_grpc, prefill_pb2, prefill_pb2_grpc

Emit = Callable[[PrefillEvent], Awaitable[None]]
Context = grpc.aio.ServicerContext[Any, Any]
ATTEMPT = Attempt(1)


def add_services(server: grpc.aio.Server, controller: FakeController) -> None:
    service = _PrefillService(controller)
    prefill_pb2_grpc.add_PrefillServicer_to_server(service, server)
    # The stubs call every method abstract; at run time those that are missing answer UNIMPLEMENTED.
    admin = _AdminService(controller, service.live)  # type: ignore[abstract]
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)


class _PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, controller: FakeController) -> None:
        self._controller = controller
        self.live: dict[RequestId, asyncio.Task[None]] = {}
        self._cancelled_by_id: set[RequestId] = set()

    async def Submit(  # type: ignore[override]  # the generated signature knows no coroutine that writes
        self, request_iterator: AsyncIterator[prefill_pb2.SubmitRequest], context: Context
    ) -> None:
        writing: asyncio.Future[None] | None = None

        async def emit(event: PrefillEvent) -> None:
            # A cancel may end `emit` while its write is under way, and gRPC takes one write at a time.
            nonlocal writing
            if writing is not None:
                await asyncio.wait({writing})
            message = prefill_pb2.SubmitResponse(event=convert.prefill_event_to_pb(event))
            writing = asyncio.ensure_future(context.write(message))
            await asyncio.shield(writing)

        assembler = convert.PromptAssembler()
        try:
            request, frames = await _assembled(assembler, request_iterator)
        except WaveppError as error:
            header = assembler.header
            # An event, for a status that overtakes the client's frames is lost in its gRPC.
            await emit(Failed(header.request_id if header else RequestId("unknown"), error.info()))
            return
        received = Received(request, frames)
        answer = self._controller.receive(received)
        try:
            await self._answered(received, answer, emit)
        except WaveppError as error:
            if answer.error_as_status:
                await convert.abort(context, error)
            await emit(Failed(request.request_id, error.info()))

    async def Run(self, request: prefill_pb2.RunRequest, context: Context) -> prefill_pb2.RunResponse:
        try:
            return await self._run(request)
        except WaveppError as error:
            await convert.abort(context, error)
        raise AssertionError("abort raises")

    async def RunMany(  # type: ignore[override]  # the generated signature knows no coroutine that writes
        self, request_iterator: AsyncIterator[prefill_pb2.RunManyRequest], context: Context
    ) -> None:
        await context.send_initial_metadata(())
        await serve_runs(request_iterator, context.write, self._run)

    async def _run(self, request: prefill_pb2.RunRequest) -> prefill_pb2.RunResponse:
        """The answer of a whole request; raises what it is refused with."""
        events: list[PrefillEvent] = []

        async def emit(event: PrefillEvent) -> None:
            events.append(event)

        received = Received(convert.run_request_from_pb(request), frames=1)
        answer = self._controller.receive(received)
        try:
            await self._answered(received, answer, emit)
        except WaveppError as error:
            if not events or answer.error_as_status:
                raise
            events.append(Failed(received.request.request_id, error.info()))
        admitted = next((event for event in events if isinstance(event, Admitted)), None)
        outcome = events[-1]
        assert isinstance(outcome, Finished | Failed), "a request ends once, and with an outcome"
        return convert.run_response_to_pb(PipelineId(self._controller.description.pipeline), admitted, outcome)

    async def Cancel(self, request: prefill_pb2.CancelRequest, context: Context) -> prefill_pb2.CancelResponse:
        request_id = RequestId(request.request_id)
        self._controller.cancelled_ids.append(request_id)
        task = self.live.get(request_id)
        if task is not None:
            self._cancelled_by_id.add(request_id)
            task.cancel()
        return prefill_pb2.CancelResponse(found=task is not None)

    async def Describe(self, request: prefill_pb2.DescribeRequest, context: Context) -> prefill_pb2.DescribeResponse:
        self._controller.describe_calls += 1
        description = self._controller.description
        if request.pipeline not in ("", description.pipeline):
            await convert.abort(context, _unknown_pipeline(request.pipeline))
        return prefill_pb2.DescribeResponse(
            pipeline=description.pipeline,
            model=description.model,
            model_path=description.model_path,
            model_fingerprint=description.model_fingerprint,
            vocabulary=description.vocabulary,
            window=description.window,
            block_tokens=description.block_tokens,
            stages=description.stages,
            ready=description.ready,
        )

    async def _answered(self, received: Received, answer: Answer, emit: Emit) -> None:
        """Emit the events of `answer`; note the outcome whichever way it ends."""
        request_id = received.request.request_id
        if request_id in self.live:
            received.end(Outcome.FAILED)
            raise DuplicateRequest(f"request {request_id} is live", field="request_id", value=request_id)
        task = self.live[request_id] = asyncio.create_task(self._answer(received.request, answer, emit))
        try:
            await task
            received.end(Outcome.FINISHED)
        except WaveppError:
            received.end(Outcome.FAILED)
            raise
        except asyncio.CancelledError:
            received.end(Outcome.CANCELLED)
            if request_id in self._cancelled_by_id:
                raise Cancelled(f"request {request_id} was cancelled", request_id=request_id) from None
            raise
        finally:
            self._cancelled_by_id.discard(request_id)
            del self.live[request_id]

    async def _answer(self, request: PrefillRequest, answer: Answer, emit: Emit) -> None:
        left = request.deadline_ms / 1000 if request.deadline_ms is not None and answer.heeds_deadline else None
        try:
            async with asyncio.timeout(left):
                for step in Step:
                    if step in answer.gates:
                        await answer.gates[step].wait()
                    if answer.error is not None and step is answer.error_at:
                        raise answer.error
                    for event in self._events(step, request, answer):
                        await emit(event)
        except TimeoutError:
            message = "the deadline passed"
            raise DeadlineExpired(message, field="deadline_ms", value=request.deadline_ms) from None

    def _events(self, step: Step, request: PrefillRequest, answer: Answer) -> list[PrefillEvent]:
        request_id, known = request.request_id, self._controller.description.pipeline
        candidate = answer.cached_tokens if answer.candidate is None else answer.candidate
        best = candidate if answer.best_stage_hit is None else answer.best_stage_hit
        match step:
            case Step.QUEUED:
                if request.pipeline not in (None, known):
                    raise _unknown_pipeline(str(request.pipeline))
                return [Queued(request_id, PipelineId(known), position=len(self.live) - 1)]
            case Step.ADMITTED:
                endpoint, stage = answer.cached_tokens, answer.limiting_stage
                lost, shared = answer.lost_to_snapshots, answer.shared_tokens
                return [Admitted(request_id, ATTEMPT, endpoint, candidate, stage, best, answer.rounds, lost, shared)]
            case Step.FINISHED:
                return [
                    *(Progress(request_id, tokens, request.prompt_tokens) for tokens in answer.progress),
                    _finished(request, answer),
                ]


class _AdminService(admin_pb2_grpc.AdminServicer):
    """Status alone; the rest answers UNIMPLEMENTED."""

    def __init__(self, controller: FakeController, live: dict[RequestId, asyncio.Task[None]]) -> None:
        self._controller = controller
        self._live = live

    async def Status(self, request: admin_pb2.StatusRequest, context: Context) -> admin_pb2.StatusResponse:
        description = self._controller.description
        outcomes = Counter(received.outcome for received in self._controller.requests)
        pipeline = admin_pb2.PipelineStatus(
            pipeline=description.pipeline,
            state="serving" if description.ready else "forming",
            formation=1,
            stages=description.stages,
            model=description.model,
            model_path=description.model_path,
            block_tokens=description.block_tokens,
            window=description.window,
            running_requests=len(self._live),
            ready=description.ready,
        )
        return admin_pb2.StatusResponse(
            version=__version__,
            cluster="fake",
            epoch=1,
            leader=True,
            ready=description.ready,
            pipelines=[pipeline],
            requests=[_request_status(id_, description.pipeline) for id_ in self._live] if request.requests else [],
            counters={outcome.value: count for outcome, count in outcomes.items() if outcome is not None},
            pid=os.getpid(),
        )


async def _assembled(
    assembler: convert.PromptAssembler, frames: AsyncIterator[prefill_pb2.SubmitRequest]
) -> tuple[PrefillRequest, int]:
    """The whole request and in how many frames it came."""
    count = 0
    async for frame in frames:
        count += 1
        if (request := assembler.add(frame)) is not None:
            return request, count
    raise InvalidRequest("the stream ended before the prompt's last frame", field="last")


def _finished(request: PrefillRequest, answer: Answer) -> Finished:
    return Finished(
        request_id=request.request_id,
        attempt=ATTEMPT,
        first_token=answer.first_token,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        timings=answer.timings,
        waves=answer.waves,
        top_logprobs=answer.top_logprobs,
        logits=answer.logits,
    )


def _request_status(request_id: RequestId, pipeline: str) -> admin_pb2.RequestStatus:
    return admin_pb2.RequestStatus(request_id=request_id, pipeline=pipeline, state="running")


def _unknown_pipeline(pipeline: str) -> UnknownPipeline:
    return UnknownPipeline(f"there is no pipeline {pipeline}", field="pipeline", value=pipeline)
