"""Random histories of one trtllm stage on the stand-in: whatever happens, what is held adds up and answers are exact.

Prompts share prefixes, tenants do not; pools are small, so that rows, pages and evictions run out. After each step the
cache checks itself; counts of the stand-in, which are its own, must agree, and the digest must show what can be leased.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.harness import tiny_models
from tests.harness.stage_core import key
from tests.harness.trtllm_alone import AloneStage, B, Prompted, assert_exact, hashes_of, prompt, stand_in
from wavepp_stage.core.cache_manager import Lease
from wavepp_stage.engine.trtllm import compat

STEM = prompt(6 * B, 1)
NAMES = st.sampled_from("abcdef")
TENANTS = st.sampled_from(["", "", "other"])
_place: dict[str, Any] = {}


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tiny_models.build("llama", tmp_path_factory.mktemp("models"))
    _place.update(model=folder, monkeypatch=monkeypatch)
    yield folder
    _place.clear()


class Histories(RuleBasedStateMachine):
    """Each name is one prompt: a part of the stem and a tail of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.leased: dict[str, tuple[list[int], Lease]] = {}
        self.committed: dict[str, tuple[list[int], int]] = {}
        self.running: dict[str, Prompted] = {}
        self.count = 0

    @initialize(
        vintage=st.sampled_from(["newer", "rc26"]),
        blocks=st.integers(10, 24),
        host=st.sampled_from([0, 12]),
        rows=st.integers(2, 8),
    )
    def start(self, vintage: str, blocks: int, host: int, rows: int) -> None:
        self.stack.enter_context(stand_in(_place["monkeypatch"], vintage, rows=rows))
        self.stage = AloneStage(_place["model"], pool_blocks=blocks, host_pool_blocks=host)

    def teardown(self) -> None:
        if hasattr(self, "stage"):
            for name in [*self.leased, *self.committed, *self.running]:
                self.stage.release(name)
            assert self.stage.available() == self.stage.cache.pool_blocks
            assert not self.stage.manager.kv_cache_map
            self.stage.engine.close()
        self.stack.close()

    def idle(self, name: str) -> bool:
        return name not in self.leased and name not in self.committed and name not in self.running

    # --- rules ------------------------------------------------------------------------------------

    @rule(name=NAMES, stem=st.integers(0, 6 * B), tail=st.integers(1, 40), candidate=st.integers(0, 9), salt=TENANTS)
    def lease(self, name: str, stem: int, tail: int, candidate: int, salt: str) -> None:
        if not self.idle(name):
            return
        tokens = STEM[:stem] + prompt(tail, 100 + self.count % 5)
        self.count += 1
        before = self.stage.available()
        lease = self.stage.lease(name, tokens, candidate * B, salt)
        assert lease.endpoint % B == 0
        assert lease.endpoint <= min(candidate * B, lease.own_hit, (len(tokens) - 1) // B * B)
        if lease.shortfall:
            assert (lease.endpoint, self.stage.available()) == (0, before)
        else:
            assert lease.endpoint == min(candidate * B, lease.own_hit)
            self.leased[name] = tokens, lease

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def escrow(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.leased)))
        before = self.stage.cache.census().held
        answer = self.stage.escrow(name)
        tokens, lease = self.leased[name]
        assert answer.endpoint == lease.endpoint
        if answer.shortfall:
            assert self.stage.cache.census().held == before
            return
        self.stage.cache.commit(key(name))
        del self.leased[name]
        self.committed[name] = tokens, lease.endpoint

    @precondition(lambda self: self.committed)
    @rule(data=st.data(), blocks=st.integers(0, 6))
    def revise(self, data: st.DataObject, blocks: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.committed)))
        tokens, endpoint = self.committed[name]
        answer = self.stage.revise(name, min(blocks * B, endpoint))
        assert answer.endpoint == (endpoint if answer.shortfall else min(blocks * B, endpoint))
        self.committed[name] = tokens, answer.endpoint

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def materialise(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.committed)))
        self.running[name] = self.stage.materialise(name, *self.committed.pop(name))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), void=st.booleans())
    def wave(self, data: st.DataObject, void: bool) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.running)), min_size=1, max_size=3, unique=True))
        chunks = []
        for name in names:
            running = self.running[name]
            rest = len(running.tokens) - running.at
            chunks.append((running, min(rest, B * data.draw(st.integers(1, 4)))))
        if void:
            self.stage.run(*(self.stage.row(running, length, void=True) for running, length in chunks))
            return
        outcome = self.stage.advance(*chunks)
        for result in outcome.results:
            running = self.running.pop(names[result.row])
            assert_exact(self.stage.model, running.tokens, result)
            self.stage.release(names[result.row])
            self.stage.release(names[result.row])

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        for where in (self.leased, self.committed, self.running):
            where.pop(name, None)
        self.stage.release(name)

    @rule()
    def end_formation(self) -> None:
        self.stage.cache.end_formation(1)
        self.stage.cache.check()
        self.stage.cache.executor_stopped(1)
        for where in (self.leased, self.committed, self.running):
            where.clear()
        assert self.stage.available() == self.stage.cache.pool_blocks

    # --- what always holds -----------------------------------------------------------------------------

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "stage"):
            return
        cache = self.stage.cache
        cache.check()
        census = cache.census()
        assert census.free + census.cached + census.held + census.quarantined == cache.pool_blocks
        room = compat.room(self.stage.manager, 0)
        assert room is not None
        assert (census.free, census.cached) == (room.free, room.evictable)
        assert len(self.stage.manager.kv_cache_map) == len(self.committed) + len(self.running)
        assert not self.stage.engine.fenced

    @invariant()
    def digest_shows_what_can_be_leased(self) -> None:
        if hasattr(self, "stage"):
            shown = set(self.stage.cache._residents.shorts().tolist())
            for salt in ("", "other"):
                hit = self.stage.desk.probe(STEM, hashes_of(STEM, salt).full[0].tobytes().hex()) // B
                assert [short in shown for short in hashes_of(STEM, salt).shorts.tolist()] == [
                    block < hit for block in range(6)
                ]


def test_what_is_held_adds_up_and_answers_are_exact_in_any_history(model: Path) -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=15,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        ),
    )
