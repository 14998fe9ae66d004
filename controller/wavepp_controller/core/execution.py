"""Waves of one formation: what is sent, and what the reports mean (DESIGN.md).

Owns the lanes (admitted requests with tokens left to schedule, in ranked order), the ring and the positions, which
advance only by rows written to every daemon's stream. What a wave carries is the
policy's choice. Says which requests finished and which were voided; ending them is the caller's business. Does not
own admission.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import Emit, SendWave
from wavepp_controller.core.formation import PipelineFormation
from wavepp_controller.core.latency_model import LatencyModel
from wavepp_controller.core.order import RankedOrder
from wavepp_controller.core.outbox import Outbox
from wavepp_controller.core.pace import Pace
from wavepp_controller.core.planner import Lane, ShortFirst
from wavepp_controller.core.planning import InFlight, PlanView, Policy
from wavepp_controller.core.request import Request
from wavepp_controller.core.request_table import RequestInput, RequestState
from wavepp_controller.core.ring import Flight, Ring
from wavepp_controller.core.wave_watch import WaveWatch
from wavepp_proto.errors import InternalError, NonFinite, RowVoided
from wavepp_proto.terms import DaemonKey, Fence, HoldKey, PipelineId, Progress, Row, RowResult, WaveOrdinal, WaveReport


@dataclass(slots=True)
class Outcomes:
    """Requests that one report ends."""

    finished: list[tuple[Request, RowResult]] = field(default_factory=list)
    voided: list[tuple[Request, RowVoided]] = field(default_factory=list)
    wave_ended: bool = False
    """The last stage is done with a wave."""


class Execution:
    def __init__(
        self,
        pipeline: PipelineId,
        formation: PipelineFormation,
        policy: Policy,
        model: LatencyModel,
        config: ControllerConfig,
        out: Outbox,
        now: float,
    ) -> None:
        self._pipeline, self._formation, self._policy, self._out = pipeline, formation, policy, out
        self._max_rows = config.lanes
        self._moved = now
        """When the ring last went from empty to busy, or freed a slot."""
        self.ring = Ring(2 * formation.stages, formation.daemons)
        self.watch = WaveWatch(self.ring, model, config)
        self.lanes = RankedOrder(config.most_bypasses, config.aged_every)
        self._short = ShortFirst(config.short_share, formation.wave_tokens)
        self.pace = Pace()
        self.running: dict[HoldKey, Request] = {}
        """Admitted and not ended, lanes or not."""
        self._flying: dict[WaveOrdinal, InFlight] = {}
        """What holds a slot of the ring, in order."""
        self._made: dict[int, Lane] = {}
        """Lanes as the policy last saw them, by the request's life: most stay as they are from wave to wave."""
        self._ask_at: float | None = None
        """When the policy wants to be asked again; None unless it waits."""
        self._closed = False
        """The admission mode lets no wave go now."""

    def next_deadline(self) -> float | None:
        return self._ask_at

    def admit(self, request: Request) -> None:
        self.running[request.key] = request
        self.lanes.add(request)

    def withdraw(self, request: Request) -> None:
        """The request ended: chunks already sent are executed, nothing more is scheduled."""
        self.running.pop(request.key, None)
        self._made.pop(request.life, None)
        self.lanes.discard(request)

    def again(self, key: DaemonKey) -> list[SendWave]:
        """Every wave that this daemon has not reported, in order: it ignores those that it has."""
        targets = ((key, self._formation.daemons[key].fence()),)
        unreported = self.ring.unreported(key)
        return [self._command(flight, targets) for flight in unreported]

    def pump(self, now: float, *, closed: bool = False, more_soon: bool = False) -> None:
        """Fill the ring as far as the policy wants; not at all while the admission mode is `closed` for waves."""
        self._ask_at, self._closed = None, closed
        while self.lanes and self.ring.room and not closed:
            decision = self._policy.plan(self._view(now, more_soon))
            if decision.rows:
                self._send(decision.rows, now)
                continue
            if not self.ring.in_flight or decision.wait_until is None or decision.wait_until <= now:
                raise InternalError(
                    "lanes have tokens and the planner found no chunk", field="lanes", value=len(self.lanes)
                )
            self._ask_at = decision.wait_until
            break

    def report(self, key: DaemonKey, report: WaveReport, now: float) -> Outcomes:
        """Account for one daemon's report of one wave; InternalError if it contradicts the others."""
        daemon = self._formation.daemons[key]
        daemon.has(report.capacity)
        daemon.spent(report.times)
        busy = not self.ring.room
        reported = self.ring.report(key, report)
        daemon.waves_done += 1
        self._policy.observe(key, reported.flight.rows, report.void_bitmap, report.times, now)
        outcomes = Outcomes()
        if reported.slot_freed:
            self._flying.pop(reported.flight.ordinal, None)
            if busy:
                void = reported.flight.void_bitmap
                computed = (r.length for i, r in enumerate(reported.flight.rows) if not void >> i & 1)
                self.pace.worked(sum(computed), now - self._moved)
            self._moved = now
            outcomes.wave_ended = True
            self._complete(reported.flight, outcomes)
        self._void(reported.flight, reported.complete, outcomes)
        return outcomes

    def check(self) -> list[str]:
        findings = self.ring.check()
        for request in self.running.values():
            current = request.current
            if not request.admitted:
                findings.append(f"{request.id} is {request.state.value} and runs")
            if not current.endpoint <= current.computed <= current.scheduled <= request.prompt_tokens:
                findings.append(f"{request.id} has positions out of order")
            if (request in self.lanes) != (current.scheduled < request.prompt_tokens):
                findings.append(f"{request.id} has a lane and nothing to schedule, or the other way round")
            if current.admitted_snapshots > current.promised_snapshots:
                findings.append(f"{request.id} takes more snapshots than were promised")
        findings += self.lanes.check()
        if len(self.lanes) > len(self.running):
            findings.append("a lane carries a request that does not run")
        if len(self._flying) != self.ring.in_flight:
            findings.append("the planner is shown other waves than those in the ring")
        if self._made.keys() - {request.life for request in self.lanes}:
            findings.append("the planner is shown a lane that is no more")
        if self.lanes and self.ring.room and not self._closed and self._ask_at is None:
            findings.append("a lane has tokens, the ring has room, and no wave was planned")
        return findings

    def _view(self, now: float, more_soon: bool) -> PlanView:
        formation = self._formation
        lanes = [self._lane(request) for request in self.lanes]
        return PlanView(
            now,
            self._short.order(lanes, self.lanes.peers) if len(lanes) > 1 else lanes,
            tuple(self._flying.values()),
            formation.stages,
            self.ring.size,
            formation.wave_tokens,
            formation.block_tokens,
            self._max_rows,
            more_soon,
        )

    def _lane(self, request: Request) -> Lane:
        current, made = request.current, self._made.get(request.life)
        if (
            made is None
            or made.start != current.scheduled
            or made.stops is not current.stops
            or made.snapshots is not current.snapshots
        ):
            made = Lane(request.key, current.scheduled, request.prompt_tokens, current.snapshots, current.stops)
            self._made[request.life] = made
        return made

    def _send(self, rows: tuple[Row, ...], now: float) -> None:
        if not self.ring.in_flight:
            self._moved = now
        ordinal = self.ring.send(rows)
        self._flying[ordinal] = InFlight(ordinal, rows, now)
        self._short.sent(rows)
        for row in rows:
            request = self.running[row.key]
            request.current.sent(row, ordinal)
            if request.state is RequestState.ADMITTED:
                request.advance(RequestInput.FIRST_WAVE, now)
                self.lanes.serve(request)
            if row.final:
                self._made.pop(request.life, None)
                self.lanes.discard(request)
        self._out.count("waves")
        self._out.count("wave_rows", len(rows))
        self._out.count("wave_tokens", sum(row.length for row in rows))
        flight = self.ring.flight(ordinal)
        assert flight is not None
        self._out.send(self._command(flight, self._formation.fences()))

    def _command(self, flight: Flight, targets: tuple[tuple[DaemonKey, Fence], ...]) -> SendWave:
        """A daemon that loses its controller, or whose formation ends for another reason, judges its engine itself."""
        limit_s = max(self.watch.limit_s(daemon, flight) for daemon in self._formation.daemons.values())
        return SendWave(self._pipeline, flight.ordinal, flight.rows, targets, math.ceil(limit_s * 1e3))

    def _complete(self, flight: Flight, outcomes: Outcomes) -> None:
        """The last stage is done with the wave: positions advance, final rows have their token."""
        results = {result.row: result for result in flight.results}
        for index, row in enumerate(flight.rows):
            request = self.running.get(row.key)
            if request is None or flight.void_bitmap >> index & 1:
                continue
            request.current.computed = row.start + row.length
            if not row.final:
                self._out.send(Emit(Progress(request.id, request.current.computed, request.prompt_tokens)))
                continue
            result = results.get(index)
            if result is None:
                raise InternalError(
                    f"the last stage ended the prompt of {request.id} and told no token",
                    field="results",
                    value=len(results),
                    wave=flight.ordinal,
                )
            outcomes.finished.append((request, result))

    def _void(self, flight: Flight, complete: bool, outcomes: Outcomes) -> None:
        """A voided row fails its request as soon as the cause is told, and when all have spoken at the latest."""
        for index, row in enumerate(flight.rows):
            request = self.running.get(row.key)
            told = flight.faults.get(index)
            if request is None or not (told or (complete and flight.void_bitmap >> index & 1)):
                continue
            where, cause = (told[0].place, told[1]) if told else ("an unknown stage", None)
            # The same prompt computes NaN again: it is not worth another try, as other faults of a row are.
            finite = cause is None or cause.reason != NonFinite.reason
            error = (RowVoided if finite else NonFinite)(
                f"{where} voided tokens [{row.start}, {row.start + row.length}) of {request.id}: "
                + (cause.message if cause else "no stage told why"),
                stage=told[0].stage if told else None,
                rank=told[0].rank if told else None,
                wave=flight.ordinal,
                cause=cause.reason if cause and finite else None,
                layer=dict(cause.fields).get("layer") if cause else None,
            )
            outcomes.voided.append((request, error))
