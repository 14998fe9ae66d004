"""What requests ask of every stage, over the cache groups of one formation (DESIGN.md).

Owns the entries of a round (candidates, lowered endpoints, promised snapshots, the oversized exemption), what
is noted from votes about groups, and the snapshot positions of an admitted request. Does not own when a
round begins or what follows from its votes: `admission` does.
"""

from __future__ import annotations

from collections.abc import Iterable

from wavepp_controller.core.attempt import Shortage
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.digests import groups_of
from wavepp_controller.core.formation import PipelineFormation
from wavepp_controller.core.ready import room, slots
from wavepp_controller.core.request import Request
from wavepp_controller.core.rounds import Answer, Entries
from wavepp_controller.core.snapshot_policy import SnapshotPolicy
from wavepp_proto.terms import CacheGroup, DaemonKey, Prepare, Revise, Vote


class Demand:
    def __init__(self, formation: PipelineFormation, config: ControllerConfig) -> None:
        daemons = formation.daemons.values()
        self._daemons = formation.daemons
        self.attention = any(CacheGroup.ATTENTION in groups_of(daemon) for daemon in daemons)
        fewest_slots = min(
            (daemon.state_slots for daemon in daemons if CacheGroup.RECURRENT in groups_of(daemon)),
            default=None,
        )
        self.policy = SnapshotPolicy.of(formation.block_tokens, config.snapshot_tokens, fewest_slots)
        self._usable_blocks = min(daemon.pool_blocks - daemon.plan.floor_blocks for daemon in daemons)

    def oversized(self, request: Request) -> bool:
        """It fits some pool only without the headroom."""
        return request.blocks > self._usable_blocks

    def entries(self, revising: Iterable[Request], preparing: Iterable[Request]) -> dict[DaemonKey, Entries]:
        """Revises go to whoever holds more, or is not committed; prepares go to all."""
        entries = {key: Entries() for key in self._daemons}
        for request in revising:
            target = request.current.revise_to
            if target is None:
                continue
            revise = Revise(request.key, target, snapshots=self.policy.promised(target, request.prompt_tokens))
            for key, held in request.current.held.items():
                if held.endpoint > target or not held.committed:
                    entries[key].revises.append(revise)
        for request in preparing:
            candidate = request.current.candidate
            promised = self.policy.promised(candidate, request.prompt_tokens)
            prepare = Prepare(
                request.key, candidate, snapshots=promised, ignore_headroom=request.current.ignore_headroom
            )
            for wanted in entries.values():
                wanted.prepares.append(prepare)
        return entries

    def note_hits(self, request: Request, key: DaemonKey, vote: Vote) -> None:
        """What a stage alone could reuse, by its first vote: later ones come after this request's own lowering."""
        request.current.note_own_hit(key.stage, min(vote.own_hit, request.cap))
        request.current.note_group_hits(vote.group_endpoints)

    def admit(self, request: Request, endpoint: int, now: float) -> None:
        """Fix the endpoint, and the snapshots to take on the way to the end of the prompt."""
        current = request.current
        current.admit(endpoint, now)
        if not self.policy.most:
            return
        if current.lost_to_snapshots:
            current.wanted_snapshots += (endpoint + current.lost_to_snapshots,)
        current.promised_snapshots = self.policy.promised(endpoint, request.prompt_tokens)
        current.snapshots = self.policy.positions(
            endpoint, request.prompt_tokens, current.wanted_snapshots, current.promised_snapshots
        )


def shortage(request: Request, vote: Vote, answer: Answer) -> Shortage:
    """What a later capacity must show before the request is tried again.

    An oversized request that was not alone is told what it lacks above the headroom; alone, its blocks are enough."""
    missing = {short.group: short.blocks for short in vote.shortfall}
    states = missing.pop(CacheGroup.RECURRENT, 0)
    blocks = sum(missing.values())
    had = answer.capacity
    wanted = room(had) + blocks if blocks or states else room(had) + 1
    return Shortage(
        had.seq,
        min(wanted, request.blocks) if request.current.ignore_headroom else wanted,
        slots(had) + states if states else 0,
    )
