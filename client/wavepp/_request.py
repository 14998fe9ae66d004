"""One request's options, checked before anything is sent.

Owns the defaults of `RequestOptions` and the client's own rules: seconds, and types that protobuf
would refuse without naming a field. The rules of the wire are `convert.check_request`, the prompt's
form is `_prompt.py`; vocabulary, window and pool sizes are the controller's to judge.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable
from dataclasses import fields, replace
from numbers import Real

from wavepp._types import RequestOptions, SharedOptions
from wavepp_proto import convert, limits
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.terms import PipelineId, PrefillRequest, RequestId, Sampling

NO_TOKENS_YET = bytes(4)
"""Stands for a prompt that is still text: the other fields are judged before it is tokenized."""


def checked(
    token_ids: bytes,
    default_deadline: float,
    *,
    pipeline: str | None = None,
    deadline: float | None = None,
    priority: int = 0,
    cache_salt: str = "",
    adapter: str = "",
    sampling: Sampling = Sampling(),
    request_id: str | None = None,
) -> PrefillRequest:
    """A request without trace, `deadline_ms` counted from now. The keywords are those of `RequestOptions`."""
    seconds = default_deadline if deadline is None else check_seconds("deadline", deadline)
    names = (("pipeline", pipeline or ""), ("request_id", request_id or ""))
    for field, text in (*names, ("cache_salt", cache_salt), ("adapter", adapter)):
        check_text(field, text)
    given: object = sampling  # annotations bind nobody who calls
    if not isinstance(given, Sampling):
        message = f"sampling must be wavepp.Sampling(...), got {sampling!r}"
        raise InvalidRequest(message, field="sampling", value=repr(sampling))
    for field, number, kind, called in (
        ("priority", priority, int, "an integer"),
        ("sampling.seed", sampling.seed, int, "an integer"),
        ("sampling.top_logprobs", sampling.top_logprobs, int, "an integer"),
        ("sampling.temperature", sampling.temperature, Real, "a number"),
        ("sampling.full_logits", sampling.full_logits, int, "true or false"),
    ):
        if not isinstance(number, kind):
            raise InvalidRequest(f"{field} must be {called}, got {number!r}", field=field, value=repr(number))
    request = PrefillRequest(
        request_id=RequestId(uuid.uuid4().hex if request_id is None else request_id),
        token_ids=token_ids,
        pipeline=None if pipeline is None else PipelineId(pipeline),
        deadline_ms=math.ceil(seconds * 1000),
        priority=priority,
        cache_salt=cache_salt,
        adapter=adapter,
        sampling=sampling,
    )
    convert.check_request(request)
    return request


def check_names(call: str, given: Iterable[str], options: type[SharedOptions | RequestOptions]) -> None:
    """Raise TypeError, as Python does for a keyword that nobody knows, but with those that `call` knows."""
    known = set(options.__annotations__)
    unknown = ", ".join(repr(name) for name in given if name not in known)
    if unknown:
        others = ", ".join(sorted(known - {"sampling"}))
        choosing = ", ".join(field.name for field in fields(Sampling))
        sampling = f"sampling=wavepp.Sampling(...), which takes {choosing}"
        raise TypeError(f"{call}() has no option {unknown}; it has {others} and {sampling}")


def check_text(field: str, value: object) -> str:
    """`value` itself. Raises InvalidRequest naming `field` unless it is text that can be sent."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} must be text, got {value!r}", field=field, value=repr(value))
    return convert.check_utf8(field, value)


def with_tokens(request: PrefillRequest, token_ids: bytes) -> PrefillRequest:
    """The request once its text became tokens."""
    return replace(request, token_ids=token_ids)


def check_seconds(field: str, value: float) -> float:
    """A finite number of seconds in (0, one day]; raises InvalidRequest naming `field`."""
    longest = limits.MAX_DEADLINE_MS / 1000
    try:
        fits = 0 < value <= longest  # NaN does not
    except TypeError:
        fits = False
    if not fits:
        message = f"{field} must be over 0 and at most {longest:g} seconds, got {value!r}"
        raise InvalidRequest(message, field=field, value=repr(value), limit=longest)
    return float(value)
