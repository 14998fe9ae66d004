"""Listening to the digests of one formation (DESIGN.md).

Owns when a fresh snapshot is asked for: once after a gap or mismatch, and again only if none makes
progress. What a digest says goes into the `index`; a daemon that is out of step counts as empty there.
"""

from __future__ import annotations

from wavepp_controller.core.events import DigestExcess, WatchAgain
from wavepp_controller.core.formation import Daemon, PipelineFormation
from wavepp_controller.core.index import ReuseIndex
from wavepp_controller.core.outbox import Outbox
from wavepp_proto.digest import Verdict
from wavepp_proto.terms import CacheGroup, Digest

RESYNC_S = 1.0
"""Pause before a snapshot that makes no progress is asked for again."""
MOST_EXCESSES = 6
"""Each digest in a row that tells of too much doubles that pause, up to 64 s."""


def attach(index: ReuseIndex, formation: PipelineFormation) -> None:
    """Begin with every daemon empty: a formation's streams open with a snapshot each."""
    for key, daemon in formation.daemons.items():
        index.attach(key, daemon.record.incarnation, daemon.most_indexed, groups_of(daemon))


def groups_of(daemon: Daemon) -> tuple[CacheGroup, ...]:
    """Cache groups of its band: as it said when it joined, until then as planned."""
    return daemon.plan.groups if daemon.reply is None else daemon.reply.groups


def joined(index: ReuseIndex, daemon: Daemon) -> None:
    """The daemon has said what it made, which may be more or other than was planned."""
    index.reshape(daemon.key, daemon.most_indexed, groups_of(daemon))


def expect(index: ReuseIndex, formation: PipelineFormation, now: float) -> None:
    """The formation serves: a first snapshot that does not come is asked for in a while."""
    for daemon in formation.daemons.values():
        if not index.in_sync(daemon.key):
            daemon.snapshot_due = now + RESYNC_S


def read(index: ReuseIndex, daemon: Daemon, digest: Digest, now: float, out: Outbox) -> None:
    daemon.digest_at = now
    daemon.has(digest.capacity)
    match index.apply(daemon.key, digest):
        case Verdict.RESYNC:
            out.count("digest_resyncs")
            _note_excess(index, daemon, now, out)
            _ask(daemon, now, out)
        case Verdict.MORE:
            daemon.snapshot_due = now + RESYNC_S
        case Verdict.REPLACE:
            daemon.snapshot_due, daemon.excesses = None, 0
        case Verdict.APPLY | Verdict.IGNORE:
            pass


def tick(formation: PipelineFormation, now: float, out: Outbox) -> None:
    for daemon in formation.daemons.values():
        if daemon.snapshot_due is not None:
            _ask(daemon, now, out)


def resume(index: ReuseIndex, daemon: Daemon, now: float, out: Outbox) -> None:
    """The daemon's streams were opened again: listen from where they broke, or to a fresh snapshot."""
    seq = index.seq_of(daemon.key)
    daemon.snapshot_due = None if seq else now + RESYNC_S
    out.send(WatchAgain(daemon.key, daemon.fence(), seq))


def _note_excess(index: ReuseIndex, daemon: Daemon, now: float, out: Outbox) -> None:
    """A digest of more than fits the pools is a fault of the daemon: told with numbers, and asked again ever later."""
    told = index.excess(daemon.key)
    if told is None:
        return
    out.count("digest_excesses")
    out.send(DigestExcess(daemon.key, told, daemon.most_indexed))
    daemon.snapshot_due = now + RESYNC_S * 2 ** min(daemon.excesses, MOST_EXCESSES)
    daemon.excesses += 1


def _ask(daemon: Daemon, now: float, out: Outbox) -> None:
    """Ask unless a snapshot is on its way; without open streams there is none to ask on."""
    closed = daemon.reply is None or daemon.streams.reconnecting
    if closed or (daemon.snapshot_due is not None and now < daemon.snapshot_due):
        return
    daemon.snapshot_due = now + RESYNC_S
    out.send(WatchAgain(daemon.key, daemon.fence()))
