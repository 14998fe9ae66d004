"""Builders and a driver for the stage core, without a shell.

`StageDriver` plays the controller, the executor and the copy thread of one stage: it counts ordinals,
posts events at its own clock and checks every invariant after each. Used by unit and property tests of
the stage core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from wavepp_proto.hashing import HashScope, hash_blocks
from wavepp_proto.terms import (
    AnnounceFrame,
    Attempt,
    CacheGroup,
    DaemonKey,
    Epoch,
    Fence,
    Formation,
    HoldKey,
    Incarnation,
    JoinPlan,
    LinkKind,
    PipelineId,
    Prepare,
    Release,
    RequestId,
    Revise,
    Round,
    Row,
    RowFault,
    Sampling,
    StageIndex,
    Vote,
    WaveCommand,
    WaveOrdinal,
)
from wavepp_stage.core import events as ev
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.machine import StageMachine
from wavepp_stage.core.work import CopyLot

B = 4
"""Tokens in a block of these tests."""
SCOPE = HashScope("model", "layout")
A = TypeVar("A")


def packed_hashes(tokens: Sequence[int], block_tokens: int = B) -> bytes:
    return hash_blocks(SCOPE, np.asarray(tokens, dtype="<i4").tobytes(), block_tokens)


def hashes(tokens: Sequence[int], block_tokens: int = B) -> BlockHashes:
    return BlockHashes.unpack(packed_hashes(tokens, block_tokens))


def key(name: str, attempt: int = 1) -> HoldKey:
    return HoldKey(RequestId(name), Attempt(attempt))


def join_plan(
    *,
    epoch: int = 1,
    formation: int = 1,
    incarnation: int = 7,
    stage: int = 0,
    stages: int = 2,
    pool_blocks: int = 16,
    floor_blocks: int = 0,
    layers: tuple[int, int] = (0, 4),
    block_tokens: int = B,
    host_pool_blocks: int = 0,
    state_slots: int = 0,
    groups: tuple[CacheGroup, ...] = (CacheGroup.ATTENTION,),
    silence_ms: int = 1250,
) -> JoinPlan:
    return JoinPlan(
        fence=Fence(Epoch(epoch), Formation(formation), Incarnation(incarnation)),
        key=DaemonKey(PipelineId("p"), StageIndex(stage)),
        stages=stages,
        ranks=1,
        model_fingerprint="model",
        first_layer=layers[0],
        last_layer=layers[1],
        block_tokens=block_tokens,
        pool_blocks=pool_blocks,
        host_pool_blocks=host_pool_blocks,
        floor_blocks=floor_blocks,
        wave_tokens=1024,
        lanes=8,
        link=LinkKind.NONE,
        link_store="",
        peers=(),
        deadline_ms=1000,
        silence_ms=silence_ms,
        state_slots=state_slots,
        groups=groups,
    )


@dataclass
class StageDriver:
    """One stage machine with a controller, an executor and a copy thread that do as they are told."""

    machine: StageMachine
    plan: JoinPlan
    round_ordinal: int = 0
    wave_ordinal: int = 0
    now: float = 0.0
    """Monotonic seconds of every event."""
    lots: deque[CopyLot] = field(default_factory=deque)
    """Copies under way, in order."""

    @classmethod
    def joined(cls, plan: JoinPlan | None = None, machine: StageMachine | None = None) -> StageDriver:
        plan = plan or join_plan()
        driver = cls(machine or StageMachine(plan.fence.incarnation), plan)
        driver.post(ev.JoinAsked(plan, driver.now))
        return driver

    def rejoin(self, plan: JoinPlan) -> list[ev.Action]:
        self.plan, self.wave_ordinal = plan, 0
        return self.post(ev.JoinAsked(plan, self.now))

    def post(self, event: ev.Event) -> list[ev.Action]:
        actions = self.machine.handle(event)
        self.lots += [action.lot for action in actions if isinstance(action, ev.StartCopies)]
        self.machine.check()
        return actions

    def hear(self) -> list[ev.Action]:
        """A heartbeat of the controller."""
        return self.post(ev.ControllerHeard(self.fence(), self.now))

    def end_copies(self, ok: bool = True) -> list[ev.Action]:
        """The copy thread is done with its oldest lot."""
        return self.post(ev.CopiesEnded(self.lots.popleft().number, ok, self.now))

    def one(self, event: ev.Event, kind: type[A]) -> A:
        """The only action of `kind` that `event` caused."""
        (action,) = [action for action in self.post(event) if isinstance(action, kind)]
        return action

    def fence(self, ordinal: int = 0) -> Fence:
        fence = self.plan.fence
        return Fence(fence.epoch, fence.formation, fence.incarnation, ordinal)

    def announce(self, name: str, tokens: Sequence[int], *, send_tokens: bool = True, attempt: int = 1) -> HoldKey:
        frame = self.frame(name, tokens, send_tokens=send_tokens, attempt=attempt)
        self.post(ev.Announced(frame, self.now))
        return frame.key

    def frame(self, name: str, tokens: Sequence[int], *, send_tokens: bool = True, attempt: int = 1) -> AnnounceFrame:
        packed = np.asarray(tokens, dtype="<i4").tobytes()
        return AnnounceFrame(
            self.fence(),
            key(name, attempt),
            prompt_tokens=len(tokens),
            first_block=0,
            block_hashes=packed_hashes(tokens, self.plan.block_tokens),
            first_token=0,
            token_ids=packed if send_tokens else b"",
            last=True,
            sampling=Sampling(seed=11),
        )

    def next_round(
        self,
        *,
        releases: Sequence[Release] = (),
        revises: Sequence[Revise] = (),
        prepares: Sequence[Prepare] = (),
    ) -> ev.RoundArrived:
        self.round_ordinal += 1
        asked = Round(self.fence(self.round_ordinal), 1000, tuple(releases), tuple(revises), tuple(prepares))
        return ev.RoundArrived(asked, self.now)

    def votes(self, **entries: Sequence[Release] | Sequence[Revise] | Sequence[Prepare]) -> tuple[Vote, ...]:
        return self.one(self.next_round(**entries), ev.SendVotes).votes.votes  # type: ignore[arg-type]

    def prepare(self, hold: HoldKey, candidate: int = 0, *, snapshots: int = 0, ignore_headroom: bool = False) -> Vote:
        (vote,) = self.votes(prepares=[Prepare(hold, candidate, (), snapshots, ignore_headroom)])
        return vote

    def revise(self, hold: HoldKey, endpoint: int, *, snapshots: int = 0) -> Vote:
        (vote,) = self.votes(revises=[Revise(hold, endpoint, snapshots=snapshots)])
        return vote

    def release(self, hold: HoldKey, after_wave: int | None = None, *, ended: bool = False) -> list[ev.Action]:
        after = None if after_wave is None else WaveOrdinal(after_wave)
        return self.post(ev.ReleaseArrived(self.fence(), Release(hold, after, ended), self.now))

    def send_wave(self, *rows: Row) -> list[ev.Action]:
        return self.post(self.next_wave(*rows))

    def next_wave(self, *rows: Row) -> ev.WaveArrived:
        self.wave_ordinal += 1
        return ev.WaveArrived(WaveCommand(self.fence(self.wave_ordinal), rows), self.now)

    def prepare_wave(self, ordinal: int) -> ev.WavePrepared:
        """As an executor does: post until the last slice is done and the last copy is complete."""
        while True:
            for action in self.post(ev.PrepareWave(WaveOrdinal(ordinal), self.now)):
                if isinstance(action, ev.WavePrepared):
                    return action
                assert not isinstance(action, ev.CoreError), action
                if isinstance(action, ev.WaveWaits):
                    assert self.lots, "the wave waits and nothing is copied"
            if self.lots:
                self.end_copies()

    def retire_wave(self, ordinal: int, void: int = 0, faults: tuple[RowFault, ...] = ()) -> ev.WaveDone:
        return self.one(ev.WaveRetired(WaveOrdinal(ordinal), void, faults, (), self.now), ev.WaveDone)

    def run_wave(self, *rows: Row) -> tuple[ev.WavePrepared, ev.WaveDone]:
        """Send, prepare and retire one wave whose rows are fine."""
        self.send_wave(*rows)
        prepared = self.prepare_wave(self.wave_ordinal)
        void = sum(row.void << index for index, row in enumerate(prepared.work.rows))
        return prepared, self.retire_wave(self.wave_ordinal, void, prepared.faults)

    def prefill(self, name: str, tokens: Sequence[int]) -> ev.WavePrepared:
        """Announce, prepare at the stage's own hit, run as one chunk, release."""
        hold = self.announce(name, tokens)
        start = self.prepare(hold).own_hit
        if start:
            self.prepare(hold, start)
        prepared, _ = self.run_wave(Row(hold, start, len(tokens) - start, final=True))
        self.release(hold, self.wave_ordinal)
        return prepared
