"""Chats in turn on a stage with recurrent layers, against an oracle: every chain keeps its deepest snapshot."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.cache_pool import ATTENTION, RECURRENT, Pool
from tests.harness.stage_core import B
from wavepp_controller.core.snapshot_policy import SnapshotPolicy

HYBRID = (ATTENTION, RECURRENT)
ROW = 2
"""Most snapshots in one row: a working state and so many more are what a request at work takes."""


class Chats:
    """Conversations that take turns on one stage, with the snapshots that a controller would choose."""

    def __init__(self, slots: int, every_blocks: int, shared_blocks: int = 0, blocks: int = 1200) -> None:
        self.pool = Pool(pool=blocks, slots=slots, groups=HYBRID)
        self.policy = SnapshotPolicy.of(B, every_blocks * B, slots)
        self.shared = [0] * (shared_blocks * B)
        self.said: dict[int, list[int]] = {}
        """All that was said in each chat so far."""
        self.turns = 0

    def turn(self, chat: int, blocks: int) -> int:
        """`blocks` more are said, and answered; blocks that were reused."""
        said = self.said.setdefault(chat, list(self.shared))
        said += [chat + 1] * (blocks * B)
        return self.ask([*said, 10_000 + self.turns])

    def ask(self, tokens: list[int]) -> int:
        self.turns += 1
        name, start = f"t{self.turns}", self.pool.hit(tokens)[RECURRENT]
        promised = self.policy.promised(start, len(tokens))
        marks = list(self.policy.positions(start, len(tokens), (), promised))
        self.pool.commit(name, tokens, start, snapshots=promised)
        self.pool.materialise(name)
        at = start
        while marks or at < len(tokens):
            row, marks = marks[:ROW], marks[ROW:]
            self.pool.plan(name, at, *row)
            at = row[-1] if marks else len(tokens)
            self.pool.publish(name, at)
        self.pool.release(name)
        return start // B


def test_twenty_chats_hit_every_turn_when_each_took_a_dozen_snapshots() -> None:
    """100K-token chats in turn with 64 slots, to scale: with the least recently used first, six never hit."""
    chats = Chats(slots=64, every_blocks=4)
    first = [chats.turn(chat, 50) for chat in range(20)]
    later = [[chats.turn(chat, 1) for chat in range(20)] for _ in range(3)]
    assert (first, later) == ([0] * 20, [[50] * 20, [51] * 20, [52] * 20])


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(8, 24), st.integers(1, 6), st.booleans())
def test_every_turn_begins_at_the_end_of_the_one_before_as_long_as_one_snapshot_each_fits(
    draw: random.Random, slots: int, every: int, full: bool
) -> None:
    """In any order, of any length: the oracle is what was said before."""
    most = slots - 1 - ROW
    chats = Chats(slots, every)
    for _ in range(40):
        chat = draw.randrange(most if full else max(1, most // 2))
        before = len(chats.said.get(chat, ())) // B
        assert chats.turn(chat, draw.randint(1, 12)) == before


@pytest.mark.parametrize("together", [False, True])
def test_shared_prefix_is_kept_when_several_chats_go_on_from_it(together: bool) -> None:
    """It is superseded by none of the chats alone, and by no deeper one since a chat began at it: what goes first is
    what a single chat took on its way."""
    chats = Chats(slots=12, every_blocks=5, shared_blocks=5)
    chats.turn(0, 3)  # takes the shared place on its way
    assert [chats.turn(chat, 3) for chat in (1, 2)] == [5, 5]
    others = [chats.turn(chat, 40) if together else chats.ask([chat] * (40 * B) + [9]) for chat in range(3, 8)]
    assert others == ([5] * 5 if together else [0] * 5)
    assert chats.turn(9, 3) == 5
    assert [chats.turn(chat, 1) for chat in (0, 1, 2)] == [8, 8, 8]


def test_place_that_short_questions_begin_at_is_kept_when_one_long_chat_is_beyond_it() -> None:
    """They leave no snapshot below it: nothing but their use tells that others than the chat need it."""
    chats = Chats(slots=8, every_blocks=5, shared_blocks=5)
    question = [*chats.shared, 7, 7]
    assert [chats.ask(question), chats.turn(0, 20), chats.ask(question)] == [0, 5, 5]
    for chat in (1, 2, 3):
        chats.ask([chat] * (10 * B) + [9])
    assert chats.ask(question) == 5
    assert chats.turn(0, 1) == 25
