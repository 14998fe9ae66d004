"""Many runs on one stream: the controller's side of one `RunMany` call.

Owns which numbers are live on the stream, and the answers that wait to be written: what ends at the same time travels
in one message. A run is judged and served like a `Run`, by the two functions the stream is made with. Bounded by not
reading on: who does not take its answers is not heard. Called by `prefill_service`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from wavepp_controller.runtime.run_outcome import RunOutcome
from wavepp_proto import convert, limits
from wavepp_proto.errors import InvalidRequest, QueueFull, WaveppError
from wavepp_proto.terms import RequestId
from wavepp_proto.v1 import prefill_pb2 as pb

RETRY_AFTER_MS = 100
SLICE = 4
"""Runs that are begun, or let go of, before others get their turn on the event loop."""

Write = Callable[[pb.RunManyResponse], Awaitable[None]]
Begin = Callable[[pb.RunRequest, "StreamedRun"], None]
"""Judge a run and submit it; raises its refusal, and sets the run's request id if it is not refused."""
LetGo = Callable[["StreamedRun"], None]
"""Nobody waits for the run any more."""


class StreamedRun(RunOutcome):
    """One run of a stream."""

    def __init__(self, number: int, ended: Callable[[StreamedRun], None]) -> None:
        super().__init__()
        self.number = number
        self.request_id = RequestId("")
        self._tell = ended

    def ended(self) -> None:
        self._tell(self)


class RunStream:
    """`serve` it once, to its end."""

    def __init__(self, begin: Begin, let_go: LetGo) -> None:
        self._begin = begin
        self._let_go = let_go
        self._live: dict[int, StreamedRun] = {}
        self._last = 0
        """Highest number so far."""
        self._answers: deque[pb.RunAnswer | StreamedRun] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._closing = False
        """Nothing more is read; what is live may still end."""

    async def serve(self, messages: AsyncIterator[pb.RunManyRequest], write: Write) -> None:
        """Until the client closes its side and everything has ended, or `close` is called.

        Raises InvalidRequest for a message against the rules; what is live then, or on cancellation, `abandon` lets go.
        """
        reading = asyncio.create_task(self._read(messages), name="run-many-reader")
        try:
            while (response := await self._next(reading)) is not None:
                await write(response)
                self._room.set()
        finally:
            reading.cancel()

    def close(self) -> None:
        """Answer what has ended, then end the stream."""
        self._closing = True
        self._live.clear()
        self._wake.set()

    async def abandon(self) -> None:
        """Let go of what is live, in slices: a stream may have had many runs."""
        self._closing = True
        while self._live:
            for number in list(self._live)[:SLICE]:
                if (run := self._live.pop(number, None)) is not None:
                    self._let_go(run)
            await asyncio.sleep(0)

    # --- requests -----------------------------------------------------------------------------------

    async def _read(self, messages: AsyncIterator[pb.RunManyRequest]) -> None:
        try:
            async for message in messages:
                await self._take(message)
                while len(self._answers) >= limits.MAX_STREAM_RUNS:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._closing = True
            self._wake.set()

    async def _take(self, message: pb.RunManyRequest) -> None:
        convert.check_run_many(message)
        for number in message.cancels:
            if (run := self._live.pop(number, None)) is not None:
                self._let_go(run)
        for index, asked in enumerate(message.runs):
            if index and index % SLICE == 0:
                await asyncio.sleep(0)
            self._start(asked)

    def _start(self, asked: pb.NumberedRun) -> None:
        number = asked.number
        if number <= self._last:
            message = f"run {number} is not above {self._last}, the last one of its stream"
            raise InvalidRequest(message, field="number", value=number, limit=self._last)
        self._last = number
        run = self._live[number] = StreamedRun(number, self._ended)
        try:
            self._check_room()
            self._begin(asked.run, run)
        except WaveppError as error:
            if self._live.pop(number, None) is not None:
                self._let_go(run)
                self._answer(convert.refusal_to_pb(number, error))

    def _check_room(self) -> None:
        if len(self._live) > limits.MAX_STREAM_RUNS:
            raise QueueFull(
                f"more than {limits.MAX_STREAM_RUNS} runs are live on one stream",
                field="runs",
                value=len(self._live),
                limit=limits.MAX_STREAM_RUNS,
                retry_after_ms=RETRY_AFTER_MS,
            )

    # --- answers ------------------------------------------------------------------------------------

    def _ended(self, run: StreamedRun) -> None:
        if self._live.pop(run.number, None) is not None:
            self._answer(run)

    def _answer(self, answer: pb.RunAnswer | StreamedRun) -> None:
        self._answers.append(answer)
        self._wake.set()

    async def _next(self, reading: asyncio.Task[None]) -> pb.RunManyResponse | None:
        """Everything that can be answered now, up to the size of a frame; None once there will be no more."""
        while not self._answers:
            if reading.done():
                reading.result()
            if self._closing and not self._live:
                return None
            self._wake.clear()
            await self._wake.wait()
        response, size = pb.RunManyResponse(), 0
        while self._answers and size < limits.FRAME_BYTES:
            answer = self._answers.popleft()
            if isinstance(answer, StreamedRun):
                answer = _answer_of(answer)
            size += answer.ByteSize()
            response.answers.append(answer)
        return response


def _answer_of(run: StreamedRun) -> pb.RunAnswer:
    try:
        return pb.RunAnswer(number=run.number, response=run.response())
    except WaveppError as error:
        return convert.refusal_to_pb(run.number, error)
