"""The door of the controller: which pipeline a new request goes to, and whether it may wait there.

Owns routing and the bound on queued requests; `verdicts` has the checks of one request. Everything
here raises the typed verdict and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.pipeline import PipelineMachine
from wavepp_controller.core.verdicts import PipelineFacts, check_against, check_plan, check_request
from wavepp_proto.errors import PipelineUnavailable, QueueFull, UnknownPipeline
from wavepp_proto.terms import PipelineId, PrefillRequest

RETRY_AFTER_MS = 1000
Pipelines = Mapping[PipelineId, PipelineMachine]


def judge(
    request: PrefillRequest, pipelines: Pipelines, config: ControllerConfig
) -> tuple[PipelineMachine, PipelineFacts]:
    """Where the request goes, and what was known of that pipeline; raises the verdict if nowhere."""
    check_request(request)
    pipeline = route(request.pipeline, pipelines)
    facts = pipeline.forming.facts
    if facts is None:
        raise PipelineUnavailable(
            f"pipeline {pipeline.id} has no members", pipeline=pipeline.id, retry_after_ms=RETRY_AFTER_MS
        )
    check_against(request, facts)
    if pipeline.takes_new:  # else the next formation may have larger pools: it judges when it serves
        check_plan(request, facts)
    _check_room(request, pipelines, config)
    return pipeline, facts


def route(named: PipelineId | None, pipelines: Pipelines) -> PipelineMachine:
    """The named pipeline; else, of those that serve (failing that, exist), the one with fewest queued."""
    if named is not None:
        if named not in pipelines:
            raise UnknownPipeline(f"no pipeline {named!r}", field="pipeline", value=named)
        return pipelines[named]
    if not pipelines:
        raise PipelineUnavailable("no stage daemon has registered", retry_after_ms=RETRY_AFTER_MS)
    serving = [pipeline for pipeline in pipelines.values() if pipeline.serving]
    return min(serving or pipelines.values(), key=lambda pipeline: (len(pipeline.book.waiting), pipeline.id))


def _check_room(request: PrefillRequest, pipelines: Pipelines, config: ControllerConfig) -> None:
    books = [pipeline.book for pipeline in pipelines.values()]
    for name, value, limit in (
        ("queued_requests", 1 + sum(len(book.waiting) for book in books), config.max_queued_requests),
        (
            "queued_tokens",
            request.prompt_tokens + sum(book.waiting_tokens for book in books),
            config.max_queued_tokens,
        ),
    ):
        if value > limit:
            raise QueueFull(
                f"{name} would be {value}, at most {limit} may wait",
                field=name,
                value=value,
                limit=limit,
                retry_after_ms=RETRY_AFTER_MS,
            )
