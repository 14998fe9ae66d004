"""Rounds on the wire: numbering, the one that is open, and matching votes to it (DESIGN.md).

Owns round ordinals (per daemon, growing for the life of an epoch), the rounds that are unanswered, which are
sent again when a daemon's streams were opened again, and the open prepare/revise round with its votes. Does not
own what goes into a round or what follows from it: `admission` does. A round that only releases takes an ordinal
too, and its empty votes come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from wavepp_controller.core.events import SendRound
from wavepp_controller.core.formation import Daemon
from wavepp_controller.core.request import Request
from wavepp_proto.errors import InternalError
from wavepp_proto.terms import (
    Capacity,
    DaemonKey,
    HoldKey,
    Prepare,
    Release,
    Revise,
    Round,
    RoundOrdinal,
    Vote,
    Votes,
)

MOST_UNANSWERED = 32
"""Rounds that one daemon has not answered; it remembers the votes of at least as many."""


@dataclass(slots=True)
class Entries:
    """What one daemon is asked in one round."""

    revises: list[Revise] = field(default_factory=list)
    prepares: list[Prepare] = field(default_factory=list)

    def keys(self) -> list[HoldKey]:
        return [*(entry.key for entry in self.revises), *(entry.key for entry in self.prepares)]


@dataclass(slots=True)
class Answer:
    """Votes of one daemon in the open round."""

    votes: dict[HoldKey, Vote]
    capacity: Capacity
    at: float


@dataclass(slots=True)
class OpenRound:
    requests: list[Request]
    """In the order of their entries: revises, then prepares."""
    asked: dict[DaemonKey, list[HoldKey]]
    ordinals: dict[DaemonKey, RoundOrdinal]
    started: float
    deadline: float
    answers: dict[DaemonKey, Answer] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.answers) == len(self.asked)

    @property
    def silent(self) -> list[DaemonKey]:
        return [key for key in self.asked if key not in self.answers]

    def votes_on(self, key: HoldKey) -> dict[DaemonKey, Vote]:
        return {daemon: answer.votes[key] for daemon, answer in self.answers.items() if key in answer.votes}


@dataclass(slots=True)
class RoundBook:
    daemons: Mapping[DaemonKey, Daemon]
    deadline_s: float
    next_ordinals: dict[DaemonKey, RoundOrdinal]
    """The next ordinal of each daemon."""
    open: OpenRound | None = None
    _sent: dict[DaemonKey, RoundOrdinal] = field(default_factory=dict)
    """Last ordinals sent in this formation."""
    _answered: dict[DaemonKey, RoundOrdinal] = field(default_factory=dict)
    _unanswered: dict[DaemonKey, deque[SendRound]] = field(default_factory=dict)
    """In order. A daemon applies in order, so votes answer every round up to theirs."""
    _waited_since: dict[DaemonKey, float] = field(default_factory=dict)
    """Since when each daemon has owed votes without giving any."""

    @property
    def full(self) -> bool:
        """Some daemon owes votes on so many rounds that more must wait, and go together."""
        return any(len(owed) >= MOST_UNANSWERED for owed in self._unanswered.values())

    def sent(self, key: DaemonKey) -> RoundOrdinal:
        """The last round sent in this formation; 0 before the first."""
        return self._sent.get(key, RoundOrdinal(0))

    def answered(self, key: DaemonKey) -> RoundOrdinal:
        """The last round answered in this formation; 0 before the first."""
        return self._answered.get(key, RoundOrdinal(0))

    def again(self, key: DaemonKey, now: float) -> list[SendRound]:
        """Everything the daemon has not answered, in order: what it applied before, it answers alike."""
        owed = self._unanswered.get(key)
        if not owed:
            return []
        self._waited_since[key] = now
        return list(owed)

    def excuse(self, now: float) -> None:
        """The controller itself was not listening: nobody owes votes since before."""
        self._waited_since = dict.fromkeys(self._waited_since, now)

    def overdue(self, patience_s: float, now: float) -> list[DaemonKey]:
        """Daemons that have owed votes for longer: a message was lost on the way."""
        return [key for key, since in self._waited_since.items() if now - since > patience_s]

    def begin(
        self, requests: list[Request], entries: Mapping[DaemonKey, Entries], releases: Iterable[Release], now: float
    ) -> list[SendRound]:
        """Open a round; daemons without entries hear of the releases alone."""
        asked = {key: wanted.keys() for key, wanted in entries.items() if wanted.revises or wanted.prepares}
        ordinals = {key: self.next_ordinals[key] for key in asked}
        self.open = OpenRound(requests, asked, ordinals, now, now + self.deadline_s)
        return self._send(entries, tuple(releases), now)

    def release_only(self, releases: Iterable[Release], now: float) -> list[SendRound]:
        """Tell every daemon at once, behind whatever its stream already carries."""
        return self._send({}, tuple(releases), now)

    def close(self) -> OpenRound:
        """Take the open round away; votes that still come for it are late."""
        if self.open is None:
            raise InternalError("no round is open")
        closed, self.open = self.open, None
        return closed

    def answer(self, key: DaemonKey, votes: Votes, now: float) -> bool:
        """Note one daemon's votes; False if they belong to nothing that is waited for.

        InternalError if a daemon votes on other entries than it was asked, or on a round never sent.
        """
        ordinal = RoundOrdinal(votes.fence.ordinal)
        if ordinal >= self.next_ordinals[key]:
            raise InternalError(
                f"{key.place} answered round {ordinal}, which was never sent",
                field="round",
                value=ordinal,
                limit=self.next_ordinals[key] - 1,
                stage=key.stage,
            )
        if ordinal <= self._answered.get(key, 0):
            return False
        self._settle(key, ordinal, now)
        if self.open is None or self.open.ordinals.get(key) != ordinal:
            return not votes.votes
        given = {vote.key: vote for vote in votes.votes}
        if len(given) != len(votes.votes) or given.keys() != set(self.open.asked[key]):
            raise InternalError(
                f"{key.place} voted on other requests than round {ordinal} asked",
                field="votes",
                value=len(votes.votes),
                limit=len(self.open.asked[key]),
                stage=key.stage,
            )
        self.open.answers[key] = Answer(given, votes.capacity, now)
        return True

    def _settle(self, key: DaemonKey, ordinal: RoundOrdinal, now: float) -> None:
        """The daemon has applied every round up to `ordinal`."""
        self._answered[key] = ordinal
        owed = self._unanswered.get(key, deque())
        while owed and owed[0].round.fence.ordinal <= ordinal:
            owed.popleft()
        self._waited_since.pop(key, None)
        if owed:
            self._waited_since[key] = now

    def _send(self, entries: Mapping[DaemonKey, Entries], releases: tuple[Release, ...], now: float) -> list[SendRound]:
        rounds = []
        for key, daemon in self.daemons.items():
            wanted = entries.get(key) or Entries()
            if not (releases or wanted.revises or wanted.prepares):
                continue
            ordinal = self.next_ordinals[key]
            self.next_ordinals[key] = RoundOrdinal(ordinal + 1)
            fence = daemon.fence(ordinal)
            deadline_ms = max(1, int(self.deadline_s * 1e3))
            send = SendRound(key, Round(fence, deadline_ms, releases, tuple(wanted.revises), tuple(wanted.prepares)))
            self._sent[key] = ordinal
            self._unanswered.setdefault(key, deque()).append(send)
            self._waited_since.setdefault(key, now)
            rounds.append(send)
        return rounds
