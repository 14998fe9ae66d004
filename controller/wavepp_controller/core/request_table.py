"""The life of a request as one table (DESIGN.md).

Owns the states, the inputs and which follows which; `Request.advance` is the only caller. Every pair
(state, input) is either in TABLE or in IMPOSSIBLE with the reason, and a test walks all of them.

    RECEIVED ──reject──▶ REJECTED
       │ accept
       ▼       announce             all acked          prepare
     QUEUED ─────────────▶ ANNOUNCED ────────▶ HINTED ─────────▶ PREPARING ◀─┐
       ▲                    ▲  │  ▲                               │ │ ▲ │ └──┘ revise
       │                    └──┘  └──────── not announced ────────┘ │ │ │
       │               not announced       run short or round lost  ▼ │ │
       │                                    HINTED ──behind──▶ WAITING─┘ │ commit
       │                                    HINTED ◀──shown─────┘ prepare▼
       │                                                             ADMITTED
       │                                                                │ first wave
       │                                                                ▼
       │                                                             RUNNING ──finish──▶ FINISHED
       │
       ├── new formation: QUEUED, ANNOUNCED, HINTED, WAITING (they hold nothing)
       └── readmit: PREPARING, ADMITTED, RUNNING (an attempt was lost, another is left)

    from every living state:  fail or expire ──▶ FAILED      cancel ──▶ CANCELLED

A request holds cache on the stages in PREPARING, ADMITTED and RUNNING, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class RequestState(StrEnum):
    RECEIVED = "received"  # being judged; becomes something else within the same event
    QUEUED = "queued"  # accepted; being hashed, or waiting for its pipeline to serve
    ANNOUNCED = "announced"  # sent to every daemon, not yet acknowledged by all
    HINTED = "hinted"  # ready: hashed, announced everywhere, hint known
    PREPARING = "preparing"  # in the round in flight, or about to be revised
    WAITING = "waiting"  # for capacity, or behind a request that computes the same prefix; holds nothing
    ADMITTED = "admitted"  # committed at one endpoint on every daemon
    RUNNING = "running"  # at least one chunk sent
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class RequestInput(StrEnum):
    ACCEPT = "accept"
    REJECT = "reject"
    ANNOUNCE = "announce"
    ALL_ACKED = "all acked"
    PREPARE = "prepare"
    REVISE = "revise"
    COMMIT = "commit"
    RUN_SHORT = "run short"  # some daemon has no capacity
    ROUND_LOST = "round lost"  # the round's deadline passed
    # some daemon does not know it, never said so, or lost its hold: announced as the next attempt
    NOT_ANNOUNCED = "not announced"
    BEHIND = "behind"  # a request that is being prepared or runs computes its prefix
    SHOWN = "shown"  # that prefix can be reused now, or the other request ended
    FIRST_WAVE = "first wave"
    FINISH = "finish"
    NEW_FORMATION = "new formation"  # the formation ended while it held nothing
    READMIT = "readmit"  # the formation ended while it held cache, and attempts are left
    FAIL = "fail"
    EXPIRE = "expire"
    CANCEL = "cancel"


S, In = RequestState, RequestInput

TERMINAL = frozenset({S.FINISHED, S.FAILED, S.CANCELLED, S.REJECTED})
HOLDING = frozenset({S.PREPARING, S.ADMITTED, S.RUNNING})
LIVING = tuple(state for state in S if state not in TERMINAL and state is not S.RECEIVED)

TABLE: dict[tuple[RequestState, RequestInput], RequestState] = {
    (S.RECEIVED, In.ACCEPT): S.QUEUED,
    (S.RECEIVED, In.REJECT): S.REJECTED,
    (S.QUEUED, In.ANNOUNCE): S.ANNOUNCED,
    (S.QUEUED, In.NEW_FORMATION): S.QUEUED,
    (S.ANNOUNCED, In.ALL_ACKED): S.HINTED,
    (S.ANNOUNCED, In.NOT_ANNOUNCED): S.ANNOUNCED,
    (S.ANNOUNCED, In.NEW_FORMATION): S.QUEUED,
    (S.HINTED, In.PREPARE): S.PREPARING,
    (S.HINTED, In.BEHIND): S.WAITING,
    (S.HINTED, In.NEW_FORMATION): S.QUEUED,
    (S.PREPARING, In.REVISE): S.PREPARING,
    (S.PREPARING, In.COMMIT): S.ADMITTED,
    (S.PREPARING, In.RUN_SHORT): S.WAITING,
    (S.PREPARING, In.ROUND_LOST): S.WAITING,
    (S.PREPARING, In.NOT_ANNOUNCED): S.ANNOUNCED,
    (S.PREPARING, In.READMIT): S.QUEUED,
    (S.WAITING, In.PREPARE): S.PREPARING,
    (S.WAITING, In.BEHIND): S.WAITING,
    (S.WAITING, In.SHOWN): S.HINTED,
    (S.WAITING, In.NEW_FORMATION): S.QUEUED,
    (S.ADMITTED, In.FIRST_WAVE): S.RUNNING,
    (S.ADMITTED, In.NOT_ANNOUNCED): S.ANNOUNCED,
    (S.ADMITTED, In.READMIT): S.QUEUED,
    (S.RUNNING, In.FINISH): S.FINISHED,
    (S.RUNNING, In.READMIT): S.QUEUED,
    **{(state, In.FAIL): S.FAILED for state in LIVING},
    **{(state, In.EXPIRE): S.FAILED for state in LIVING},
    **{(state, In.CANCEL): S.CANCELLED for state in LIVING},
}

Pair = tuple[RequestState, RequestInput]


def _impossible(reason: str, inputs: Iterable[RequestInput], *states: RequestState) -> dict[Pair, str]:
    return {(state, given): reason for state in states for given in inputs}


IMPOSSIBLE: dict[Pair, str] = {
    **_impossible("its one outcome is out; nothing follows it", In, *TERMINAL),
    **_impossible("a verdict is given within the event that received it", set(In) - {In.ACCEPT, In.REJECT}, S.RECEIVED),
    **_impossible("verdicts are given once, at the door", (In.ACCEPT, In.REJECT), *LIVING),
    **_impossible("announced once an attempt, from the queue", (In.ANNOUNCE,), *(set(LIVING) - {S.QUEUED})),
    **_impossible("no announcement is open", (In.ALL_ACKED,), *(set(LIVING) - {S.ANNOUNCED})),
    **_impossible(
        "only a ready request that holds nothing is prepared", (In.PREPARE,), *(set(LIVING) - {S.HINTED, S.WAITING})
    ),
    **_impossible(
        "only a ready request that holds nothing waits behind another",
        (In.BEHIND,),
        *(set(LIVING) - {S.HINTED, S.WAITING}),
    ),
    **_impossible("it waits behind nobody", (In.SHOWN,), *(set(LIVING) - {S.WAITING})),
    **_impossible(
        "it is in no round",
        (In.REVISE, In.COMMIT, In.RUN_SHORT, In.ROUND_LOST),
        *(set(LIVING) - {S.PREPARING}),
    ),
    **_impossible(
        "nobody was asked whether it is announced",
        (In.NOT_ANNOUNCED,),
        *(set(LIVING) - {S.PREPARING, S.ANNOUNCED, S.ADMITTED}),
    ),
    **_impossible(
        "waves carry admitted requests only, the first once", (In.FIRST_WAVE,), *(set(LIVING) - {S.ADMITTED})
    ),
    **_impossible("only a final chunk that ran finishes a request", (In.FINISH,), *(set(LIVING) - {S.RUNNING})),
    **_impossible("it holds cache: it fails or is readmitted", (In.NEW_FORMATION,), *HOLDING),
    **_impossible("it holds nothing that could be lost", (In.READMIT,), *(set(LIVING) - HOLDING)),
}


class IllegalTransition(RuntimeError):
    """A pair that is not in TABLE: a bug here, so no WaveppError that a caller might answer and go on.

    The message tells why the pair is impossible, and what the request went through.
    """

    def __init__(self, request: str, state: RequestState, given: RequestInput, story: Iterable[str]) -> None:
        why = IMPOSSIBLE.get((state, given), "the pair is in neither table")
        told = "\n  ".join(story)
        super().__init__(f"request {request} in {state.value} cannot take {given.value!r}: {why}\n  {told}")


def next_state(request: str, state: RequestState, given: RequestInput, story: Iterable[str]) -> RequestState:
    """The state after `given`; IllegalTransition if the table has no such pair."""
    following = TABLE.get((state, given))
    if following is None:
        raise IllegalTransition(request, state, given, story)
    return following
