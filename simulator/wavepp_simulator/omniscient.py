"""What a perfect, omniscient cache would allow: the reference for hints and admitted endpoints.

Reads the true contents of every stage core by dumb walks over whole sets, never the index, the digests or a
core's own search. Owns the comparison and its counts:

    never      an admitted endpoint beyond the truth of that moment
    settled    (every digest was heard, nothing was evicted since) an endpoint, or a hint, short of the truth
    drained    an index that is not, block for block, what the stages hold

Called by `controller` when it prepares, hears a digest and admits, by `world` when all has ended. Decides nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wavepp_controller.core.index import ReuseIndex, short_chain
from wavepp_proto.hashing import HASH_BYTES
from wavepp_proto.terms import Admitted, CacheGroup, DaemonKey, Digest, HoldKey
from wavepp_simulator.ledger import Violation
from wavepp_stage.core.block_cache import BlockCache

if TYPE_CHECKING:
    from wavepp_simulator.controller import SimController
    from wavepp_simulator.stage import SimStage
    from wavepp_simulator.world import World


@dataclass(frozen=True, slots=True)
class Contents:
    """What one stage could reuse right now, by full hash of the prefix."""

    groups: tuple[CacheGroup, ...]
    blocks: frozenset[bytes]
    snapshots: frozenset[bytes]
    dropped: int
    """Blocks and snapshots that this stage has given up so far."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The truth when a request was prepared, all digests heard."""

    endpoint: int
    dropped: int


class Omniscient:
    def __init__(self, world: World) -> None:
        self._world = world
        self._asked: dict[HoldKey, _Asked] = {}
        self.counts = Counter[str]()

    def prepares(self, controller: SimController, key: HoldKey) -> None:
        """The controller asks every stage to hold a prefix of the request."""
        self._asked.pop(key, None)
        if not controller.settled:
            return
        contents = self._contents(controller)
        if contents is None:
            return
        truth = self._truth(controller, key, contents)
        self._check_hint(controller, key, truth)
        self._asked[key] = _Asked(truth, sum(found.dropped for found in contents))

    def _check_hint(self, controller: SimController, key: HoldKey, truth: int) -> None:
        """What the digests say by now is neither above the truth nor below it."""
        self.counts["hints"] += 1
        size, request = self._world.shape.block_tokens, controller.asked(key.request_id).request
        chain = short_chain(controller.hashes[key.request_id])[: (request.prompt_tokens - 1) // size]
        for pipeline in controller.machine.pipelines.values():
            hint = pipeline.index.hint_blocks(chain) * size
            if hint != truth:
                raise Violation("hint", f"{key.request_id} is hinted {hint}, the digests of all stages say {truth}")

    def heard(self, controller: SimController, key: DaemonKey, digest: Digest) -> None:
        """A node never outlives its parent, in no digest: what the index knows of a stage stays closed upwards."""
        if not any(group.removed for group in digest.groups):
            return
        for pipeline in controller.machine.pipelines.values():
            for request_id, packed in controller.hashes.items():
                chain = short_chain(packed)
                known = [pipeline.index.own_blocks(key, chain[at : at + 1]) for at in range(len(chain))]
                if known != sorted(known, reverse=True):
                    raise Violation("hint", f"digest {digest.seq} of stage {key.short} tears {request_id}: {known}")

    def admits(self, controller: SimController, event: Admitted) -> None:
        key = HoldKey(event.request_id, event.attempt)
        asked = self._asked.pop(key, None)
        contents = self._contents(controller)
        if contents is None:
            return
        truth = self._truth(controller, key, contents)
        # A copy that fails takes away what is held already: that request's rows will be void.
        if event.endpoint > truth and not self._world.copies_failed:
            raise Violation("endpoint", f"{key} is admitted at {event.endpoint}, the caches have {truth}")
        if asked is not None and asked.dropped == sum(found.dropped for found in contents):
            self.counts["held_to_truth"] += 1
            if event.endpoint < asked.endpoint:
                what = f"{event.endpoint}, though all digests said {asked.endpoint} and nothing was evicted since"
                raise Violation("endpoint", f"{key} is admitted at {what}")
        self.counts["admissions"] += 1
        self.counts["equal"] += event.endpoint == truth
        self.counts["tokens_lost"] += max(0, truth - event.endpoint)
        self.counts["tokens_possible"] += truth

    def drains(self, controller: SimController) -> None:
        """Everything has ended: what the digests told of each stage is what it holds."""
        contents = self._contents(controller) if controller.settled else None
        if contents is None:
            return
        for key, found in zip(controller.links, contents, strict=True):
            truth = {CacheGroup.ATTENTION: found.blocks, CacheGroup.RECURRENT: found.snapshots}
            for pipeline in controller.machine.pipelines.values():
                for group in found.groups:
                    self.counts["indexes"] += 1
                    told, held = _indexed(pipeline.index, key, group), _short(truth[group])
                    if told != held:
                        what = f"{len(told - held)} it has not, and lacks {len(held - told)} of {len(held)}"
                        raise Violation("hint", f"of stage {key.short} the index tells {what} in {group.value}")

    def _contents(self, controller: SimController) -> list[Contents] | None:
        """Of all stages; None if one of them has left the controller's formation, which it may not know yet."""
        links = controller.links
        stages = [(self._world.stages[self._world.place_of(key)], link.plan) for key, link in links.items()]
        if not all(stage.process.alive and stage.plan == plan for stage, plan in stages):
            return None
        return [contents_of(stage) for stage, _ in stages]

    def _truth(self, controller: SimController, key: HoldKey, stages: list[Contents]) -> int:
        """The longest endpoint that all stages could reuse, in tokens."""
        request = controller.asked(key.request_id).request
        packed = controller.hashes[key.request_id]
        chain = [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]
        size = self._world.shape.block_tokens
        for depth in range((request.prompt_tokens - 1) // size, 0, -1):
            if all(_usable(found, chain[:depth]) for found in stages):
                return depth * size
        return 0


def _usable(found: Contents, prefix: list[bytes]) -> bool:
    if CacheGroup.ATTENTION in found.groups and not all(block in found.blocks for block in prefix):
        return False
    return CacheGroup.RECURRENT not in found.groups or prefix[-1] in found.snapshots


def _indexed(index: ReuseIndex, key: DaemonKey, group: CacheGroup) -> frozenset[int]:
    """Short hashes under the bit of a daemon in sync."""
    bit = index._sources[key].bit
    assert bit is not None, "every daemon is in sync"
    shards = index._tables[group]._shards
    return frozenset(found for shard in shards for found, mask in shard.items() if mask & bit)


def _short(blocks: frozenset[bytes]) -> frozenset[int]:
    return frozenset(short_chain(b"".join(blocks)).tolist())


def contents_of(stage: SimStage) -> Contents:
    """Read from the block tree of our own cache manager, the one that every simulated stage has."""
    cache = stage.machine._cache
    assert isinstance(cache, BlockCache), "a stage in a formation has a cache"
    store = cache._store
    alive = store.tree._alive.nonzero()[0].tolist()
    hash_of = {node: store.tree._full[node].tobytes() for node in alive}
    snapshots = frozenset(hash_of[node] for node in alive if store.states._slot[node] >= 0)
    dropped = store.dropped + store.states.evicted
    return Contents(stage.record.groups, frozenset(hash_of.values()), snapshots, dropped)
