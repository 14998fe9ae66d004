"""When a pipeline forms, with whom, and how often it is tried (DESIGN.md).

Owns the members, the operator's overrides, formation numbers and the pause between tries. Holds the
present formation. Does not know requests: `pipeline` ends and begins their service around it.
"""

from __future__ import annotations

from collections.abc import Mapping

from wavepp_controller.core.causes import stages_of
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import EndFormation, FormPipeline, ReformAsked, StageShape
from wavepp_controller.core.formation import Daemon, PipelineFormation, Terms, choose_link, draw_up
from wavepp_controller.core.members import Members, Roster
from wavepp_controller.core.outbox import Outbox
from wavepp_controller.core.verdicts import PipelineFacts
from wavepp_proto import limits
from wavepp_proto.errors import FormationEnded, InvalidRequest, JoinRefused, WaveppError
from wavepp_proto.terms import (
    DaemonKey,
    Epoch,
    Formation,
    Incarnation,
    LinkKind,
    MemberRecord,
    PipelineId,
    RoundOrdinal,
)

LOST_HOLD_S = 1.5 * limits.MEMBER_TTL_S
"""A silent incarnation that is still registered after this is alive, and may be asked to join again; a later one
of its place need not wait."""


class Forming:
    def __init__(self, pipeline: PipelineId, config: ControllerConfig, out: Outbox) -> None:
        self._pipeline, self._config, self._out = pipeline, config, out
        self.members = Members()
        self.present: PipelineFormation | None = None
        self.number = Formation(0)
        self.facts: PipelineFacts | None = None
        """The latest known; a pipeline that lost its members keeps them."""
        self.last_fault: WaveppError | None = None
        self._shapes: dict[int, StageShape] = {}
        self._terms = Terms(config.link, config.wave_tokens)
        self._epoch: Epoch | None = None
        self._failures = 0
        """Formations in a row that ended before a wave went through."""
        self._retry_at = 0.0
        self._next_rounds: dict[tuple[DaemonKey, Incarnation], RoundOrdinal] = {}
        self._untold: set[DaemonKey] = set()
        """Daemons of the present formation that nobody tells of its end."""

    def lead(self, epoch: Epoch | None, now: float) -> None:
        """Take or lose authority; round ordinals start anew with an epoch."""
        self._epoch, self._next_rounds = epoch, {}
        self._failures, self._retry_at = 0, now

    def standing(self, key: DaemonKey, incarnation: Incarnation) -> bool:
        daemon = self.present.daemons.get(key) if self.present is not None else None
        return daemon is not None and daemon.record.incarnation == incarnation

    def superseded(self) -> Daemon | None:
        """A daemon of the present formation that is somebody else by now."""
        daemons = () if self.present is None else self.present.daemons.values()
        return next((one for one in daemons if self.members.reborn(one.record)), None)

    def roster(self, now: float) -> Roster:
        return self.members.roster(self._shapes, now)

    def members_changed(self, now: float) -> None:
        """Somebody new may be what was missing: do not sit out a pause."""
        self._retry_at = now

    def consider(self, now: float) -> PipelineFormation | None:
        """Begin a formation if everybody is there; the new one, or None."""
        if self.present is not None:
            return None
        roster = self.roster(now)
        self._learn(roster)
        if self._epoch is None or not roster.complete or now < self._retry_at:
            return None
        self.number = Formation(self.number + 1)
        try:
            rounds = self._rounds_of(roster.records)
            self.present = draw_up(roster.records, self.number, self._epoch, self._terms, self._config, rounds, now)
        except JoinRefused as error:
            self._back_off(error, now)
            return None
        self._out.count("formations")
        self._out.send(FormPipeline(self._pipeline, self.number, self.present.plans))
        return self.present

    def serve(self, formation: PipelineFormation) -> tuple[PipelineFacts, dict[DaemonKey, RoundOrdinal]]:
        """All joined: what the pipeline is now, and where each daemon's round ordinals go on."""
        for daemon in formation.daemons.values():
            self.members.joined(daemon.record, 0 if daemon.reply is None else daemon.reply.engine_load)
        self.facts = formation.facts()
        return self.facts, self._rounds_of({key: daemon.record for key, daemon in formation.daemons.items()})

    def worked(self) -> None:
        """A wave went through: earlier failures are over."""
        self._failures = 0

    def end(self, cause: WaveppError, now: float, rounds: Mapping[DaemonKey, RoundOrdinal]) -> None:
        """Tell the daemons and drop the formation; the next try comes after a pause."""
        ended = self.present
        if ended is None:
            return
        targets = tuple((key, fence) for key, fence in ended.fences() if key not in self._untold)
        self._out.send(EndFormation(self._pipeline, ended.number, targets, cause.info()))
        self._out.count("formations_ended")
        self.drop(rounds)
        self._back_off(cause, now)

    def drop(self, rounds: Mapping[DaemonKey, RoundOrdinal]) -> None:
        """Forget the formation and tell nobody; `rounds` are the ordinals it had come to."""
        if self.present is not None:
            self._next_rounds = {
                (key, self.present.daemons[key].record.incarnation): ordinal for key, ordinal in rounds.items()
            }
        self.present = None
        self._untold.clear()
        self.members.formation_ended()

    def lost(self, key: DaemonKey, incarnation: Incarnation, now: float, *, hold: bool, tell: bool = True) -> None:
        """A daemon did not answer; with `hold`, leave this incarnation out until it must be alive.

        Unless `tell`, it is not told of the formation's end: if it lives, it fences itself for want of heartbeats,
        and comes back at once as somebody new, whom no hold concerns."""
        self.members.lost(key, incarnation, now + LOST_HOLD_S if hold else now)
        if not tell:
            self._untold.add(key)

    def reform(self, asked: ReformAsked) -> None:
        """Take the operator's overrides for the next formations; raises if they do not fit."""
        shapes = {**self._shapes, **{shape.stage: shape for shape in asked.shapes}}
        roster = self.roster(asked.now)
        first = next(iter(roster.records.values()), None)
        _check_shapes(asked.shapes, 0 if first is None else first.stages, (self._config.floor_blocks or 0) + 1)
        terms = Terms(asked.link or self._terms.link, asked.wave_tokens or self._terms.wave_tokens)
        if first is not None:
            _check_wave_tokens(asked.wave_tokens, first.block_tokens)
            refused = {refused.record.key for refused in roster.refused}
            for bad in self.members.roster(shapes, asked.now).refused:
                if bad.record.key not in refused:
                    raise bad.error
            if choose_link(roster.records, terms.link) is LinkKind.NCCL:
                self._check_devices()
        self._shapes, self._terms = shapes, terms
        self._failures = 0

    def _check_devices(self) -> None:
        """Link nccl moves CUDA memory only; a daemon tells its device when it joins, and refuses by itself before."""
        for key, daemon in () if self.present is None else self.present.daemons.items():
            device = "" if daemon.reply is None else daemon.reply.device
            if device and not device.startswith("cuda"):
                raise InvalidRequest(
                    f"{key} computes on {device}, and link nccl needs cuda",
                    field="link",
                    value=LinkKind.NCCL.value,
                    limit="cuda",
                    stage=key.stage,
                    device=device,
                )

    def hurry(self, now: float) -> None:
        """The end was asked for: nothing to wait for."""
        self._retry_at = now

    def next_deadline(self, now: float) -> float | None:
        if self.present is not None:
            return None if self.present.serving else self.present.join_deadline
        returns = self.members.next_return(now)
        waits = [at for at in (self._retry_at, returns) if at is not None and at > now]
        return min(waits, default=None)

    def late(self, now: float) -> FormationEnded | None:
        """Why the joining formation must end; None while it has time."""
        joining = self.present
        if joining is None or joining.serving or now < joining.join_deadline:
            return None
        slow = stages_of(key for key, daemon in joining.daemons.items() if daemon.reply is None)
        return FormationEnded(
            f"stage {slow} did not join within {self._config.join_deadline_ms} ms",
            field="join_deadline_ms",
            limit=self._config.join_deadline_ms,
            stages=slow,
        )

    def _rounds_of(self, records: Mapping[DaemonKey, MemberRecord]) -> dict[DaemonKey, RoundOrdinal]:
        """Ordinal of each daemon's next round."""
        return {key: self._next_rounds.get((key, r.incarnation), RoundOrdinal(1)) for key, r in records.items()}

    def _learn(self, roster: Roster) -> None:
        if roster.records:
            self.facts = PipelineFacts.of(roster.records.values())

    def _back_off(self, cause: WaveppError, now: float) -> None:
        pause = min(self._config.reform_backoff_ms << min(self._failures, 16), self._config.reform_backoff_max_ms)
        self._failures += 1
        self._retry_at = now + pause / 1e3
        self.last_fault = cause


def _check_shapes(shapes: tuple[StageShape, ...], stages: int, least_blocks: int) -> None:
    """Each stage once, and pools that a daemon could have."""
    seen: set[int] = set()
    for shape in shapes:
        if not 0 <= shape.stage < stages:
            raise InvalidRequest(f"no stage {shape.stage}", field="stage", value=shape.stage, limit=stages)
        if shape.stage in seen:
            raise InvalidRequest(f"stage {shape.stage} is there twice", field="shapes", value=shape.stage, limit=1)
        seen.add(shape.stage)
        blocks, limit = shape.pool_blocks, f"{least_blocks}..{limits.MAX_POOL_BLOCKS}"
        if blocks is not None and not least_blocks <= blocks <= limits.MAX_POOL_BLOCKS:
            raise InvalidRequest(
                f"pool_blocks {blocks} is not in {limit}", field="pool_blocks", value=blocks, limit=limit
            )


def _check_wave_tokens(wave_tokens: int | None, block_tokens: int) -> None:
    """An operator who is there is told, where a start-up default is rounded (`align_wave_tokens`)."""
    if wave_tokens is None:
        return
    if wave_tokens > limits.MAX_WAVE_TOKENS:
        limit = f"{block_tokens}..{limits.MAX_WAVE_TOKENS}"
        raise InvalidRequest(
            f"wave_tokens {wave_tokens} is not in {limit}", field="wave_tokens", value=wave_tokens, limit=limit
        )
    if wave_tokens < block_tokens or wave_tokens % block_tokens:
        raise InvalidRequest(
            f"{wave_tokens} is no multiple of the block size {block_tokens}",
            field="wave_tokens",
            value=wave_tokens,
            limit=block_tokens,
        )
