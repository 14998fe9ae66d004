"""Spans of admission, as notes in a request's phase log (DESIGN.md).

Owns which attributes each admission span carries. Called by admission and by whoever ends a request;
decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from wavepp_controller.core import phases
from wavepp_controller.core.events import Span
from wavepp_controller.core.phases import Attributes
from wavepp_controller.core.reconcile import limiting_stage
from wavepp_controller.core.request import Request
from wavepp_controller.core.rounds import OpenRound
from wavepp_proto.terms import DaemonKey, PipelineId, RequestId, Vote


def hinted(request: Request, now: float) -> None:
    request.phases.note(phases.HINT, now, now, ((phases.CANDIDATE, request.current.candidate),))


def parked(request: Request, front: RequestId, boundary: int) -> None:
    """Say whom the wait that begins now is for."""
    request.phases.about = ((phases.FRONT, front), (phases.BOUNDARY, boundary))


def round_done(request: Request, done: OpenRound, votes: Mapping[DaemonKey, Vote], now: float) -> None:
    """One vote span per daemon asked, then their pin_reserve span; all of them or none."""
    if not request.phases.room_for(len(votes) + 1):
        return
    for key, vote in votes.items():
        attributes: Attributes = (
            (phases.STAGE, key.stage),
            (phases.RANK, key.rank),
            (phases.ROUND, done.ordinals[key]),
            (phases.OUTCOME, vote.outcome.value),
            (phases.ENDPOINT, vote.endpoint),
            (phases.OWN_HIT, vote.own_hit),
            (phases.SHORTFALL_BLOCKS, sum(short.blocks for short in vote.shortfall)),
        )
        request.phases.note(phases.VOTE, done.started, done.answers[key].at, attributes, phases.PIN_RESERVE)
    _round(request, done, now)


def round_lost(request: Request, lost: OpenRound, now: float) -> None:
    if not request.phases.room_for(len(lost.silent) + 1):
        return
    for key in lost.silent:
        attributes: Attributes = ((phases.STAGE, key.stage), (phases.RANK, key.rank), (phases.OUTCOME, "silent"))
        request.phases.note(phases.VOTE, lost.started, now, attributes, phases.PIN_RESERVE)
    _round(request, lost, now)


def admission(request: Request, pipeline: PipelineId, outcome: str, now: float) -> list[Span]:
    """Everything under the admission span, then the span itself."""
    log, current = request.phases, request.current
    if not log.most_spans:
        return []
    if current.differed_at is not None:
        log.note(phases.RECONCILE, current.differed_at, now, ((phases.ENDPOINT, current.endpoint),))
    attributes: list[tuple[str, str | int | float | bool]] = [
        (phases.REQUEST_ID, request.id),
        (phases.ATTEMPT, request.attempt),
        (phases.PIPELINE, pipeline),
        (phases.PROMPT_TOKENS, request.prompt_tokens),
        (phases.OUTCOME, outcome),
        (phases.CANDIDATE, current.candidate),
        (phases.ENDPOINT, current.endpoint),
        (phases.ROUNDS, current.rounds),
        (phases.LOST_TO_AGREEMENT, max(0, current.best_stage_hit - current.endpoint)),
        (phases.LOST_TO_SNAPSHOTS, current.lost_to_snapshots),
        (phases.SHARED, current.shared_tokens),
    ]
    limiting = limiting_stage(current.own_hits)
    if limiting is not None:
        attributes.append((phases.LIMITING_STAGE, limiting))
    if current.waited_for:
        short = " ".join(str(stage) for stage in sorted(current.waited_for))
        attributes.append((phases.WAIT_REASON, f"no capacity on stage {short}"))
    return [*log.flush(), Span(request.id, phases.ADMISSION, log.begun, now, tuple(attributes))]


def finish(request: Request, outcome: str, now: float) -> list[Span]:
    """What is left in the log, then the span that ends the request."""
    if not request.phases.most_spans:
        return []
    attributes: Attributes = (
        (phases.REQUEST_ID, request.id),
        (phases.ATTEMPT, request.attempt),
        (phases.OUTCOME, outcome),
    )
    return [*request.phases.flush(), Span(request.id, phases.FINISH, now, now, attributes)]


def _round(request: Request, done: OpenRound, now: float) -> None:
    first = next(iter(done.ordinals.values()))
    attributes: Attributes = ((phases.ROUND, first), (phases.ROUNDS, request.current.rounds))
    request.phases.note(phases.PIN_RESERVE, done.started, now, attributes)
