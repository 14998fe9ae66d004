"""Who asks a planned deployment: closed loops with a warm-up round, and arrivals in time.

Owns what each request was and when it was asked, admitted and ended, and which of them are measured. Runs a
deployment until they have ended. What it all means is in `planning_result`.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

from wavepp_controller.core.config import ControllerConfig
from wavepp_proto.errors import InternalError, from_info
from wavepp_proto.profile import Profile
from wavepp_proto.terms import Admitted, Failed, Finished, PipelineId, PrefillEvent, RequestId, Timings
from wavepp_proto.workload import MOMENT_S, Family, Prompt, Workload
from wavepp_simulator.planning import Deployment, Overheads
from wavepp_simulator.timed_engine import Ran

ROUNDS, LEAST_MEASURED, LEAST_S = 4, 64, 10.0
"""What is measured of a closed loop at least: rounds, requests, seconds. With less, the answer would be
of the first round, which began all at once."""
MOST_TIMES = 16
"""So many times the least requests are enough, whatever seconds they take: a profile may cost nothing."""
MOST_PLAYED = 1 << 20
"""Requests in the seconds that somebody asks for."""


@dataclass(slots=True)
class Asked:
    prompt: Prompt
    at: float
    admitted_at: float | None = None
    cached_tokens: int = 0
    rounds_ms: float = 0.0
    ended_at: float | None = None
    failure: str = ""
    """Reason of the typed error; empty if it finished or goes on."""


@dataclass(slots=True)
class Played:
    """One run; times are virtual seconds, [start, end] is what is measured."""

    measured: list[Asked] = field(default_factory=list)
    """Ended within the measured time, in order of their end."""
    start: float = 0.0
    end: float = 0.0
    ran: dict[str, list[Ran]] = field(default_factory=dict)
    """Every wave of each stage."""
    copied_blocks: int = 0
    asked: dict[RequestId, Asked] = field(default_factory=dict)
    """Everybody, whenever they asked."""


def planned(
    profile: Profile,
    config: ControllerConfig,
    overheads: Overheads,
    workload: Workload,
    *,
    replicas: int = 1,
    measured: int | None = None,
    seconds: float | None = None,
) -> Played:
    """Play a workload on a deployment of its own, and give the deployment's memory back.

    Cores, stages and clients refer to each other, and most of what they take are arrays that the collector does not
    count: left to it, a dozen deployments of some hundred MB each are there at once."""
    try:
        return Load(profile, config, overheads, replicas).play(workload, measured, seconds)
    finally:
        gc.collect()


class Load:
    """Clients of one deployment; `next_prompt` is asked by whoever has finished."""

    def __init__(self, profile: Profile, config: ControllerConfig, overheads: Overheads, replicas: int) -> None:
        self.deployment = Deployment(profile, config, overheads, self._hear, replicas)
        self.living: dict[RequestId, Asked] = {}
        self._asked: dict[RequestId, Asked] = {}
        self.ended: list[Asked] = []
        self._family: Family | None = None
        self._numbers = 0
        """Requests so far, preloaded ones included."""
        self._drawn = 0
        """Prompts of the family so far."""

    def play(self, workload: Workload, measured: int | None = None, seconds: float | None = None) -> Played:
        """Of a closed loop so many requests or seconds, if somebody says so."""
        self.deployment.run(lambda: self.deployment.serving)
        self._preload(workload.preloaded)
        if isinstance(workload, Family):
            least = max(ROUNDS * workload.concurrency, LEAST_MEASURED)
            if measured is not None:
                return self._closed(workload, measured, measured, 0.0)
            if seconds is not None:
                return self._closed(workload, 1, MOST_PLAYED, seconds)
            return self._closed(workload, least, MOST_TIMES * least, LEAST_S)
        base = self.deployment.now
        for one in workload.arrivals:
            self._at(base + one.at_s, one.prompt)
        self.deployment.run(lambda: len(self.ended) == len(workload.arrivals))
        return self._played(0, base, self.deployment.now)

    def _preload(self, prompts: tuple[Prompt, ...]) -> None:
        """Every replica computes the prefixes that caches are to hold."""
        for prompt in prompts:
            for pipeline in self.deployment.machine.pipelines:
                self._submit(prompt, pipeline)
        self.deployment.run(lambda: not self.living)
        self.deployment.agenda.at(settled := self.deployment.now + 1.0, lambda: None)
        self.deployment.run(lambda: self.deployment.now >= settled)
        self.ended.clear()

    def _closed(self, family: Family, least: int, most: int, seconds: float) -> Played:
        """At least so many requests, and more, up to `most`, until so many seconds are over."""
        self._family = family
        for _ in range(family.concurrency):
            self._next()
        self.deployment.run(lambda: len(self.ended) >= family.concurrency)
        start = self._settle(family.concurrency)
        first = len(self.ended)
        self.deployment.run(
            lambda: (
                (done := len(self.ended) - first) >= most or (done >= least and self.deployment.now >= start + seconds)
            )
        )
        end = self._settle(family.concurrency)
        self._family = None
        return self._played(first, start, end)

    def _settle(self, concurrency: int) -> float:
        """Until nobody has ended for a moment, or as many have as can share a wave; when the last one ended.

        All that shared a wave are counted, or none."""
        most = len(self.ended) + concurrency
        while len(self.ended) < most:
            ended, quiet = len(self.ended), self._last_s + MOMENT_S
            self.deployment.agenda.at(quiet, lambda: None)
            while len(self.ended) == ended and self.deployment.now < quiet:
                self.deployment.step()
            if len(self.ended) == ended:
                break
        return self._last_s

    @property
    def _last_s(self) -> float:
        return self.ended[-1].ended_at or 0.0

    def _played(self, first: int, start: float, end: float) -> Played:
        stages = self.deployment.stages
        ran = {str(key): stage.ran for key, stage in stages.items()}
        copied = sum(stage.copied_blocks for stage in stages.values())
        return Played(self.ended[first:], start, end, ran, copied, self._asked)

    def _next(self) -> None:
        if self._family is not None:
            self._drawn += 1
            self._submit(self._family.prompt(self._drawn - 1))

    def _at(self, at: float, prompt: Prompt) -> None:
        self.deployment.agenda.at(at, lambda: self._submit(prompt))

    def _submit(self, prompt: Prompt, pipeline: PipelineId | None = None) -> None:
        name = RequestId(f"r{self._numbers}")
        self._numbers += 1
        self.living[name] = self._asked[name] = Asked(prompt, self.deployment.now)
        self.deployment.submit(name, prompt, pipeline)

    def _hear(self, event: PrefillEvent, timings: Timings | None) -> None:
        """Clients hear half a round later than the controller speaks."""
        now = self.deployment.now + self.deployment.overheads.round_s / 2
        if isinstance(event, Admitted):
            asked = self.living[event.request_id]
            asked.admitted_at, asked.cached_tokens = now, event.endpoint
            asked.rounds_ms = timings.rounds_ms if timings is not None else 0.0
        elif isinstance(event, Finished | Failed):
            self.deployment.agenda.at(now, lambda: self._end(event))

    def _end(self, event: Finished | Failed) -> None:
        asked = self.living.pop(event.request_id)
        asked.ended_at = self.deployment.now
        if isinstance(event, Failed):
            asked.failure = event.error.reason
            if event.error.reason == InternalError.reason:
                raise from_info(event.error)
        self.ended.append(asked)
        self._next()
