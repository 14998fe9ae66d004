"""A deployment in virtual time: the real controller core, replicas of real stage cores, nothing that fails.

Owns the clock, the messages between the cores and what they take on the way (`Overheads`, the same for every
policy and mode). Cores decide; this only carries. What is asked is in `planning_load`, how long a stage needs
in `timed_engine`. For histories with faults and checks after every event see `world`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from wavepp_controller.core import events as ev
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.machine import ControllerMachine
from wavepp_controller.core.round_pace import RELEASE_LAG_MS, ROUND_REST
from wavepp_proto import limits
from wavepp_proto.errors import InternalError, InvalidRequest, from_info
from wavepp_proto.profile import Profile
from wavepp_proto.terms import (
    AnnounceAck,
    AnnounceFrame,
    CacheGroup,
    DaemonKey,
    Digest,
    Epoch,
    Incarnation,
    LinkKind,
    MemberRecord,
    ModelFacts,
    PipelineId,
    PrefillEvent,
    PrefillRequest,
    RequestId,
    Round,
    StageIndex,
    Timings,
    WaveCommand,
    WaveOrdinal,
    WaveReport,
)
from wavepp_proto.workload import Prompt
from wavepp_simulator.agenda import Agenda
from wavepp_simulator.chains import Chains
from wavepp_simulator.timed_engine import TimedStage
from wavepp_stage.engine.emulated_model import Preset

ROUND_MS = (0.9, 0.475)
"""A prepare round as `scripts/bench-admission` measured it on two cores, loopback: 2.8 ms over four stages, 4.7 ms
over eight. (fixed part, for each stage)."""
HASH_US_PER_TOKEN = 0.01
"""1.3 ms for 131,072 tokens in blocks of 64, same bench."""
INTAKE_US_PER_TOKEN = 0.025
"""Prompts of 129,088 tokens that clients send at once come to the controller 3.2 ms after one another
(`scripts/bench-paper --real`): sent, read and checked by one process each."""
ANNOUNCE_US_PER_TOKEN = 0.015
"""What an announcement with 129,088 tokens takes beyond a round trip: the first stage is told them."""
FOREVER_MS = limits.MAX_DEADLINE_MS
"""A day, the longest that a controller can be told to wait: longer than anything that is planned."""
LONGEST_S = FOREVER_MS / 1e3 - 1
"""Virtual time of one plan; after it the controller would begin to ask after stages that it has not heard."""
Told = Callable[[PrefillEvent, Timings | None], None]


@dataclass(frozen=True, slots=True)
class Overheads:
    """What the control plane takes: seconds that every policy and mode pays alike."""

    round_s: float
    """One prepare round, there and back; every other message takes half of it."""
    hash_token_s: float = HASH_US_PER_TOKEN / 1e6
    intake_token_s: float = INTAKE_US_PER_TOKEN / 1e6
    """One prompt after the other: who asks at one moment arrives in a row, and on it depends who waits for whom."""
    announce_token_s: float = ANNOUNCE_US_PER_TOKEN / 1e6
    prepare_s: float = 20e-6
    """A slice of materialising on a stage's executor."""

    @classmethod
    def measured(cls, stages: int) -> Overheads:
        return cls((ROUND_MS[0] + ROUND_MS[1] * stages) / 1e3)


class Deployment:
    def __init__(
        self, profile: Profile, config: ControllerConfig, overheads: Overheads, told: Told, replicas: int = 1
    ) -> None:
        """`told` hears what clients are told, the times of an admission beside Admitted."""
        self.agenda = Agenda()
        self.profile, self.overheads = profile, overheads
        self.machine = ControllerMachine(config)
        self._told = told
        self._hop_s = overheads.round_s / 2
        self._chains = Chains(profile.block_tokens)
        self._prompts: dict[RequestId, Prompt] = {}
        self._tick_at = self._alarm_at = float("inf")
        self._taken_in_until = 0.0
        """When the prompts that were sent so far have come."""
        self.stages = {
            key: TimedStage(self, key, stage, overheads.prepare_s)
            for number in range(replicas)
            for place, stage in enumerate(profile.stages)
            for key in [DaemonKey(PipelineId(f"p{number}"), StageIndex(place))]
        }
        self._post(ev.LeadershipWon(Epoch(1), 0.0))
        for key in self.stages:
            self._post(ev.MemberUp(_record(profile, key), 0.0))

    @property
    def now(self) -> float:
        return self.agenda.now

    @property
    def serving(self) -> bool:
        return all(pipeline.serving for pipeline in self.machine.pipelines.values())

    def submit(
        self, request_id: RequestId, prompt: Prompt, pipeline: PipelineId | None = None, priority: int = 0
    ) -> None:
        """A client's prompt; it arrives half a round later. The controller chooses where no pipeline is named."""
        tokens = bytes(4 * prompt.tokens)  # zero pages: only their number is read
        request = PrefillRequest(request_id, tokens, pipeline, priority=priority)
        self._prompts[request_id] = prompt
        came = max(self._taken_in_until, self.now) + prompt.tokens * self.overheads.intake_token_s
        self._taken_in_until = came
        self.agenda.at(came + self._hop_s, lambda: self._post(ev.Submit(request, self.now)))

    def run(self, until: Callable[[], bool]) -> None:
        """Raises as `step` does, if the condition does not hold before."""
        while not until():
            self.step()

    def step(self) -> None:
        """What is due next. InvalidRequest if that is later than a plan may last, InternalError if it is nothing."""
        due = self.agenda.next_at
        if due is None or (due > LONGEST_S and not self.agenda.foreground):
            raise InternalError("nothing is left to happen", field="agenda", value=self.now)
        if due > LONGEST_S:
            raise InvalidRequest(
                f"this takes more than {LONGEST_S:g} s of virtual time: ask for less",
                field="virtual_s", value=due, limit=LONGEST_S,
            )  # fmt: skip
        self.agenda.step()

    # --- the controller ---------------------------------------------------------------------------

    def _post(self, event: ev.Event) -> None:
        for action in self.machine.handle(event):
            self._perform(action)
        deadline = self.machine.next_deadline()
        if deadline is not None and deadline < self._tick_at:
            self._plan_tick(max(deadline, self.now + 1e-6))
        wake_at = self.machine.wake_at
        if wake_at is not None and wake_at < self._alarm_at:
            self._set_alarm(wake_at)

    def _plan_tick(self, at: float) -> None:
        self._tick_at = at
        self.agenda.at(at, lambda: self._tick(at), background=True)

    def _tick(self, planned: float) -> None:
        """An earlier tick makes a later one needless."""
        if planned == self._tick_at:
            self._tick_at = float("inf")
            self._post(ev.Tick(self.now))

    def _set_alarm(self, at: float) -> None:
        """Wake the core at the instant it asks for; an earlier alarm makes a later one needless."""
        self._alarm_at = at
        self.agenda.at(max(at, self.now), lambda: self._ring(at))

    def _ring(self, planned: float) -> None:
        if planned == self._alarm_at:
            self._alarm_at = float("inf")
            self._post(ev.PauseOver(self.now))

    def _perform(self, action: ev.Action) -> None:
        match action:
            case ev.SendWave():
                self._later(self._hop_s, lambda: self._send_wave(action))
            case ev.SendRound(key, asked):
                self._later(self._hop_s, lambda: self._send_round(key, asked))
            case ev.Emit(event, timings):
                self._told(event, timings)
            case ev.AnnounceRequest():
                self._later(self._hop_s, lambda: self._announce(action))
            case ev.HashPrompt(request_id=request_id, life=life):
                prompt = self._prompts.pop(request_id)
                hashes, seconds = self._chains.hashes(prompt), prompt.tokens * self.overheads.hash_token_s
                self._later(seconds, lambda: self._post(ev.Hashed(request_id, hashes, life, self.now)))
            case ev.FormPipeline():
                self._later(self._hop_s, lambda: self._form(action))
            case ev.EndFormation(cause=cause):
                raise from_info(cause)
            case ev.WatchAgain(key=key, from_seq=seq):
                self._later(self._hop_s, lambda: self.stages[key].watch(seq))
            case _:
                raise InternalError(f"nothing fails here: {type(action).__name__}", field="action", value=str(action))

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        self.agenda.at(self.agenda.now + seconds, work)

    # --- to the stages and back: messages of one kind to all stages travel as one ---------------------

    def _form(self, action: ev.FormPipeline) -> None:
        replies = [(plan, self.stages[plan.key].join(plan)) for plan in action.plans]

        def joined() -> None:
            for plan, reply in replies:
                self._post(ev.Joined(plan.key, action.formation, reply, self.now))

        self._later(self._hop_s, joined)
        for plan in action.plans:
            self.stages[plan.key].watch(0)

    def _announce(self, action: ev.AnnounceRequest) -> None:
        request, acks = action.request, list[tuple[DaemonKey, AnnounceAck]]()
        for key, fence, _ in action.targets:
            frame = AnnounceFrame(fence, action.key, request.prompt_tokens, 0, action.block_hashes, 0, b"", True)
            acks.append((key, self.stages[key].announce(frame)))

        def acked() -> None:
            for key, ack in acks:
                self._post(ev.AnnounceAcked(key, ack, self.now))

        self._later(self._hop_s + request.prompt_tokens * self.overheads.announce_token_s, acked)

    def _send_round(self, key: DaemonKey, asked: Round) -> None:
        votes = self.stages[key].round(asked)
        self._later(self._hop_s, lambda: self._post(ev.VotesArrived(key, votes, self.now)))

    def _send_wave(self, action: ev.SendWave) -> None:
        for key, fence in action.targets:
            self.stages[key].enqueue(WaveCommand(replace(fence, ordinal=action.ordinal), action.rows, action.limit_ms))

    def reported(self, key: DaemonKey, report: WaveReport) -> None:
        self._later(self._hop_s, lambda: self._post(ev.ReportArrived(key, report, self.now)))

    def digested(self, key: DaemonKey, digest: Digest) -> None:
        self._later(self._hop_s, lambda: self._post(ev.DigestArrived(key, digest, self.now)))

    def passed_on(self, key: DaemonKey, ordinal: WaveOrdinal, tokens: int) -> None:
        following = self.stages[replace(key, stage=StageIndex(key.stage + 1))]
        self._later(self.profile.wire_us(tokens) / 1e6, lambda: following.arrive(ordinal))


def config_of(profile: Profile, policy: str, mode: str) -> ControllerConfig:
    """The settings that a controller process has, for a profile; what watches for failures is as good as off."""
    return ControllerConfig(
        wave_tokens=profile.wave_tokens,
        lanes=profile.lanes,
        policy=policy,
        mode=mode,
        min_wave_tokens=profile.min_wave_tokens,
        fills=profile.fills,
        link=LinkKind.GRPC,
        snapshot_tokens=profile.snapshot_tokens,
        round_rest=ROUND_REST,
        release_lag_ms=RELEASE_LAG_MS,
        default_deadline_ms=limits.MAX_DEADLINE_MS,
        max_queued_requests=1 << 20,
        max_queued_tokens=1 << 40,
        heartbeat_ms=FOREVER_MS - 1,
        silence_ms=FOREVER_MS,
        round_deadline_ms=FOREVER_MS,
        announce_deadline_ms=FOREVER_MS,
        wave_timeout_ms=FOREVER_MS,
        inventory_ms=FOREVER_MS,
        traced=False,
    )


def with_block_tokens(profile: Profile, block_tokens: int) -> Profile:
    """The same devices with another block size: pools hold as many tokens, a block takes its share of copying.

    InvalidRequest if a pool would hold no block."""
    scale = profile.block_tokens / block_tokens
    stages = tuple(
        replace(
            stage,
            pool_blocks=int(stage.pool_blocks * scale),
            host_pool_blocks=int(stage.host_pool_blocks * scale),
            copy_us=stage.copy_us / scale,
        )
        for stage in profile.stages
    )
    least = max(profile.min_wave_tokens, block_tokens)
    changed = replace(profile, stages=stages, block_tokens=block_tokens, min_wave_tokens=least)
    changed.check()
    return changed


def _record(profile: Profile, key: DaemonKey) -> MemberRecord:
    """A daemon of the profile's model, its layers spread evenly."""
    stage, stages = profile.stages[key.stage], len(profile.stages)
    preset = Preset(layers=profile.layers, attention_every=profile.attention_every, window=profile.window)
    model = ModelFacts(
        profile.name,
        profile.name,
        preset.layers,
        preset.vocabulary,
        preset.window,
        recurrent_layers=preset.recurrent_layers,
    )
    first, last = (profile.layers * place // stages for place in (key.stage, key.stage + 1))
    groups = model.groups_of(first, last)
    return MemberRecord(
        cluster="planned",
        key=key,
        incarnation=Incarnation(key.stage + 1),
        stages=stages,
        ranks=1,
        address=f"{key.pipeline}-{key.stage}:1",
        link_address="",
        engine="emulated",
        model=model,
        first_layer=first,
        last_layer=last,
        block_tokens=profile.block_tokens,
        pool_blocks=stage.pool_blocks,
        host_pool_blocks=stage.host_pool_blocks,
        protocol=limits.PROTOCOL_VERSION,
        groups=groups,
        state_slots=stage.state_slots if CacheGroup.RECURRENT in groups else 0,
    )
