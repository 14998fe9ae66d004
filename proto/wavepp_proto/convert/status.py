"""Typed errors on a gRPC status, and back (the tree is in `wavepp_proto/errors.py`).

A status carries google.rpc.ErrorInfo (reason, domain, fields) and, when a retry has a known time,
RetryInfo. A status without them comes from gRPC itself: its code alone decides the class.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from wavepp_proto import errors
from wavepp_proto.errors import WaveppError
from wavepp_proto.terms import ErrorInfo

DOMAIN: Final = "wavepp"
DETAILS_KEY: Final = "grpc-status-details-bin"
MAX_MESSAGE_CHARS: Final = 1024
"""Statuses travel as trailing metadata, which peers bound to 8 KiB: longer texts are cut."""
MAX_FIELD_CHARS: Final = 256

Trailers = tuple[tuple[str, str | bytes], ...]


def to_status(error: WaveppError) -> tuple[grpc.StatusCode, str, Trailers]:
    """Code, details and trailing metadata that carry `error` with its reason and fields."""
    message = _clip(error.message, MAX_MESSAGE_CHARS)
    fields = {name: _clip(value, MAX_FIELD_CHARS) for name, value in sorted(error.fields.items())}
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=fields))
    if error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        status.details.add().Pack(retry)
    made = rpc_status.to_status(status)
    return made.code, made.details, tuple(made.trailing_metadata)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: WaveppError) -> NoReturn:
    """End a call with `error`; raises what grpc.aio raises to leave the handler."""
    await context.abort(*to_status(error))


def error_from_rpc(
    rpc_error: grpc.RpcError, unavailable: type[WaveppError] = errors.ControllerUnavailable
) -> WaveppError:
    """The typed error of a failed call. `unavailable` is the class for a peer that cannot be reached.

    Takes a grpc.aio.AioRpcError or the sync RpcError that is also a call; never raises.
    """
    info = _error_info(rpc_error)
    if info is not None:
        return errors.from_info(info)
    code, details = _code(rpc_error), _details(rpc_error)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _SIZE_TEXT in details:
        return errors.MessageTooLarge(details)
    if code in _BROKEN:
        return unavailable(details or "the peer cannot be reached")
    cls = _BY_CODE.get(code)
    if cls is not None:
        return cls(details or code.name)
    return errors.InternalError(f"{code.name}: {details}" if details else code.name)


# gRPC answers a message beyond the limit with this code and text only: there is nothing typed to read.
_SIZE_TEXT: Final = "message larger than max"

# A peer of ours that fails internally says so with a reason, and one whose handler raises is UNKNOWN. INTERNAL
# alone is gRPC's: its asyncio client puts it over whatever ended a call when a write was under way at that moment.
# CANCELLED without a reason is gRPC's too: a server that stops drops calls so, before a handler sees them.
_BROKEN: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)

_BY_CODE: Final[dict[grpc.StatusCode, type[WaveppError]]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExpired,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
}


def _error_info(rpc_error: grpc.RpcError) -> ErrorInfo | None:
    """Our ErrorInfo among the trailers; None when there is none, it is another's, or it does not parse."""
    for key, value in _trailers(rpc_error):
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            return _info_of(status_pb2.Status.FromString(value))
        except DecodeError:
            return None
    return None


def _info_of(status: status_pb2.Status) -> ErrorInfo | None:
    reason: str | None = None
    fields: tuple[tuple[str, str], ...] = ()
    retry_after_ms: int | None = None
    detail: AnyMessage
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
            if info.domain == DOMAIN:
                reason, fields = info.reason, tuple(sorted(info.metadata.items()))
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo.FromString(detail.value)
            retry_after_ms = retry.retry_delay.ToMilliseconds()
    return None if reason is None else ErrorInfo(reason, status.message, fields, retry_after_ms)


def _trailers(rpc_error: grpc.RpcError) -> Trailers:
    read = getattr(rpc_error, "trailing_metadata", None)
    return tuple(read() or ()) if read is not None else ()


def _code(rpc_error: grpc.RpcError) -> grpc.StatusCode:
    read = getattr(rpc_error, "code", None)
    code = read() if read is not None else None
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN


def _details(rpc_error: grpc.RpcError) -> str:
    read = getattr(rpc_error, "details", None)
    return (read() or "") if read is not None else str(rpc_error)


def _clip(text: str, limit: int) -> str:
    """At most `limit` characters that UTF-8 can carry (a lone surrogate cannot be sent)."""
    return text[:limit].encode("utf-8", "replace").decode("utf-8")
