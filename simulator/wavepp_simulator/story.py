"""The story of one history: every message and decision, told in lines of equal wording.

Owns the log and the words. Entries are kept as they were heard and put into words only when somebody
reads them, so that exploring thousands of histories costs no formatting. Equal seeds give equal bytes.

A line: virtual milliseconds, who (c = controller, s1 = stage 1, client, world), what.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from wavepp_controller.core import events as ev
from wavepp_proto.fence import NO_EPOCH, NO_FORMATION
from wavepp_proto.terms import (
    Admitted,
    Capacity,
    DaemonKey,
    Digest,
    ErrorInfo,
    Failed,
    Fence,
    Finished,
    Incarnation,
    PrefillEvent,
    Progress,
    Queued,
    Round,
    Row,
    Vote,
    VoteOutcome,
    WaveReport,
)

Told = ev.Event | ev.Action | PrefillEvent | str
USUAL = frozenset({"client", "formation", "fault", "round", "votes", "wave", "void", "stage", "network"})
"""What a scenario shows unless it asks for more or less."""
KINDS = USUAL | {"admission", "announce", "digest", "report", "beat", "member", "progress", "tick", "inventory", "copy"}
_NO_FENCE = Fence(NO_EPOCH, NO_FORMATION, Incarnation(0))


@dataclass(frozen=True, slots=True)
class Entry:
    at: float
    who: str
    kind: str
    told: Told


class Story:
    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def note(self, at: float, who: str, kind: str, told: Told) -> None:
        self.entries.append(Entry(at, who, kind, told))

    def heard(self, at: float, event: ev.Event) -> None:
        """What a controller hears, clients and its own clock apart."""
        kind = _HEARD.get(type(event))
        if kind is None:
            return
        if isinstance(event, ev.ReportArrived) and (event.report.faults or not event.report.done):
            kind = "void"
        if isinstance(event, ev.VotesArrived) and not event.votes.votes:
            kind = "report"
        key = getattr(event, "key", None)
        self.note(at, f"s{key.short}>c" if isinstance(key, DaemonKey) else "c", kind, event)

    def decided(self, at: float, actions: Iterable[ev.Action]) -> None:
        """What a controller does; rounds that say the same to several daemons are one line."""
        rounds: dict[Round, list[str]] = {}
        for action in actions:
            if isinstance(action, ev.SendRound):
                same = replace(action.round, fence=replace(_NO_FENCE, ordinal=action.round.fence.ordinal))
                rounds.setdefault(same, []).append(f"s{action.key.short}")
            elif (kind := _DECIDED.get(type(action))) is not None:
                self.note(at, "c", kind, action)
        for asked, places in rounds.items():
            self.note(at, "c>" + ",".join(places), "round", _round(asked))

    def lines(self, start: int = 0, kinds: frozenset[str] = USUAL) -> Iterator[str]:
        """From entry number `start` on."""
        for entry in self.entries[start:]:
            if entry.kind in kinds:
                yield f"{entry.at * 1e3:11.3f}  {entry.who:<11} {words(entry.told)}"


_HEARD = {
    ev.LeadershipWon: "formation",
    ev.LeadershipLost: "formation",
    ev.MemberUp: "member",
    ev.MemberGone: "member",
    ev.Joined: "member",
    ev.JoinFailed: "formation",
    ev.StreamLost: "formation",
    ev.StreamsReopened: "formation",
    ev.InventoryArrived: "inventory",
    ev.AnnounceAcked: "announce",
    ev.AnnounceRides: "announce",
    ev.VotesArrived: "votes",
    ev.DigestArrived: "digest",
    ev.ReportArrived: "report",
    ev.BeatArrived: "beat",
    ev.Tick: "tick",
}
_DECIDED = {
    ev.FormPipeline: "formation",
    ev.EndFormation: "formation",
    ev.AnnounceRequest: "announce",
    ev.SendWave: "wave",
    ev.WatchAgain: "digest",
    ev.ReopenStreams: "formation",
    ev.AskInventory: "inventory",
}


def words(told: Told) -> str:
    """One line."""
    match told:
        case str():
            return told
        case Queued() | Admitted() | Progress() | Finished() | Failed():
            return _outcome(told)
        case ev.SendWave(ordinal=ordinal, rows=rows):
            return f"wave {ordinal}: " + " ".join(_row(row) for row in rows)
        case ev.FormPipeline(formation=formation, plans=plans):
            return f"forms formation {formation} of stages " + " ".join(
                f"{plan.key.short}#{plan.fence.incarnation}" for plan in plans
            )
        case ev.EndFormation(formation=formation, cause=cause):
            return f"ends formation {formation}: {_error(cause)}"
        case ev.AnnounceRequest(key=key):
            return f"announces {key.request_id}.{key.attempt}"
        case ev.WatchAgain(key, _, from_seq):
            what = f"digests after {from_seq}" if from_seq else "a snapshot"
            return f"asks stage {key.short} for {what}"
        case ev.ReopenStreams(key, _, reported):
            return f"opens the streams to stage {key.short} again, reports up to wave {reported} are known"
        case ev.AskInventory(key, _):
            return f"asks stage {key.short} what it holds"
        case ev.VotesArrived(votes=votes):
            told_votes = "; ".join(_vote(vote) for vote in votes.votes) or "-"
            return f"votes {votes.fence.ordinal}: {told_votes} | {_room(votes.capacity)}"
        case ev.ReportArrived(report=report):
            return _report(report)
        case ev.DigestArrived(digest=digest):
            return _digest(digest)
        case _:
            return _plain(told)


def _plain(told: Told) -> str:
    match told:
        case ev.LeadershipWon(epoch=epoch):
            return f"leads, epoch {epoch}"
        case ev.LeadershipLost():
            return "leads no longer"
        case ev.MemberUp(record=record):
            return f"member up: stage {record.key.short}#{record.incarnation}, {record.pool_blocks} blocks"
        case ev.MemberGone(key=key, incarnation=incarnation):
            return f"member gone: stage {key.short}#{incarnation}"
        case ev.StreamsReopened():
            return "streams are open again"
        case ev.InventoryArrived(inventory=inventory):
            return f"lists {len(inventory.holds)} holds, {len(inventory.announced)} announcements"
        case ev.Joined(formation=formation):
            return f"joined formation {formation}"
        case ev.JoinFailed(formation=formation, error=error) | ev.StreamLost(formation=formation, error=error):
            what = "did not join" if isinstance(told, ev.JoinFailed) else "lost in"
            return f"{what} formation {formation}: {_error(error)}"
        case ev.AnnounceAcked(ack=ack):
            what = "knows" if ack.refused is None else f"refuses, {ack.refused.reason},"
            return f"{what} {ack.key.request_id}.{ack.key.attempt}"
        case ev.AnnounceRides(key=key):
            return f"{key.request_id}.{key.attempt} rides in front of the next round"
        case ev.BeatArrived(beat=beat):
            return f"beat {beat.count}" + (", draining" if beat.draining else "")
        case _:
            return type(told).__name__


def _outcome(event: PrefillEvent) -> str:
    match event:
        case Queued(position=position):
            text = f"queued behind {position}"
        case Admitted():
            text = f"admitted at {event.endpoint}, hinted {event.candidate}, rounds {event.rounds}"
            if event.limiting_stage is not None:
                text += f", limited by stage {event.limiting_stage} (another holds {event.best_stage_hit})"
        case Progress():
            text = f"computed {event.computed_tokens} of {event.prompt_tokens}"
        case Finished():
            text = f"finished: {event.cached_tokens} of {event.prompt_tokens} tokens cached, waves {event.waves}"
        case Failed(error=error):
            text = f"failed {_error(error)}"
    return f"{event.request_id} {text}"


def _error(error: ErrorInfo) -> str:
    return f"{error.reason}, {error.message}"


def _round(asked: Round) -> str:
    parts = []
    for release in asked.releases:
        after = f" after wave {release.after_wave}" if release.after_wave is not None else ""
        parts.append(f"release {_name(release)}{after}" + (" (ended)" if release.ended else ""))
    parts += [f"revise {_name(revise)} to {revise.endpoint}" for revise in asked.revises]
    parts += [f"prepare {_name(prepare)} at {prepare.candidate}" for prepare in asked.prepares]
    return f"round {asked.fence.ordinal}: " + ", ".join(parts)


def _name(entry: object) -> str:
    """The request, with its attempt from the second one on."""
    key = entry.key  # type: ignore[attr-defined]
    return key.request_id if key.attempt == 1 else f"{key.request_id}.{key.attempt}"


def _vote(vote: Vote) -> str:
    text = f"{_name(vote)} {vote.outcome.value}"
    if vote.outcome is VoteOutcome.NO_CAPACITY:
        return text + f" by {sum(short.blocks for short in vote.shortfall)}"
    if vote.outcome in (VoteOutcome.COMMITTED, VoteOutcome.LOWER):
        text += f" at {vote.endpoint} of {vote.own_hit}, needs {vote.demand_blocks}"
    return text


def _room(capacity: Capacity) -> str:
    return f"free {capacity.free_blocks} cached {capacity.evictable_blocks} promised {capacity.escrowed_blocks}"


def _row(row: Row) -> str:
    return f"{_name(row)}[{row.start},{row.start + row.length})" + ("." if row.final else "")


def _report(report: WaveReport) -> str:
    if not report.done:
        cause = _error(report.error) if report.error is not None else "no cause"
        return f"wave {report.fence.ordinal} failed: {cause}"
    void = f" void {report.void_bitmap:b}" if report.void_bitmap else ""
    faults = "".join(f", row {fault.row}: {fault.error.message}" for fault in report.faults)
    return f"wave {report.fence.ordinal} done{void}{faults}"


def _digest(digest: Digest) -> str:
    added, removed = (sum(len(getattr(group, name)) // 8 for group in digest.groups) for name in ("added", "removed"))
    return f"digest {digest.seq} {digest.kind.value}: +{added} -{removed} | {_room(digest.capacity)}"
