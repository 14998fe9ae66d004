"""Messages that several daemons are sent alike: rounds and waves, serialised once but for the fence.

Owns the bodies and how a fence, and announcements that ride with a round, are put around them. Encodings of one message
concatenate, so a body is the message without its fence. Called by the controller's runtime, whose calls take bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wavepp_proto.convert import common as c
from wavepp_proto.convert.admission import round_to_pb
from wavepp_proto.convert.execution import wave_request_to_pb
from wavepp_proto.convert.varint import varint
from wavepp_proto.terms import Epoch, Fence, Formation, Incarnation, Round, Row, WaveCommand
from wavepp_proto.v1 import admission_pb2, execution_pb2

ROUND_METHOD = "/wavepp.v1.StageAdmission/PinReserve"
WAVES_METHOD = "/wavepp.v1.StageExecution/RunWaves"
"""For calls that take their messages as bytes, as they are made here."""
_ANNOUNCES_TAG = bytes([admission_pb2.Round.ANNOUNCES_FIELD_NUMBER << 3 | 2])
_NO_FENCE = Fence(Epoch(0), Formation(0), Incarnation(0))


def round_body(round_: Round) -> bytes:
    """Everything but the fence."""
    out = round_to_pb(replace(round_, fence=_NO_FENCE))
    out.ClearField("fence")
    return out.SerializeToString()


def round_message(fence: Fence, body: bytes, parts: Sequence[bytes] = ()) -> bytes:
    """A serialised Round with `parts` (convert.announce_part) as its announcements, at most MAX_ANNOUNCE_FRAMES."""
    pieces = [admission_pb2.Round(fence=c.fence_to_pb(fence)).SerializeToString(), body]
    for part in parts:
        pieces += (_ANNOUNCES_TAG, varint(len(part)), part)
    return b"".join(pieces)


def wave_body(rows: tuple[Row, ...], limit_ms: int) -> bytes:
    """Everything but the fence."""
    out = wave_request_to_pb(WaveCommand(_NO_FENCE, rows, limit_ms))
    out.ClearField("fence")
    return out.SerializeToString()


def wave_message(fence: Fence, body: bytes) -> bytes:
    """A serialised WaveRequest; `fence` has the wave's ordinal."""
    return execution_pb2.WaveRequest(fence=c.fence_to_pb(fence)).SerializeToString() + body
