"""Prefill requests: the header, the frames of a prompt, and putting frames together again.

Owns what can be said of a request without knowing a model: sizes, ranges, lengths. A client runs the
same checks before it sends the first byte. Windows, vocabularies and pools are the controller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from wavepp_proto import limits
from wavepp_proto.convert import _check
from wavepp_proto.convert import common as c
from wavepp_proto.errors import EmptyPrompt, InvalidRequest, PromptTooLong
from wavepp_proto.hashing import TOKEN_BYTES
from wavepp_proto.terms import PipelineId, PrefillRequest
from wavepp_proto.v1 import prefill_pb2 as pb


def check_request(request: PrefillRequest) -> None:
    """Raise InvalidRequest, EmptyPrompt or PromptTooLong for a request that no controller could serve."""
    _check.packed("token_ids", request.token_ids, TOKEN_BYTES)
    _check_prompt_tokens(request.prompt_tokens)
    _check_header(request)


def check_pipeline(pipeline: str) -> PipelineId:
    """A pipeline's name as a request may give it, or InvalidRequest."""
    _check.present("pipeline", bool(pipeline))
    return PipelineId(_check.text("pipeline", pipeline))


def _check_header(request: PrefillRequest) -> None:
    c.request_id_checked(request.request_id)
    if request.pipeline is not None:
        check_pipeline(request.pipeline)
    if request.deadline_ms is not None:
        _check.at_most("deadline_ms", _check.at_least("deadline_ms", request.deadline_ms, 0), limits.MAX_DEADLINE_MS)
    priority = _check.at_least("priority", request.priority, limits.MIN_PRIORITY)
    _check.at_most("priority", priority, limits.MAX_PRIORITY)
    _check.text("cache_salt", request.cache_salt)
    _check.text("adapter", request.adapter)
    c.sampling_checked(request.sampling)


def _check_prompt_tokens(count: int) -> None:
    if not count:
        raise EmptyPrompt("the prompt has no tokens", field="prompt_tokens", value=0, limit=1)
    if count > limits.MAX_PROMPT_TOKENS:
        message = f"the prompt has {count} tokens, at most {limits.MAX_PROMPT_TOKENS}"
        raise PromptTooLong(message, field="prompt_tokens", value=count, limit=limits.MAX_PROMPT_TOKENS)


def prefill_header_to_pb(request: PrefillRequest) -> pb.PrefillHeader:
    """Everything of `request` but its tokens. Raises as `check_request` does."""
    check_request(request)
    out = pb.PrefillHeader(
        request_id=request.request_id,
        pipeline=request.pipeline or "",
        priority=request.priority,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        prompt_tokens=request.prompt_tokens,
    )
    if request.deadline_ms is not None:
        out.deadline_ms = request.deadline_ms
    c.fill_sampling(out.sampling, request.sampling)
    c.fill_trace(out.trace, request.trace)
    return out


def prefill_header_from_pb(msg: pb.PrefillHeader) -> PrefillRequest:
    """A request that still has no tokens; the header's `prompt_tokens` is checked here. Raises likewise."""
    pipeline = msg.pipeline
    request = PrefillRequest(
        request_id=c.request_id_checked(msg.request_id),
        token_ids=b"",
        pipeline=PipelineId(pipeline) if pipeline else None,
        deadline_ms=msg.deadline_ms if msg.HasField("deadline_ms") else None,
        priority=msg.priority,
        cache_salt=msg.cache_salt,
        adapter=msg.adapter,
        sampling=c.sampling_from_pb(msg.sampling),
        trace=c.trace_from_pb(msg.trace),
    )
    _check_header(request)
    _check_prompt_tokens(msg.prompt_tokens)
    return request


def submit_frames(request: PrefillRequest) -> Iterator[pb.SubmitRequest]:
    """`request` in frames of at most FRAME_BYTES token bytes: the header in the first, `last` on the last.

    Raises as `check_request` does, before the first frame.
    """
    header: pb.PrefillHeader | None = prefill_header_to_pb(request)
    tokens = request.token_ids
    for start in range(0, len(tokens), limits.FRAME_BYTES):
        end = start + limits.FRAME_BYTES
        yield pb.SubmitRequest(header=header, token_ids=tokens[start:end], last=end >= len(tokens))
        header = None


def run_request_to_pb(request: PrefillRequest) -> pb.RunRequest:
    """The unary form. Raises as `check_request` does, MessageTooLarge above FRAME_BYTES of tokens."""
    header = prefill_header_to_pb(request)
    _check.payload("token_ids", len(request.token_ids))
    return pb.RunRequest(header=header, token_ids=request.token_ids)


def run_request_from_pb(msg: pb.RunRequest) -> PrefillRequest:
    frame = pb.SubmitRequest(header=msg.header, token_ids=msg.token_ids, last=True)
    request = PromptAssembler().add(frame)
    assert request is not None  # the frame says that it is the last
    return request


class PromptAssembler:
    """Puts the frames of ONE Submit stream together; every size is checked before a byte is kept.

    After an error the stream is lost and the assembler must not be fed again.
    """

    def __init__(self) -> None:
        self._header: PrefillRequest | None = None
        self._expected_bytes = 0
        # One buffer: a prompt in frames of one token must not cost an object for each.
        self._kept = bytearray()

    @property
    def header(self) -> PrefillRequest | None:
        """The request without tokens, as soon as its first frame came."""
        return self._header

    def add(self, frame: pb.SubmitRequest) -> PrefillRequest | None:
        """The whole request when `frame` ends it, else None.

        Raises InvalidRequest, EmptyPrompt, PromptTooLong or MessageTooLarge naming the field.
        """
        header = self._take_header(frame)
        tokens = frame.token_ids
        _check.payload("token_ids", len(tokens))
        _check.packed("token_ids", tokens, TOKEN_BYTES)
        kept, expected = len(self._kept) + len(tokens), self._expected_bytes
        if kept > expected or (frame.last and kept < expected):
            came, said = kept // TOKEN_BYTES, expected // TOKEN_BYTES
            message = f"the header says {said} tokens, {came} came"
            raise InvalidRequest(message, field="prompt_tokens", value=came, limit=said)
        if frame.last and not self._kept:
            return replace(header, token_ids=tokens)
        self._kept += tokens
        return replace(header, token_ids=bytes(self._kept)) if frame.last else None

    def drop(self) -> None:
        """Forget the tokens; the header stays."""
        self._kept = bytearray()

    def _take_header(self, frame: pb.SubmitRequest) -> PrefillRequest:
        if self._header is None:
            _check.present("header", frame.HasField("header"))
            self._header = prefill_header_from_pb(frame.header)
            self._expected_bytes = frame.header.prompt_tokens * TOKEN_BYTES
        elif frame.HasField("header"):
            raise InvalidRequest("a second header came", field="header", value=frame.header.request_id)
        return self._header
