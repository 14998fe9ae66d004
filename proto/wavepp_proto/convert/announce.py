"""StageAdmission.Announce: a request described in frames, long before its round.

Owns the cutting of hashes and tokens into frames, the checks of one frame, and the packing of several
into one message. A part is a frame serialised without its fence: the same bytes for every daemon.
Putting frames together is the stage core's work: it knows which requests it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from wavepp_proto import limits
from wavepp_proto.convert import _check
from wavepp_proto.convert import common as c
from wavepp_proto.convert.varint import varint
from wavepp_proto.hashing import HASH_BYTES, TOKEN_BYTES
from wavepp_proto.terms import AnnounceAck, AnnounceFrame, Fence, HoldKey, Sampling, TraceContext
from wavepp_proto.v1 import admission_pb2 as pb

ANNOUNCE_METHOD = "/wavepp.v1.StageAdmission/Announce"
"""For a call that takes its messages as bytes, as `announce_message` makes them."""
_BEHIND_TAG = bytes([pb.AnnounceRequest.BEHIND_FIELD_NUMBER << 3 | 2])
"""Of a field that is a message: its length and its bytes follow."""


def announce_frames(
    fence: Fence,
    key: HoldKey,
    prompt_tokens: int,
    block_hashes: bytes,
    token_ids: bytes = b"",
    sampling: Sampling = Sampling(),
    trace: TraceContext = TraceContext(),
) -> Iterator[AnnounceFrame]:
    """One request in frames of at most FRAME_BYTES payload, at least one; the last says `last`.

    `block_hashes` is packed (32 bytes each), `token_ids` packed int32 or empty; hashes go first. The
    fence of frame i carries ordinal `fence.ordinal + i`.
    """
    hash_at = token_at = number = 0
    # Whole hashes only: a frame's last bytes go unused rather than split a hash or a token.
    room = limits.FRAME_BYTES // HASH_BYTES * HASH_BYTES
    while True:
        hashes = block_hashes[hash_at : hash_at + room]
        tokens = token_ids[token_at : token_at + room - len(hashes)]
        first_block, first_token = hash_at // HASH_BYTES, token_at // TOKEN_BYTES
        hash_at, token_at = hash_at + len(hashes), token_at + len(tokens)
        last = hash_at == len(block_hashes) and token_at == len(token_ids)
        yield AnnounceFrame(
            replace(fence, ordinal=fence.ordinal + number),
            key,
            prompt_tokens,
            first_block,
            hashes,
            first_token,
            tokens,
            last,
            sampling,
            trace,
        )
        if last:
            return
        number += 1


def announce_part(frame: AnnounceFrame) -> bytes:
    """`frame` without its fence."""
    return _unfenced(frame).SerializeToString()


def announce_message(fence: Fence, parts: Sequence[bytes]) -> bytes:
    """One serialised AnnounceRequest of at least one part, at most MAX_ANNOUNCE_FRAMES.

    Encodings of one message concatenate (the fence, the first part), and so do those of its fields.
    """
    pieces = [pb.AnnounceRequest(fence=c.fence_to_pb(fence)).SerializeToString(), parts[0]]
    for part in parts[1:]:
        pieces += (_BEHIND_TAG, varint(len(part)), part)
    return b"".join(pieces)


def round_announces_from_pb(msg: pb.Round) -> list[AnnounceFrame]:
    """What a round announces, under its fence. Raises as `announce_frames_from_pb` does."""
    announces = msg.announces
    if not announces:
        return []
    _check.present("fence", msg.HasField("fence"))
    _check.at_most("announces", len(announces), limits.MAX_ANNOUNCE_FRAMES)
    fence = c.fence_from_pb(msg.fence)
    return [_frame_from_pb(fence, part) for part in announces]


def announce_frame_to_pb(frame: AnnounceFrame) -> pb.AnnounceRequest:
    out = _unfenced(frame)
    c.fill_fence(out.fence, frame.fence)
    return out


def _unfenced(frame: AnnounceFrame) -> pb.AnnounceRequest:
    out = pb.AnnounceRequest(
        prompt_tokens=frame.prompt_tokens,
        first_block=frame.first_block,
        block_hashes=frame.block_hashes,
        first_token=frame.first_token,
        token_ids=frame.token_ids,
        last=frame.last,
    )
    c.fill_hold_key(out.key, frame.key)
    c.fill_sampling(out.sampling, frame.sampling)
    c.fill_trace(out.trace, frame.trace)
    return out


def announce_frames_from_pb(msg: pb.AnnounceRequest) -> tuple[AnnounceFrame, ...]:
    """Every frame of a message, in order. Raises as `announce_frame_from_pb` does, and on too many frames."""
    first = announce_frame_from_pb(msg)
    behind = msg.behind
    if not behind:
        return (first,)
    _check.at_most("announce frames", 1 + len(behind), limits.MAX_ANNOUNCE_FRAMES)
    return (first, *[_frame_from_pb(first.fence, part) for part in behind])


def announce_frame_from_pb(msg: pb.AnnounceRequest) -> AnnounceFrame:
    """The first frame. Raises InvalidRequest on a missing fence, broken packing or counts beyond the prompt."""
    _check.present("fence", msg.HasField("fence"))
    return _frame_from_pb(c.fence_from_pb(msg.fence), msg)


def _frame_from_pb(fence: Fence, msg: pb.AnnounceRequest) -> AnnounceFrame:
    hashes, tokens = msg.block_hashes, msg.token_ids
    _check.payload("announce frame", len(hashes) + len(tokens))
    prompt_tokens = _check.at_least("prompt_tokens", msg.prompt_tokens, 1)
    _check.at_most("prompt_tokens", prompt_tokens, limits.MAX_PROMPT_TOKENS)
    first_block, first_token = msg.first_block, msg.first_token
    blocks = len(_check.packed("block_hashes", hashes, HASH_BYTES)) // HASH_BYTES
    ids = len(_check.packed("token_ids", tokens, TOKEN_BYTES)) // TOKEN_BYTES
    # A block holds at least one token, so both counts are bounded by the prompt's length.
    _check.at_most("block_hashes", first_block + blocks, prompt_tokens)
    _check.at_most("token_ids", first_token + ids, prompt_tokens)
    return AnnounceFrame(
        fence,
        c.hold_key_from_pb(msg.key),
        prompt_tokens,
        first_block,
        hashes,
        first_token,
        tokens,
        msg.last,
        c.sampling_from_pb(msg.sampling),
        c.trace_from_pb(msg.trace),
    )


def announce_ack_to_pb(ack: AnnounceAck) -> pb.AnnounceResponse:
    out = pb.AnnounceResponse()
    c.fill_fence(out.fence, ack.fence)
    c.fill_hold_key(out.key, ack.key)
    for key in ack.behind:
        c.fill_hold_key(out.behind.add(), key)
    if ack.refused is not None:
        c.fill_error(out.refused, ack.refused)
    return out


def announce_ack_from_pb(msg: pb.AnnounceResponse) -> AnnounceAck:
    """Raises InvalidRequest when the fence is missing, or more keys come than a message has frames."""
    _check.present("fence", msg.HasField("fence"))
    _check.at_most("announce acks", 1 + len(msg.behind), limits.MAX_ANNOUNCE_FRAMES)
    behind = tuple([c.hold_key_from_pb(key) for key in msg.behind])
    refused = c.error_from_pb(msg.refused) if msg.HasField("refused") else None
    return AnnounceAck(c.fence_from_pb(msg.fence), c.hold_key_from_pb(msg.key), behind, refused)
