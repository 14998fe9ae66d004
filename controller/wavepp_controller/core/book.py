"""Living requests of one pipeline, and how each ends exactly once (DESIGN.md, I4).

Owns the requests by id, the count of those not yet admitted (what a bounded queue bounds), their
deadlines, and the emission of the one terminal event. Does not own holds: whoever ends a request
releases it as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from wavepp_controller.core import phases, traced
from wavepp_controller.core.events import Emit
from wavepp_controller.core.outbox import Outbox
from wavepp_controller.core.reconcile import limiting_stage
from wavepp_controller.core.request import NO_PLACE, Request
from wavepp_controller.core.request_table import RequestInput
from wavepp_proto import limits
from wavepp_proto.errors import WaveppError
from wavepp_proto.terms import Admitted, Attempt, Failed, Finished, PipelineId, RequestId, RowResult

COMPACT_AT = 1024
"""Deadlines of ended requests are dropped once there are this many more than living ones."""


@dataclass(slots=True)
class RequestBook:
    pipeline: PipelineId
    out: Outbox
    living: dict[RequestId, Request] = field(default_factory=dict)
    """In order of arrival."""
    waiting: dict[RequestId, Request] = field(default_factory=dict)
    """Not yet admitted."""
    waiting_tokens: int = 0
    living_tokens: int = 0
    """Prompts of all living requests, whatever is computed of them."""
    _deadlines: list[tuple[float, RequestId]] = field(default_factory=list)
    """Heap; holds no request, so that what ended can go at once."""
    _places: int = 0
    _past: dict[RequestId, Attempt] = field(default_factory=dict)
    """Last announced attempt of ids that ended; bounded like the daemons' tombstones."""

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self.living.values()))

    def accept(self, request: Request, now: float) -> None:
        request.advance(RequestInput.ACCEPT, now)
        request.attempt = Attempt(self._past.get(request.id, 0) + 1)
        self.living[request.id] = request
        self.living_tokens += request.prompt_tokens
        self.wait(request)
        heappush(self._deadlines, (request.deadline, request.id))
        if len(self._deadlines) > len(self.living) + COMPACT_AT:
            self._deadlines = [(request.deadline, request.id) for request in self.living.values()]
            heapify(self._deadlines)

    def wait(self, request: Request) -> None:
        """Count it as waiting (again)."""
        if request.id not in self.waiting:
            self.waiting[request.id] = request
            self.waiting_tokens += request.prompt_tokens

    def start_over(self, request: Request, now: float) -> None:
        """Its next attempt begins, in the same formation: if it was admitted, it waits again."""
        if request.id not in self.waiting:
            self.wait(request)
            request.phases.restart(now)
        request.start_over()

    def ready(self, request: Request) -> None:
        """Give it its place in first-come order, for good."""
        if request.place == NO_PLACE:
            request.place = self._places
            self._places += 1

    def admitted(self, request: Request, now: float) -> None:
        """Tell the client and the trace how admission went."""
        self._stop_waiting(request)
        current = request.current
        self.out.count("admitted")
        self.out.count("cached_tokens", current.endpoint)
        if current.lost_to_snapshots:
            self.out.count("tokens_lost_to_snapshots", current.lost_to_snapshots)
        if current.shared_tokens:
            self.out.count("shared_requests")
            self.out.count("shared_tokens", current.shared_tokens)
        self.out.send(*traced.admission(request, self.pipeline, "admitted", now))
        self.out.send(
            Emit(
                Admitted(
                    request.id,
                    request.attempt,
                    endpoint=current.endpoint,
                    candidate=current.candidate,
                    limiting_stage=limiting_stage(current.own_hits),
                    best_stage_hit=current.best_stage_hit,
                    rounds=current.rounds,
                    lost_to_snapshots=current.lost_to_snapshots,
                    shared_tokens=current.shared_tokens,
                ),
                request.phases.timings(current.admitted_at, now),
            )
        )

    def finish(self, request: Request, result: RowResult, now: float) -> None:
        request.advance(RequestInput.FINISH, now)
        current = request.current
        finished = Finished(
            request.id,
            request.attempt,
            first_token=result.token_id,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=current.endpoint,
            timings=request.phases.timings(current.admitted_at, now),
            waves=current.waves,
            top_logprobs=result.top_logprobs,
            logits=result.logits,
        )
        self.out.count("finished")
        self.out.send(*traced.finish(request, "finished", now))
        self._forget(request)
        self.out.send(Emit(finished))

    def fail(self, request: Request, given: RequestInput, error: WaveppError, now: float) -> None:
        """End it with `error`; `given` is FAIL, EXPIRE or CANCEL."""
        if not request.admitted:
            request.phases.enter(phases.ENDED, now)
            self.out.send(*traced.admission(request, self.pipeline, error.reason, now))
        request.advance(given, now)
        self.out.count("cancelled" if given is RequestInput.CANCEL else "failed")
        self.out.count(f"failed.{error.reason}")
        self.out.send(*traced.finish(request, error.reason, now))
        self._forget(request)
        self.out.send(Emit(Failed(request.id, error.info())))

    def outlive(self, request: Request, cause: WaveppError, attempts: int, now: float) -> None:
        """Its formation ended: it fails if it held cache and has no attempt left, else it queues again."""
        if not request.holding:
            request.requeue()
            request.advance(RequestInput.NEW_FORMATION, now)
            return
        request.losses += 1
        if request.losses >= attempts:
            self.fail(request, RequestInput.FAIL, cause, now)
            return
        self.out.count("readmitted")
        self.wait(request)
        request.start_over()
        request.phases.restart(now)
        request.advance(RequestInput.READMIT, now)

    def expired(self, now: float) -> list[Request]:
        """Living requests whose deadline has passed."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heappop(self._deadlines)
            request = self.living.get(request_id)
            if request is not None and request.deadline == deadline:
                found.append(request)
        return found

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self.living:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def check(self) -> list[str]:
        findings = []
        tokens = sum(request.prompt_tokens for request in self.waiting.values())
        if tokens != self.waiting_tokens:
            findings.append(f"{self.waiting_tokens} waiting tokens counted, {tokens} wait")
        if self.living_tokens != sum(request.prompt_tokens for request in self.living.values()):
            findings.append(f"{self.living_tokens} tokens counted, others live")
        for request in self.living.values():
            if not request.living:
                findings.append(f"{request.id} ended and is kept")
            if (request.id in self.waiting) == request.admitted:
                findings.append(f"{request.id} is {request.state.value} and counted wrongly as waiting or not")
        if self.waiting.keys() - self.living.keys():
            findings.append("a request that ended is counted as waiting")
        return findings

    def _stop_waiting(self, request: Request) -> None:
        if self.waiting.pop(request.id, None) is not None:
            self.waiting_tokens -= request.prompt_tokens

    def _forget(self, request: Request) -> None:
        self._stop_waiting(request)
        del self.living[request.id]
        self.living_tokens -= request.prompt_tokens
        if request.current.announced or request.attempt > 1:
            # A new life of this id must not be taken for this one, by tombstones or by waves still in flight.
            self._past.pop(request.id, None)
            self._past[request.id] = request.attempt
            if len(self._past) > limits.MAX_TOMBSTONES:
                del self._past[next(iter(self._past))]
