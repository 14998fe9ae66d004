"""The controller core: events in, actions out (DESIGN.md).

Owns the door (routing, verdicts, the bound on queued requests), authority, and the routing of every
event to its pipeline. The shells (asyncio, virtual time) call `handle` for each event, `next_deadline`
for when to tick, `status` for operators, and `check` in tests. Nothing here waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.door import RETRY_AFTER_MS, judge, route
from wavepp_controller.core.events import (
    Action,
    AnnounceAcked,
    AnnounceRides,
    BeatArrived,
    Cancel,
    DigestArrived,
    DrainAsked,
    Emit,
    Event,
    Hashed,
    HashPrompt,
    InventoryArrived,
    Joined,
    JoinFailed,
    LeadershipLost,
    LeadershipWon,
    MemberGone,
    MembershipFrozen,
    MemberUp,
    PauseOver,
    ReformAsked,
    RefuseReform,
    RefuseSubmit,
    ReportArrived,
    StreamLost,
    StreamsReopened,
    Submit,
    Tick,
    VotesArrived,
)
from wavepp_controller.core.latency_model import LatencyModel
from wavepp_controller.core.outbox import Outbox
from wavepp_controller.core.phases import MAX_SPANS, PhaseLog
from wavepp_controller.core.pipeline import PipelineMachine
from wavepp_controller.core.request import Request
from wavepp_controller.core.request_table import RequestInput
from wavepp_controller.core.snapshot import snapshot
from wavepp_controller.core.status import ControllerStatus
from wavepp_controller.core.verdicts import PipelineFacts
from wavepp_proto.errors import (
    Cancelled,
    ControllerUnavailable,
    Draining,
    DuplicateRequest,
    InternalError,
    UnknownPipeline,
    WaveppError,
)
from wavepp_proto.hashing import HashScope
from wavepp_proto.terms import DaemonKey, Epoch, Failed, PipelineId, Queued, RequestId, WaveOrdinal

PAUSE_S = 0.2
"""The shell ticks every 50 ms; after a longer gap it was the controller that slept, not a daemon."""
ANY_PIPELINE = "*"
"""Key of a latency model that was calibrated for whichever pipeline there is."""
FromDaemon = (
    Joined
    | JoinFailed
    | StreamLost
    | StreamsReopened
    | InventoryArrived
    | AnnounceAcked
    | VotesArrived
    | DigestArrived
    | ReportArrived
    | BeatArrived
)


class ControllerMachine:
    def __init__(self, config: ControllerConfig | None = None) -> None:
        self.config = config or ControllerConfig()
        self.epoch: Epoch | None = None
        """None while this controller does not lead."""
        self.draining = False
        self.membership_frozen = False
        self.pipelines: dict[PipelineId, PipelineMachine] = {}
        self._out = Outbox()
        self._now = 0.0
        self._ticked: float | None = None
        self._seeds: dict[str, Any] = {}
        """Latency models by pipeline, as they were once kept."""
        self._lives = 0
        """Requests accepted so far."""

    def handle(self, event: Event) -> list[Action]:
        """Take one event; the actions it asks for, to be carried out in order."""
        self._now = max(self._now, event.now)
        self._dispatch(event)
        return self._out.drain()

    @property
    def live_requests(self) -> int:
        """Accepted and not ended."""
        return sum(len(pipeline.book.living) for pipeline in self.pipelines.values())

    def next_deadline(self) -> float | None:
        """Event time at which a Tick is wanted at the latest; None if nothing is waited for."""
        times = (pipeline.next_deadline(self._now) for pipeline in self.pipelines.values())
        return min((at for at in times if at is not None), default=None)

    @property
    def wake_at(self) -> float | None:
        """When a PauseOver is wanted, exactly: cheap enough to be asked after every event."""
        times = [p.service.admission.wake_at for p in self.pipelines.values() if p.service is not None]
        return min((at for at in times if at is not None), default=None)

    @property
    def ready(self) -> bool:
        """Leads, takes requests, and some pipeline is ready: what health checks ask for, often."""
        return any(self.ready_pipelines().values())

    def ready_pipelines(self) -> dict[PipelineId, bool]:
        """Every pipeline that is known, and whether a request that comes for it now is served (I6)."""
        leads = self.epoch is not None and not self.draining
        return {pipeline.id: leads and pipeline.ready(self._now) for pipeline in self.pipelines.values()}

    def status(self, *, requests: bool = True) -> ControllerStatus:
        """What operators see; without `requests` it is cheap however many are queued."""
        return snapshot(self, self._out.counters, self._now, requests=requests)

    def reported_wave(self, key: DaemonKey) -> WaveOrdinal:
        """Last wave whose report of this daemon was taken in the present formation (0: none): heartbeats say so."""
        pipeline = self.pipelines.get(key.pipeline)
        return WaveOrdinal(0) if pipeline is None else pipeline.reported_wave(key)

    def latency_models(self) -> dict[str, Any]:
        """What was learnt of every pipeline's stages, for JSON; `seed_latency` takes it in another life."""
        return {str(pipeline.id): pipeline.latency.to_data() for pipeline in self.pipelines.values()}

    def seed_latency(self, models: Mapping[str, Any]) -> None:
        """Begin with what `latency_models` once said, or with a calibration under the name "*" for every pipeline.

        InvalidRequest if it is something else.
        """
        for seed in models.values():
            LatencyModel().seed(seed)
        self._seeds = dict(models)

    def pipeline_of(self, named: PipelineId | None) -> PipelineId:
        """Where a request that names this pipeline would go. Raises UnknownPipeline and PipelineUnavailable;
        ControllerUnavailable from one that does not lead, for it may not know every member yet."""
        self._check_leads()
        return route(named, self.pipelines).id

    def turned_away(self, error: WaveppError) -> None:
        """Count a request that the shell refused before it could become a Submit."""
        self._out.count("submitted")
        self._reject(error)

    def check(self) -> None:
        """InternalError listing every broken invariant; for tests and the simulator, after each event."""
        findings = [finding for pipeline in self.pipelines.values() for finding in pipeline.check()]
        if self._out.actions:
            findings.append("actions were left behind")
        if findings:
            raise InternalError("; ".join(findings), field="invariant", value=len(findings))

    def _dispatch(self, event: Event) -> None:
        match event:
            case Submit():
                self._submit(event)
            case Hashed() | Cancel():
                self._about_request(event)
            case AnnounceRides():
                self._announce_rides(event)
            case LeadershipWon() | LeadershipLost():
                self._authority(event)
            case MemberUp() | MemberGone():
                self._membership(event)
            case MembershipFrozen(frozen=frozen):
                self.membership_frozen = frozen
            case ReformAsked():
                self._reform(event)
            case PauseOver():
                for pipeline in self.pipelines.values():
                    pipeline.made_possible(event.now)
            case DrainAsked():
                self.draining = True
            case Tick():
                self._tick(event.now)
            case _:
                self._from_shell(event)

    # --- the door -------------------------------------------------------------------------------

    def _submit(self, event: Submit) -> None:
        request = event.request
        self._out.count("submitted")
        if self._living(request.request_id) is not None:
            error = DuplicateRequest(f"request {request.request_id} is alive", field="request_id")
            self._reject(error)
            self._out.send(RefuseSubmit(request.request_id, error.info()))
            return
        try:
            self._check_open()
            pipeline, facts = judge(request, self.pipelines, self.config)
        except WaveppError as error:
            self._reject(error)
            self._out.send(Emit(Failed(request.request_id, error.info())))
            return
        self._accept(event, pipeline, facts)

    def _check_leads(self) -> None:
        if self.epoch is None:
            raise ControllerUnavailable("this controller does not lead", retry_after_ms=RETRY_AFTER_MS)

    def _check_open(self) -> None:
        self._check_leads()
        if self.draining:
            raise Draining("this controller takes no new requests", retry_after_ms=RETRY_AFTER_MS)

    def _accept(self, event: Submit, pipeline: PipelineMachine, facts: PipelineFacts) -> None:
        prefill, now = event.request, event.now
        deadline_ms = prefill.deadline_ms or self.config.default_deadline_ms
        self._lives += 1
        scope = HashScope(facts.model.fingerprint, facts.layout, prefill.cache_salt, prefill.adapter)
        request = Request(
            prefill,
            scope,
            facts.block_tokens,
            arrived=now,
            deadline=now + deadline_ms / 1e3,
            unserved_since=now,
            life=self._lives,
            phases=PhaseLog(
                prefill.request_id, now, now, most_spans=MAX_SPANS if self.config.traced and event.traced else 0
            ),
        )
        position = len(pipeline.book.waiting)
        pipeline.book.accept(request, now)
        self._out.send(Emit(Queued(request.id, pipeline.id, position)))
        self._out.send(HashPrompt(request.id, scope, prefill.token_ids, facts.block_tokens, request.life))

    def _reject(self, error: WaveppError) -> None:
        self._out.count("rejected")
        self._out.count(f"rejected.{error.reason}")

    # --- everything else ------------------------------------------------------------------------

    def _about_request(self, event: Hashed | Cancel) -> None:
        found = self._living(event.request_id)
        if found is None or (isinstance(event, Hashed) and event.life != found[1].life):
            self._out.count("cancels_unknown" if isinstance(event, Cancel) else "hashes_unknown")
            return
        pipeline, request = found
        if isinstance(event, Hashed):
            pipeline.hashed(request, event)
            return
        error = Cancelled(f"request {request.id} was cancelled while {request.state.value}", state=request.state.value)
        pipeline.end(request, RequestInput.CANCEL, error, event.now)

    def _announce_rides(self, event: AnnounceRides) -> None:
        found = self._living(event.key.request_id)
        if found is not None:
            found[0].announce_rides(event)

    def _authority(self, event: LeadershipWon | LeadershipLost) -> None:
        if self.epoch is not None:
            lost = ControllerUnavailable("this controller lost its leadership", retry_after_ms=RETRY_AFTER_MS)
            for pipeline in self.pipelines.values():
                pipeline.stand_down(lost, event.now)
        self.epoch = event.epoch if isinstance(event, LeadershipWon) else None
        if isinstance(event, LeadershipWon):
            for pipeline in self.pipelines.values():
                pipeline.lead(event.epoch, event.now)

    def _membership(self, event: MemberUp | MemberGone) -> None:
        if isinstance(event, MemberGone):
            known = self.pipelines.get(event.key.pipeline)
            if known is not None:
                standing = known.forming.standing(event.key, event.incarnation)
                known.forming.members.gone(event.key, event.incarnation, standing=standing)
                if not standing:
                    known.forming.members_changed(event.now)
                known.consider(event.now)
            return
        self._pipeline(event.record.key, event.now).member_up(event)

    def _pipeline(self, key: DaemonKey, now: float) -> PipelineMachine:
        pipeline = self.pipelines.get(key.pipeline)
        if pipeline is None:
            pipeline = self.pipelines[key.pipeline] = PipelineMachine(key.pipeline, self.config, self._out)
            pipeline.latency.seed(self._seeds.get(key.pipeline) or self._seeds.get(ANY_PIPELINE, {}))
            if self.epoch is not None:
                pipeline.lead(self.epoch, now)
        return pipeline

    def _reform(self, event: ReformAsked) -> None:
        try:
            if event.pipeline not in self.pipelines:
                raise UnknownPipeline(f"no pipeline {event.pipeline}", field="pipeline", value=event.pipeline)
            self.pipelines[event.pipeline].reform(event)
        except WaveppError as error:
            self._out.send(RefuseReform(event.pipeline, error.info()))

    def _tick(self, now: float) -> None:
        gap = 0.0 if self._ticked is None else now - self._ticked
        self._ticked = now
        for pipeline in self.pipelines.values():
            pipeline.tick(now, gap if gap > PAUSE_S else 0.0)

    def _from_shell(self, event: FromDaemon) -> None:
        pipeline = self.pipelines.get(event.key.pipeline)
        if pipeline is None:
            self._out.count("stale_messages")
            return
        match event:
            case Joined():
                pipeline.joined(event)
            case JoinFailed():
                pipeline.join_failed(event)
            case StreamLost():
                pipeline.hearing.stream_lost(event)
            case AnnounceAcked():
                pipeline.hearing.acked(event)
            case VotesArrived():
                pipeline.hearing.voted(event)
            case DigestArrived():
                pipeline.hearing.digest(event)
            case ReportArrived():
                pipeline.hearing.reported(event)
            case BeatArrived():
                pipeline.hearing.beat(event)
            case StreamsReopened():
                pipeline.hearing.streams_reopened(event)
            case InventoryArrived():
                pipeline.hearing.inventory(event)

    def _living(self, request_id: RequestId) -> tuple[PipelineMachine, Request] | None:
        for pipeline in self.pipelines.values():
            request = pipeline.book.living.get(request_id)
            if request is not None:
                return pipeline, request
        return None
