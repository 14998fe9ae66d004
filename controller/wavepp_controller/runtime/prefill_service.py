"""Prefill: the clients' door.

Owns the event stream of each request. The stream IS the request: when the client closes it, the
request is cancelled. Verdicts are the core's; only what would cost memory before the core could see
it (frames, which `prompt_intake` puts together, and a live duplicate id) is refused here, and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from wavepp_controller.core.events import Cancel, Submit
from wavepp_controller.runtime.prompt_intake import PromptIntake
from wavepp_controller.runtime.request_spans import RequestSpans
from wavepp_controller.runtime.run_outcome import AwaitedRun
from wavepp_controller.runtime.run_stream import RunStream, StreamedRun
from wavepp_controller.runtime.shell import ControllerShell, EventSink
from wavepp_proto import convert
from wavepp_proto.errors import DuplicateRequest, WaveppError
from wavepp_proto.runtime.context import Context
from wavepp_proto.runtime.trace_context import is_sampled
from wavepp_proto.terms import Failed, Finished, PipelineId, PrefillEvent, PrefillRequest, RequestId
from wavepp_proto.v1 import prefill_pb2 as pb
from wavepp_proto.v1 import prefill_pb2_grpc


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, shell: ControllerShell, spans: RequestSpans) -> None:
        self._shell = shell
        self._spans = spans
        self._intake = PromptIntake()
        self._streams: set[RunStream] = set()
        self._closed = False
        self._ending: set[asyncio.Task[None]] = set()

    async def Submit(
        self, request_iterator: AsyncIterator[pb.SubmitRequest], context: Context
    ) -> AsyncIterator[pb.SubmitResponse]:
        # A failure is an event, not a status: gRPC masks a status that comes while the client still writes.
        assembler = convert.PromptAssembler()
        try:
            with self._counted():
                request = await self._intake.receive(assembler, request_iterator)
            async for event in self._events(request):
                yield pb.SubmitResponse(event=convert.prefill_event_to_pb(event))
        except WaveppError as error:
            request_id = assembler.header.request_id if assembler.header is not None else RequestId("unknown")
            yield pb.SubmitResponse(event=convert.prefill_event_to_pb(Failed(request_id, error.info())))

    async def Run(self, request: pb.RunRequest, context: Context) -> pb.RunResponse:
        run = AwaitedRun()
        try:
            with self._counted():
                asked = convert.run_request_from_pb(request)
            with self._live(asked, run):
                return await run.answered()
        except WaveppError as error:
            await convert.abort(context, error)
        raise AssertionError("abort raises")

    async def RunMany(  # type: ignore[override]  # the generated signature knows no coroutine that writes
        self, request_iterator: AsyncIterator[pb.RunManyRequest], context: Context
    ) -> None:
        stream = RunStream(self._begin_run, self._let_go)
        self._streams.add(stream)
        if self._closed:
            stream.close()
        try:
            # At once: a client tells from it that we know this method.
            await context.send_initial_metadata(())
            await stream.serve(request_iterator, context.write)
        except WaveppError as error:
            await convert.abort(context, error)
        finally:
            self._streams.discard(stream)
            abandoning = asyncio.create_task(stream.abandon(), name="run-many-end")
            self._ending.add(abandoning)
            abandoning.add_done_callback(self._ending.discard)

    def close(self) -> None:
        """End what only waits for more: streams of runs, prompts that arrive. A server that stops would cancel them
        without a word."""
        self._closed = True
        self._intake.close()
        for stream in self._streams:
            stream.close()

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        request_id = RequestId(request.request_id)
        found = self._shell.is_open(request_id)
        self._shell.post(Cancel(request_id, time.monotonic()))
        return pb.CancelResponse(found=found)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        machine = self._shell.machine
        try:
            found = machine.pipeline_of(PipelineId(request.pipeline) if request.pipeline else None)
        except WaveppError as error:
            await convert.abort(context, error)
        chosen = next(status for status in machine.status(requests=False).pipelines if status.pipeline == found)
        reply = pb.DescribeResponse(
            pipeline=chosen.pipeline,
            block_tokens=chosen.block_tokens or 0,
            stages=chosen.stages,
            ready=chosen.ready,
        )
        if (model := chosen.model) is not None:
            reply.model, reply.model_path, reply.model_fingerprint = model.name, model.path, model.fingerprint
            reply.vocabulary, reply.window = model.vocabulary, model.window
        return reply

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """What is refused inside shows up among the core's own refusals."""
        try:
            yield
        except WaveppError as error:
            self._shell.machine.turned_away(error)
            raise

    async def _events(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        """Submit, then everything that happens up to the outcome."""
        queue: asyncio.Queue[PrefillEvent] = asyncio.Queue()
        with self._live(request, queue):
            while True:
                event = await queue.get()
                yield event
                if isinstance(event, Finished | Failed):
                    return

    def _begin_run(self, asked: pb.RunRequest, run: StreamedRun) -> None:
        with self._counted():
            request = convert.shared_run_from_pb(asked)
        run.request_id = request.request_id
        self._submit(request, run)

    def _let_go(self, run: StreamedRun) -> None:
        self._shell.close_request(run.request_id, run)

    @contextmanager
    def _live(self, request: PrefillRequest, sink: EventSink) -> Iterator[None]:
        """Submit. Leaving before the outcome cancels the request."""
        try:
            self._submit(request, sink)
            yield
        finally:
            self._shell.close_request(request.request_id, sink)

    def _submit(self, request: PrefillRequest, sink: EventSink) -> None:
        """`sink` hears what happens from now on. Raises DuplicateRequest."""
        request_id = request.request_id
        with self._counted():
            if self._shell.is_open(request_id):
                raise DuplicateRequest(f"request {request_id!r} is live", field="request_id", value=request_id)
        self._shell.open_request(request_id, sink)
        own = self._spans.began(request_id, request.trace, request.prompt_tokens)
        self._shell.post(Submit(request, time.monotonic(), is_sampled(own)))
