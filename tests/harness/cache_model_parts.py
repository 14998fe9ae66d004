"""What the model of a stage's cache (cache_model.py) is made of.

Plain records and what can be read off one of them; the model moves them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.harness.stage_core import B
from wavepp_proto.hashing import blocks_for

Prefix = tuple[int, ...]
"""Tokens of whole blocks, from the start of a prompt."""


@dataclass(eq=False)
class Snapshot:
    refs: int = 0
    stamp: int = 0
    needed: bool = False
    """Somebody began here, or took it, although a deeper one was there."""


@dataclass(eq=False)
class Node:
    prefix: Prefix
    device: bool = True
    refs: int = 0
    stamp: int = 0
    snapshot: Snapshot | None = None
    incoming: ModelLot | None = None
    writer: ModelLot | None = None
    lost: bool = False


@dataclass(eq=False)
class ModelLot:
    number: int
    onboard: bool
    nodes: list[Node]
    ok: bool | None = None
    started: bool = False
    formation: int | None = None


@dataclass(eq=False)
class ModelHold:
    tokens: list[int]
    ignore_floor: bool = False
    snapshots: int = 0
    phase: str = "leased"
    chain: list[Node] = field(default_factory=list)
    leased: int = 0
    start: Snapshot | None = None
    escrow: int = 0
    escrow_states: int = 0
    private: int = 0
    working: bool = False
    planned: list[int] = field(default_factory=list)
    after: int = 0
    publishing: bool = True
    void: bool = False
    release_waits: bool = False

    @property
    def blocks(self) -> int:
        return blocks_for(len(self.tokens), B)

    @property
    def slots(self) -> int:
        return self.working + len(self.planned)

    @property
    def lost(self) -> bool:
        return any(node.lost for node in self.chain)

    @property
    def demand(self) -> int:
        return self.blocks - sum(node.device for node in self.chain)
