"""What a message of a malformed peer is measured against before it becomes a term.

Owns the refusals: each raises InvalidRequest (or the closer class) naming field, value and limit.
Called by the other modules of this package; outside it, `utf8` is `convert.check_utf8`. Rules that need state live in
the cores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest, MessageTooLarge

T = TypeVar("T")


def packed(field: str, data: bytes, unit: int) -> bytes:
    """`data` itself when its length is a multiple of `unit` bytes."""
    if len(data) % unit:
        message = f"{field} has {len(data)} bytes, not a multiple of {unit}"
        raise InvalidRequest(message, field=field, value=len(data), limit=unit)
    return data


def exactly(field: str, data: bytes, size: int) -> bytes:
    """`data` itself when it has `size` bytes."""
    if len(data) != size:
        raise InvalidRequest(
            f"{field} has {len(data)} bytes instead of {size}", field=field, value=len(data), limit=size
        )
    return data


def payload(field: str, size: int, limit: int = limits.FRAME_BYTES) -> None:
    """A frame's payload keeps to its size."""
    if size > limit:
        raise MessageTooLarge(f"{field} has {size} bytes, at most {limit}", field=field, value=size, limit=limit)


def at_most(field: str, value: int, limit: int) -> int:
    if value > limit:
        raise InvalidRequest(f"{field} is {value}, at most {limit}", field=field, value=value, limit=limit)
    return value


def at_least(field: str, value: int, limit: int) -> int:
    if value < limit:
        raise InvalidRequest(f"{field} is {value}, at least {limit}", field=field, value=value, limit=limit)
    return value


def finite(field: str, value: float) -> float:
    if not math.isfinite(value):
        raise InvalidRequest(f"{field} is {value}, not a finite number", field=field, value=value, limit="finite")
    return value


def text(field: str, value: str, limit: int = limits.MAX_NAME_CHARS) -> str:
    """A name of at most `limit` characters that UTF-8 can carry; may be empty."""
    if len(value) > limit:
        message = f"{field} has {len(value)} characters, at most {limit}"
        raise InvalidRequest(message, field=field, value=len(value), limit=limit)
    return utf8(field, value)


def utf8(field: str, value: str) -> str:
    """`value` itself. A lone surrogate, which stands for a byte that was no UTF-8, cannot be sent or hashed."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        found = ascii(value[error.start])
        message = f"{field} is not UTF-8: character {error.start} is {found}"
        raise InvalidRequest(message, field=field, value=found, index=error.start, limit="UTF-8") from None
    return value


def present(field: str, has: bool) -> None:
    if not has:
        raise InvalidRequest(f"{field} is missing", field=field)


def one_of(field: str, value: int, known: Mapping[int, T]) -> T:
    """The term of an enum number; a number this version does not know is refused, never guessed."""
    term = known.get(value)
    if term is None:
        message = f"{field} {value} is not known to protocol {limits.PROTOCOL_VERSION}"
        raise InvalidRequest(message, field=field, value=value, limit=len(known))
    return term
