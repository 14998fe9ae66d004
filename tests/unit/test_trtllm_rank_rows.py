"""What the ranks of a stage agree on before a wave: the same rows on all of them, or that nobody runs it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.harness.plain_store import PlainStore
from wavepp_proto.errors import EngineFault, FormationEnded
from wavepp_proto.terms import Epoch, Formation, WaveOrdinal
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.trtllm.rank_rows import RankRows

PATIENCE_S = 30.0


def ranks(count: int, wait_s: float = PATIENCE_S) -> tuple[PlainStore, list[RankRows]]:
    store = PlainStore()
    return store, [RankRows(store, rank, count, wait_s) for rank in range(count)]


def wave(ordinal: int = 1, epoch: int = 1, ended: Callable[[float], bool] | None = None) -> WaveWork:
    return WaveWork(Formation(1), WaveOrdinal(ordinal), (), bytes(16), epoch=Epoch(epoch), ended=ended)


def agree(first: RankRows, second: RankRows, voids: tuple[int, int], ordinal: int = 1) -> tuple[int, int]:
    """Both come to a wave, the second while the first waits."""
    seconds: list[int] = []

    def meanwhile(_: float) -> bool:
        if not seconds:
            seconds.append(second.void_anywhere(wave(ordinal), voids[1]))
        return False

    return first.void_anywhere(wave(ordinal, ended=meanwhile), voids[0]), *seconds  # type: ignore[return-value]


def test_row_is_void_on_every_rank_when_it_is_void_on_one() -> None:
    _, (first, second) = ranks(2)
    wide = 1 << 127
    assert agree(first, second, (0b001, wide)) == (wide | 1, wide | 1)


def test_nobody_runs_a_wave_when_the_formation_ends_before_one_came() -> None:
    _, (first, second) = ranks(2)
    with pytest.raises(FormationEnded):
        first.void_anywhere(wave(ended=lambda _: True), 0)
    with pytest.raises(FormationEnded):
        second.void_anywhere(wave(), 0)


def test_all_run_a_wave_when_all_came_before_one_heard_that_the_formation_ended() -> None:
    _, (first, second) = ranks(2)
    told: list[int] = []

    def ended(_: float) -> bool:
        told.append(second.void_anywhere(wave(), 0b10))
        return True

    assert (first.void_anywhere(wave(ended=ended), 0), told) == (0b10, [0b10])


def test_wave_of_another_controller_is_another_wave_when_formations_are_counted_anew() -> None:
    _, (first, second) = ranks(2)
    with pytest.raises(FormationEnded):
        first.void_anywhere(wave(epoch=1, ended=lambda _: True), 0)
    with pytest.raises(FormationEnded):
        second.void_anywhere(wave(epoch=2, ended=lambda _: True), 0b1)  # alone: the other one's word counts for nothing
    assert agree(first, second, (0, 0), ordinal=2) == (0, 0)


def test_rank_is_broken_when_another_one_does_not_come_in_time() -> None:
    _, (first, second) = ranks(2, wait_s=0)
    with pytest.raises(EngineFault, match="did not come"):
        first.void_anywhere(wave(), 0)
    with pytest.raises(FormationEnded):
        second.void_anywhere(wave(), 0)


def test_store_keeps_one_wave_when_many_have_gone() -> None:
    store, (first, second) = ranks(2)
    for ordinal in range(1, 5):
        agree(first, second, (0, 0), ordinal)
    assert {key.split("/")[0] for key in store.held} == {"1.1.4"}
