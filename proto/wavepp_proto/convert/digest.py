"""StageDigest: what a stage holds, as packed short hashes.

Owns the shape of one message; order, gaps and checksums are the cursor's (`wavepp_proto/digest.py`).
"""

from __future__ import annotations

from wavepp_proto.convert import _check
from wavepp_proto.convert import common as c
from wavepp_proto.hashing import SHORT_BYTES
from wavepp_proto.terms import Digest, DigestKind, Fence, GroupDigest, Incarnation
from wavepp_proto.v1 import digest_pb2 as pb

_KIND_TO_PB = {DigestKind.SNAPSHOT: pb.DIGEST_KIND_SNAPSHOT, DigestKind.DELTA: pb.DIGEST_KIND_DELTA}
_KIND_FROM_PB: dict[int, DigestKind] = {number: kind for kind, number in _KIND_TO_PB.items()}


def watch_digest_to_pb(fence: Fence, from_seq: int) -> pb.WatchDigestRequest:
    """`from_seq` is the last seq applied; 0 asks for a snapshot."""
    return pb.WatchDigestRequest(fence=c.fence_to_pb(fence), from_seq=from_seq)


def watch_digest_from_pb(msg: pb.WatchDigestRequest) -> tuple[Fence, int]:
    _check.present("fence", msg.HasField("fence"))
    return c.fence_from_pb(msg.fence), msg.from_seq


def digest_to_pb(term: Digest) -> pb.Digest:
    out = pb.Digest(
        incarnation=term.incarnation,
        seq=term.seq,
        kind=_KIND_TO_PB[term.kind],
        page=term.page,
        last_page=term.last_page,
    )
    c.fill_capacity(out.capacity, term.capacity)
    for group in term.groups:
        out.groups.add(
            group=c.GROUP_TO_PB[group.group],
            added=group.added,
            removed=group.removed,
            count=group.count,
            checksum=group.checksum,
        )
    return out


def digest_from_pb(msg: pb.Digest) -> Digest:
    """Raises InvalidRequest on an unknown kind or group, broken packing or a missing capacity.

    One delta may drop a whole subtree, so the bound is a frame's bytes, not MAX_DIGEST_HASHES.
    """
    _check.present("capacity", msg.HasField("capacity"))
    groups = tuple([_group_digest_from_pb(group) for group in msg.groups])
    _check.payload("digest", sum(len(group.added) + len(group.removed) for group in groups))
    return Digest(
        Incarnation(msg.incarnation),
        msg.seq,
        _check.one_of("kind", msg.kind, _KIND_FROM_PB),
        groups,
        c.capacity_from_pb(msg.capacity),
        msg.page,
        msg.last_page,
    )


def _group_digest_from_pb(msg: pb.GroupDigest) -> GroupDigest:
    added, removed = msg.added, msg.removed
    return GroupDigest(
        c.group_from_pb(msg.group),
        _check.packed("added", added, SHORT_BYTES),
        _check.packed("removed", removed, SHORT_BYTES),
        msg.count,
        msg.checksum,
    )
