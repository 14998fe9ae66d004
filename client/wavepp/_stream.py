"""One request from the caller's `prefill` or `stream` to its outcome.

Owns the order of things on the client: tokenize, send (again, where `_retry.py` says that it is
safe), read events until the outcome, stop waiting at deadline + grace, record the root span. Every
way out of a stream closes it, and a closed stream cancels the request on the controller.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Self

from wavepp._request import with_tokens
from wavepp._retry import Retrier
from wavepp._span import RUN, RUN_MANY, SUBMIT, outcome_facts, reason_of
from wavepp._tokenizer import Tokenizers, first_text, packed
from wavepp._types import PrefillResult, Tokenizer
from wavepp._wire import Event, Submission, Wire
from wavepp_proto import limits
from wavepp_proto.errors import Cancelled, DeadlineExpired, InternalError, from_info
from wavepp_proto.hashing import TOKEN_BYTES
from wavepp_proto.runtime import span_names as names
from wavepp_proto.runtime import trace_context
from wavepp_proto.runtime.channels import Address
from wavepp_proto.runtime.tracing import Tracer, ambient
from wavepp_proto.terms import Admitted, Failed, Finished, PipelineId, PrefillRequest, Queued


@dataclass(frozen=True, slots=True)
class Shared:
    """What all streams of one client use."""

    wire: Wire
    retrier: Retrier
    tokenizers: Tokenizers
    tracer: Tracer
    address: Address
    grace: float
    """Seconds past the deadline in which the controller may still say what happened."""


class PrefillStream:
    """Events of one request as they happen: Queued, Admitted, Progress, Finished; a failure is raised.

    An async iterator and an async context manager. Leaving either early cancels the request.
    """

    def __init__(self, shared: Shared, request: PrefillRequest, text: str | None) -> None:
        """`text` is the prompt if it must still be tokenized. The request's `deadline_ms` begins to run now."""
        assert request.deadline_ms is not None
        self._shared = shared
        self._request = request
        self._text = text
        self._began = asyncio.get_running_loop().time()
        self._began_ns = time.time_ns()
        self._deadline_at = self._began + request.deadline_ms / 1000
        self._parent = ambient()
        self._context = shared.tracer.child(self._parent) if self._parent.traceparent else shared.tracer.root()
        self._tokenizer: Tokenizer | None = None
        self._submission: Submission | None = None
        self._queued: Queued | None = None
        self._admitted: Admitted | None = None
        self._finished: Finished | None = None
        self._elapsed_ms = 0.0
        self._over = False
        self._method = SUBMIT

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, the same in every process that works on the request."""
        identity = trace_context.parse(self._context)
        return identity.trace_id if identity else ""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._over:
            raise StopAsyncIteration
        if self._finished is not None:
            await self._let_it_end()
            raise StopAsyncIteration
        self._shared.wire.check_here()
        try:
            event = await self._within_deadline()
        except BaseException as error:  # also CancelledError: who stops waiting cancels the request
            self._close(reason_of(error))
            raise
        self._take(event)
        return event

    async def result(self) -> PrefillResult:
        """Read on to the outcome and sum it up. Raises the typed error if the request failed.

        If no event was asked for before, none is sent: a prompt of one message then travels as one call.
        """
        if self._submission is None and not self._over:
            await self._run()
        async for _ in self:
            pass
        finished, admitted = self._finished, self._admitted
        if finished is None:
            raise Cancelled("the stream was closed before its outcome", request_id=self.request_id)
        if admitted is None:
            raise InternalError("the controller finished a request that it never admitted", request_id=self.request_id)
        return PrefillResult(
            request_id=self.request_id,
            pipeline=self._pipeline,
            first_token=finished.first_token,
            first_text=self._first_text(finished.first_token),
            prompt_tokens=finished.prompt_tokens,
            cached_tokens=finished.cached_tokens,
            endpoint=admitted.endpoint,
            candidate=admitted.candidate,
            limiting_stage=admitted.limiting_stage,
            best_stage_hit=admitted.best_stage_hit,
            lost_to_snapshots=admitted.lost_to_snapshots,
            shared_tokens=admitted.shared_tokens,
            rounds=admitted.rounds,
            attempt=finished.attempt,
            waves=finished.waves,
            timings=finished.timings,
            elapsed_ms=self._elapsed_ms,
            top_logprobs=finished.top_logprobs,
            logits_bytes=finished.logits,
            handoff=finished.handoff,
            trace_id=self.trace_id,
        )

    async def aclose(self) -> None:
        """Cancel the request if it has no outcome yet. May be called again."""
        self._close("" if self._finished else Cancelled.reason)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _run(self) -> None:
        """Ask for the outcome alone; does nothing if the prompt needs more than one message."""
        try:
            async with self._by_deadline():
                await self._tokenize()
                if len(self._request.token_ids) > limits.FRAME_BYTES:
                    return
                pipeline, self._admitted, outcome = await self._shared.retrier.run(self._call, self._deadline_at)
            self._request = replace(self._request, pipeline=pipeline)
            if isinstance(outcome, Failed):
                raise from_info(outcome.error)
        except BaseException as error:  # also CancelledError: who stops waiting cancels the request
            self._close(reason_of(error))
            raise
        self._take(outcome)
        self._close("")

    async def _within_deadline(self) -> Event:
        """The next event."""
        async with self._by_deadline():
            if self._submission is not None:
                return await self._submission.read()
            await self._tokenize()
            return await self._shared.retrier.run(self._send, self._deadline_at)

    @asynccontextmanager
    async def _by_deadline(self) -> AsyncIterator[None]:
        """DeadlineExpired shortly after the deadline even if the controller is silent."""
        try:
            async with asyncio.timeout_at(self._deadline_at + self._shared.grace):
                yield
        except TimeoutError:
            raise self._expired("no outcome by the deadline") from None

    async def _tokenize(self) -> None:
        if self._text is not None:
            self._tokenizer = await self._shared.tokenizers.of(self._request.pipeline)
            token_ids = await asyncio.to_thread(packed, self._tokenizer, self._text)
            self._request, self._text = with_tokens(self._request, token_ids), None

    async def _call(self) -> tuple[PipelineId, Admitted | None, Finished | Failed]:
        """One try of the whole request; an error that is raised says that it was not accepted."""
        request, wire = self._timed(), self._shared.wire
        self._method = RUN_MANY if wire.shares_stream(request) else RUN
        return await wire.run(request)

    async def _send(self) -> Event:
        """One try: a fresh stream, up to its first event."""
        if self._submission is not None:
            self._submission.cancel()
        self._submission = self._shared.wire.submit(self._timed())
        return await self._submission.read()

    def _timed(self) -> PrefillRequest:
        """The request with the time that is left now."""
        left = self._deadline_at - asyncio.get_running_loop().time()
        if left <= 0:
            raise self._expired("the deadline passed before the request could be sent")
        return replace(self._request, deadline_ms=math.ceil(left * 1000), trace=self._context)

    def _take(self, event: Event) -> None:
        match event:
            case Queued():
                self._queued = event
            case Admitted():
                self._admitted = event
            case Finished():
                self._finished = event
                self._elapsed_ms = 1000 * (asyncio.get_running_loop().time() - self._began)
                self._record("")

    async def _let_it_end(self) -> None:
        """After the outcome: let the controller close the stream itself, so that it sees no cancellation."""
        assert self._submission is not None
        try:
            async with asyncio.timeout(self._shared.grace):
                await self._submission.read_end()
        except TimeoutError:
            pass  # it keeps a finished stream open; closing it is all that is left to do
        finally:
            self._close("")

    def _close(self, error: str) -> None:
        """Close the stream, which cancels a request without outcome; `error` is the reason, for the span."""
        if self._over:
            return
        self._over = True
        if self._submission is not None:
            self._submission.cancel()
        if self._finished is None:
            self._record(error)

    def _expired(self, message: str) -> DeadlineExpired:
        return DeadlineExpired(
            message, field="deadline_ms", value=self._request.deadline_ms, request_id=self.request_id
        )

    def _record(self, error: str) -> None:
        """The trace's root span, unless nobody would get it."""
        tracer, began, own, parent = self._shared.tracer, self._began_ns, self._context, self._parent
        if tracer.recording:
            pipeline, address = self._pipeline, self._shared.address
            facts = outcome_facts(self._request, pipeline, self._admitted, self._finished, self._method, address)
            now = time.time_ns()
            tracer.record(
                names.PREFILL, began, now, own=own, parent=parent, attributes=facts, kind=names.CLIENT, error=error
            )

    @property
    def _pipeline(self) -> str:
        return self._queued.pipeline if self._queued else self._request.pipeline or ""

    def _first_text(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        last = int.from_bytes(self._request.token_ids[-TOKEN_BYTES:], "little")
        return first_text(self._tokenizer, last, token)
