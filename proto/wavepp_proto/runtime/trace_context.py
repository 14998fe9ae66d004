"""W3C trace context: parse, format, and make ids. Pure apart from the randomness of ids.

Owns the text form of a `TraceContext` and one convention on top of it: a process that exports no
spans but starts a trace marks its context `wavepp=deferred` in the tracestate. The id is then
known from the first log line on, while the first process that does export makes the root span and
the sampling decision, so nobody's parent is a span that was never sent. Called by `tracing.py`.
"""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

from wavepp_proto.terms import TraceContext

_TRACEPARENT: Final = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})(?P<span>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_TRACESTATE_MEMBER: Final = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,256}")
_TRACEPARENT_CHARS: Final = 55
_MAX_TRACESTATE_CHARS: Final = 512
_MAX_TRACESTATE_MEMBERS: Final = 32
_ODD: Final = frozenset("13579bdf")
_DEFERRED: Final = "wavepp=deferred"


class SpanIdentity(NamedTuple):
    """A traceparent taken apart. Ids are lower-case hexadecimal (32 and 16 characters)."""

    trace_id: str
    span_id: str
    sampled: bool


def parse(context: TraceContext) -> SpanIdentity | None:
    """None if the traceparent breaks the W3C grammar, names an all-zero id or version ff."""
    match = _TRACEPARENT.fullmatch(context.traceparent)
    if match is None or (match["version"] == "00" and match["rest"] is not None):
        return None
    return SpanIdentity(match["trace"], match["span"], match["flags"][1] in _ODD)


def make(trace_id: str, span_id: str, sampled: bool, tracestate: str = "") -> TraceContext:
    """A context of version 00; of the flags only `sampled` is carried."""
    return TraceContext(f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}", tracestate)


def is_sampled(context: TraceContext) -> bool:
    """Cheap enough for the executor: looks at the flag only; `parse` judges the rest later."""
    parent = context.traceparent
    return len(parent) >= _TRACEPARENT_CHARS and parent[_TRACEPARENT_CHARS - 1] in _ODD


def is_deferred(context: TraceContext) -> bool:
    """True if no span with this context's id will ever be exported."""
    return bool(context.tracestate) and _DEFERRED in context.tracestate.split(",")


def defer(trace_id: str, span_id: str, forced: bool) -> TraceContext:
    """A root made where nothing is exported; `forced` asks whoever exports to sample it."""
    return make(trace_id, span_id, forced, _DEFERRED)


def clean_tracestate(tracestate: str) -> str:
    """The tracestate to pass on: without our marker, or empty if it breaks the W3C grammar."""
    if not tracestate:
        return ""
    members = [member.strip(" \t") for member in tracestate.split(",")]
    members = [member for member in members if member and member != _DEFERRED]
    too_much = len(tracestate) > _MAX_TRACESTATE_CHARS or len(members) > _MAX_TRACESTATE_MEMBERS
    if too_much or any(_TRACESTATE_MEMBER.fullmatch(member) is None for member in members):
        return ""
    return ",".join(members)


def new_trace_id() -> str:
    return os.urandom(16).hex()


def new_span_id() -> str:
    return os.urandom(8).hex()
