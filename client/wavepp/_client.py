"""The asyncio client: what a user of WavePP holds.

Owns the public methods and the life of the channel, the retry budget and the tracer. What happens to
one request is `_stream.py`, to many `_many.py`; what travels is `_wire.py`. `_sync.py` wraps it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from os import PathLike
from typing import Final, Self, TypedDict, TypeVar, Unpack

from wavepp import _request, errors
from wavepp._discovery import choose
from wavepp._many import in_completion_order
from wavepp._prompt import pack
from wavepp._retry import Retrier, RetryPolicy
from wavepp._security import check_tls
from wavepp._status import ClusterStatus
from wavepp._stream import PrefillStream, Shared
from wavepp._tokenizer import Tokenizers
from wavepp._types import Description, PrefillOutcome, PrefillResult, Prompt, RequestOptions, SharedOptions, Tokenizer
from wavepp._wire import Wire
from wavepp_proto import convert, limits
from wavepp_proto.runtime.channels import PLAIN_CLIENT, ClientSecurity, check_proxy, parse_address
from wavepp_proto.runtime.tracing import Tracer, TraceSettings

T = TypeVar("T")

SERVICE: Final = "wavepp-client"
DEFAULT_RETRY: Final = RetryPolicy()


class ClientOptions(TypedDict, total=False):
    """Settings of a client, explained at `AsyncClient`."""

    tls: ClientSecurity | None
    proxy: str | None
    tokenizer: str | PathLike[str] | Tokenizer | None
    deadline: float
    grace: float
    retry: RetryPolicy
    tracing: Tracer | TraceSettings | None


class AsyncClient:
    """A client of one controller, for one event loop; all requests share one channel.

    `async with wavepp.AsyncClient() as client: result = await client.prefill([1, 2, 3])`

    It connects when it is first used, and belongs to the event loop and process of that moment: anywhere else its
    methods raise InvalidRequest. Every method raises subclasses of `wavepp.WaveppError`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        tls: ClientSecurity | None = None,
        proxy: str | None = None,
        tokenizer: str | PathLike[str] | Tokenizer | None = None,
        deadline: float = limits.DEFAULT_DEADLINE_MS / 1000,
        grace: float = 0.5,
        retry: RetryPolicy = DEFAULT_RETRY,
        tracing: Tracer | TraceSettings | None = None,
    ) -> None:
        """
        `address`: host:port of the controller; None takes WAVEPP_CONTROLLER, else the only cluster that `wavepp up`
        runs here (InvalidRequest if there are several), else 127.0.0.1:7411.
        `tls`: PEM files, a CA at least; None = plain text.
        `proxy`: http://host:port on the way to the controller; None goes straight, whatever the environment names.
        `tokenizer`: model folder, tokenizer.json or object for text prompts; None asks the controller for its folder.
        `deadline`: seconds a request may take unless it says otherwise.
        `grace`: seconds past its deadline until the client stops waiting for the controller to end a request.
        `tracing`: where spans go; None takes OpenTelemetry's environment variables, without which nothing is exported.
        A Tracer stays the caller's to close.
        """
        self._address = address or choose().address
        self._security = check_tls(tls or PLAIN_CLIENT)
        self._proxy = None if proxy is None else check_proxy(proxy)
        self._deadline = _request.check_seconds("deadline", deadline)
        self._grace = _request.check_seconds("grace", grace)
        self._host = parse_address(self._address)
        self._retrier = Retrier(retry)
        self._tokenizers = Tokenizers(tokenizer, self.describe)
        self._owns_tracer = not isinstance(tracing, Tracer)
        self._tracer = tracing if isinstance(tracing, Tracer) else _tracer(tracing)
        self._wire: Wire | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End what is under way with Cancelled and close the channel. May be called again."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._wire is not None:
                await self._wire.close()
        finally:
            if self._owns_tracer:
                await asyncio.to_thread(self._tracer.close)

    async def prefill(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> PrefillResult:
        """Prefill one prompt and return its first token.

        `prompt` is text, token ids (a sequence or an integer array), or bytes of packed little-endian
        int32. Cancelling the task cancels the request on the controller. Nothing is told on the way, so a
        request whose connection breaks is sent again, as `retry` allows.
        """
        async with self.stream(prompt, **options) as stream:
            return await stream.result()

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> PrefillStream:
        """The same request as events: Queued, Admitted, Progress, Finished; a failure is raised.

        Checks everything that can be checked here at once; sends when the first event is asked for.
        """
        _request.check_names("prefill", options, RequestOptions)
        text = prompt if isinstance(prompt, str) else None
        if text == "":
            raise errors.EmptyPrompt("the prompt has no text", field="prompt", value=0, limit=1)
        if text is not None:
            _request.check_text("prompt", text)
        token_ids = _request.NO_TOKENS_YET if isinstance(prompt, str) else pack(prompt)
        request = _request.checked(token_ids, self._deadline, **options)
        shared = Shared(self._open(), self._retrier, self._tokenizers, self._tracer, self._host, self._grace)
        return PrefillStream(shared, request, text)

    def prefill_many(
        self, prompts: Iterable[Prompt], *, concurrency: int = 8, **options: Unpack[SharedOptions]
    ) -> AsyncGenerator[PrefillOutcome, None]:
        """Prefill `prompts`, `concurrency` at a time; one outcome each, in the order they complete.

        A prompt's error is the `error` of its outcome and stops no other. `deadline` counts for each
        from the moment it is begun. Leaving the iteration early cancels what is under way.
        """
        _request.check_names("prefill_many", options, SharedOptions)
        if concurrency < 1:
            message = f"concurrency must be at least 1, got {concurrency}"
            raise errors.InvalidRequest(message, field="concurrency", value=concurrency, limit=1)
        return in_completion_order(lambda prompt: self.prefill(prompt, **options), prompts, concurrency)

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request, of any client; its own caller gets `errors.Cancelled`. False: no such live request."""
        convert.check_request_id(_request.check_text("request_id", request_id))
        return await self._call(lambda wire: wire.cancel(request_id))

    async def describe(self, pipeline: str | None = None) -> Description:
        """Model, window and readiness of a pipeline; None asks for the controller's default one."""
        if pipeline is not None:
            convert.check_pipeline(_request.check_text("pipeline", pipeline))
        return await self._call(lambda wire: wire.describe(pipeline))

    async def status(self, *, requests: bool = False) -> ClusterStatus:
        """What the controller knows and does; `requests` lists every live request too. One try: a controller that is
        absent is ControllerUnavailable at once."""
        return await self._open().status(requests)

    async def _call(self, call: Callable[[Wire], Awaitable[T]]) -> T:
        """A call that changes nothing when repeated, retried within the client's own deadline."""
        wire = self._open()
        give_up_at = asyncio.get_running_loop().time() + self._deadline
        return await self._retrier.run(lambda: call(wire), give_up_at)

    def _open(self) -> Wire:
        # Here and not in __init__: a channel belongs to the event loop that runs when it is made.
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._wire is None:
            self._wire = Wire(self._address, self._security, self._proxy)
        self._wire.check_here()
        return self._wire


def _tracer(settings: TraceSettings | None) -> Tracer:
    return Tracer(settings or TraceSettings.from_environment(SERVICE))
