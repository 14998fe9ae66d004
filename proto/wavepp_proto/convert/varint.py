"""The one encoding of protobuf that we write ourselves: lengths in front of serialised parts.

Owns nothing else. Called where messages are put together from bytes: `announce` and `shared`.
"""

from __future__ import annotations


def varint(number: int) -> bytes:
    """A number >= 0, seven bits a byte, the least first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
