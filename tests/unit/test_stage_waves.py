"""Waves on a stage: rows with exact blocks, voids, the running hash, and releases that wait for a wave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.stage_core import B, StageDriver, join_plan, key
from wavepp_proto.errors import InvalidRequest, StaleMessage
from wavepp_proto.limits import MAX_TOMBSTONES
from wavepp_proto.terms import (
    Prepare,
    Release,
    Row,
    Sampling,
    VoteOutcome,
    WaveCommand,
    WaveOrdinal,
)
from wavepp_stage.core import events as ev


@pytest.fixture
def stage() -> Iterator[StageDriver]:
    driver = StageDriver.joined()
    yield driver
    driver.machine.check()


def room(driver: StageDriver) -> tuple[int, int, int]:
    """(free, evictable, escrowed)."""
    capacity = driver.machine.capacity()
    return capacity.free_blocks, capacity.evictable_blocks, capacity.escrowed_blocks


def test_prompt_is_reused_up_to_the_last_boundary_when_sent_again(stage: StageDriver) -> None:
    tokens = list(range(10))
    first = stage.prefill("a", tokens)
    assert first.work.rows[0].blocks.tolist() == [0, 1, 2]
    again = stage.prefill("b", tokens)
    row = again.work.rows[0]
    assert (row.start, row.length) == (8, 2)
    assert row.blocks.tolist() == [0, 1, 2]  # blocks 0 and 1 reused, 2 was freed and taken again
    assert row.token_ids is not None
    assert row.token_ids.tolist() == [8, 9]
    assert room(stage) == (14, 2, 0)


@pytest.mark.parametrize(("length", "hit"), [(B - 1, 0), (B, 0), (B + 1, B), (2 * B, B), (2 * B + 1, 2 * B)])
def test_at_least_one_token_is_computed_when_all_is_cached(stage: StageDriver, length: int, hit: int) -> None:
    tokens = list(range(length))
    stage.prefill("a", tokens)
    assert stage.prepare(stage.announce("b", tokens)).own_hit == hit


def test_chunks_see_the_blocks_and_hashes_up_to_their_end(stage: StageDriver) -> None:
    tokens = list(range(10))
    hold = stage.announce("a", tokens)
    stage.prepare(hold)
    first, _ = stage.run_wave(Row(hold, 0, 4))
    second, _ = stage.run_wave(Row(hold, 4, 6, final=True))
    assert [row.blocks.tolist() for wave in (first, second) for row in wave.work.rows] == [[0], [0, 1, 2]]
    assert [len(row.prefix_hashes) for wave in (first, second) for row in wave.work.rows] == [1, 2]


def test_only_the_last_stage_samples_and_only_when_the_chunk_ends_its_prompt() -> None:
    for index, sampling in ((0, None), (1, Sampling(seed=11))):
        stage = StageDriver.joined(join_plan(stage=index))
        hold = stage.announce("a", range(8), send_tokens=index == 0)
        stage.prepare(hold)
        first, _ = stage.run_wave(Row(hold, 0, 4))
        final, _ = stage.run_wave(Row(hold, 4, 4, final=True))
        assert first.work.rows[0].sampling is None
        assert final.work.rows[0].sampling == sampling
        assert (final.work.rows[0].token_ids is None) == (index == 1)


def test_nothing_is_published_before_its_wave_has_retired(stage: StageDriver) -> None:
    tokens = list(range(10))
    first, second = stage.announce("a", tokens), stage.announce("b", tokens)
    stage.prepare(first)
    stage.send_wave(Row(first, 0, 10, final=True))
    stage.prepare_wave(1)
    assert stage.prepare(second).own_hit == 0
    stage.retire_wave(1)
    stage.release(second)
    assert stage.prepare(second).own_hit == 8


def test_wave_is_ignored_when_sent_again_and_stale_when_one_is_missing(stage: StageDriver) -> None:
    a = stage.announce("a", range(9))
    stage.prepare(a)
    command = WaveCommand(stage.fence(1), (Row(a, 0, 4),))
    assert stage.post(ev.WaveArrived(command, 0.0)) == [ev.WaveQueued(command)]
    assert stage.post(ev.WaveArrived(command, 0.0)) == []
    before = stage.machine.inventory()
    with pytest.raises(StaleMessage, match="a wave is missing") as caught:
        stage.post(ev.WaveArrived(WaveCommand(stage.fence(3), (Row(a, 4, 5, final=True),)), 0.0))
    assert (caught.value.fields["field"], caught.value.fields["limit"]) == ("ordinal", "2")
    assert stage.machine.inventory() == before
    with pytest.raises(StaleMessage):
        stage.machine.void_bitmap(WaveOrdinal(3))  # nothing is queued under that ordinal


def test_waves_sent_again_change_nothing_when_they_are_queued_prepared_or_retired(stage: StageDriver) -> None:
    """A stream that was cut begins again with what the controller saw no report of."""
    a = stage.announce("a", range(16))
    stage.prepare(a)
    commands = [WaveCommand(stage.fence(ordinal), (Row(a, 4 * (ordinal - 1), 4),)) for ordinal in (1, 2, 3)]
    for command in commands:
        stage.post(ev.WaveArrived(command, 0.0))
    stage.prepare_wave(1)
    stage.prepare_wave(2)
    stage.retire_wave(1)
    before = stage.machine.inventory()
    assert [stage.post(ev.WaveArrived(command, 0.0)) for command in commands] == [[], [], []]
    assert stage.machine.inventory() == before
    stage.retire_wave(2)
    assert not stage.prepare_wave(3).work.rows[0].void


@pytest.mark.parametrize("rows", [(), (Row(key("a"), 0, 0),), (Row(key("a"), 0, 2000),), (Row(key("a"), 0, 1),) * 2])
def test_wave_is_refused_when_it_breaks_the_plan(stage: StageDriver, rows: tuple[Row, ...]) -> None:
    with pytest.raises(InvalidRequest):
        stage.send_wave(*rows)
    a = stage.announce("a", range(4))
    stage.prepare(a)
    stage.wave_ordinal = 0
    assert stage.send_wave(Row(a, 0, 4, final=True))


@pytest.mark.parametrize("snapshots", [(4,), (6,), (20,), (12, 8), (8, 8), (8, 4)])
def test_wave_is_refused_by_name_when_a_snapshot_lies_off_its_chunk(
    stage: StageDriver, snapshots: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        stage.send_wave(Row(key("a"), 4, 12, snapshots=snapshots))
    assert caught.value.fields["field"] == "snapshots"
    stage.wave_ordinal = 0
    assert stage.send_wave(Row(key("a"), 4, 12, snapshots=(8, 12, 16)))


def test_hashes_differ_when_two_stages_would_take_different_snapshots() -> None:
    """I1 covers snapshots: a stage that took another one would resume from another place."""
    seen = []
    for snapshots in ((), (4,), (8,), (4, 8)):
        stage = StageDriver.joined()
        a = stage.announce("a", range(9))
        stage.prepare(a)
        prepared, done = stage.run_wave(Row(a, 0, 9, True, snapshots))
        seen.append((prepared.work.chunks, done.running_hash))
    assert len(set(seen)) == 4


def test_executor_is_refused_when_it_skips_a_wave(stage: StageDriver) -> None:
    a = stage.announce("a", range(9))
    stage.prepare(a)
    stage.send_wave(Row(a, 0, 4))
    stage.send_wave(Row(a, 4, 5, final=True))
    for event in (ev.PrepareWave(WaveOrdinal(2), 0.0), ev.WaveRetired(WaveOrdinal(1), 0, (), (), 0.0)):
        with pytest.raises(StaleMessage, match="not the next wave"):
            stage.post(event)
    stage.prepare_wave(1)
    with pytest.raises(StaleMessage, match="formation has ended"):
        stage.post(ev.PrepareWave(WaveOrdinal(2), 0.0, formation=0))


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (Row(key("a"), 4, 5, final=True), "start"),
        (Row(key("a"), 0, 10, final=True), "end"),
        (Row(key("a"), 0, 9), "end"),
        (Row(key("a"), 0, 4, final=True), "end"),
        (Row(key("open"), 0, 4), "phase"),
        (Row(key("b"), 0, 4), "request_id"),
    ],
)
def test_row_is_void_and_the_wave_flows_when_its_request_cannot_run(stage: StageDriver, row: Row, field: str) -> None:
    good = stage.announce("good", range(20, 29))
    stage.prepare(stage.announce("a", range(9)))
    stage.prepare(good)
    stage.announce("open", range(9))
    prepared, done = stage.run_wave(row, Row(good, 0, 9, final=True))
    assert [work.void for work in prepared.work.rows] == [True, False]
    (fault,) = prepared.faults
    assert (fault.row, fault.error.reason) == (0, "ROW_VOIDED")
    assert dict(fault.error.fields)["field"] == field
    assert done.void_bitmap == 1
    assert room(stage)[1] == 0
    stage.release(good, 1)
    assert room(stage)[1] == 2  # only the good row was published


def test_request_stays_void_in_later_waves_when_one_row_was_voided_upstream(stage: StageDriver) -> None:
    a = stage.announce("a", range(12))
    stage.prepare(a)
    stage.send_wave(Row(a, 0, 4))
    stage.send_wave(Row(a, 4, 4))
    stage.prepare_wave(1)
    ahead = stage.prepare_wave(2)  # prepared before anybody knew
    assert not ahead.work.rows[0].void
    assert stage.machine.void_bitmap(WaveOrdinal(2)) == 0
    stage.retire_wave(1, void=1)
    assert stage.machine.void_bitmap(WaveOrdinal(2)) == 1
    assert stage.retire_wave(2).void_bitmap == 1
    prepared, done = stage.run_wave(Row(a, 8, 4, final=True))
    assert prepared.work.rows[0].void
    assert prepared.faults == ()  # told once, where it happened
    assert done.void_bitmap == 1
    stage.release(a, 3)
    assert room(stage) == (16, 0, 0)


def test_running_hash_is_equal_when_stages_voided_different_rows() -> None:
    hashes = []
    for void in (0, 1):
        stage = StageDriver.joined()
        a, b = stage.announce("a", range(8)), stage.announce("b", range(10, 18))
        stage.votes(prepares=[Prepare(a, 0), Prepare(b, 0)])
        stage.send_wave(Row(a, 0, 8, final=True), Row(b, 0, 4))
        stage.prepare_wave(1)
        hashes.append(stage.retire_wave(1, void=void).running_hash)
        stage.send_wave(Row(b, 4, 4, final=True))
        stage.prepare_wave(2)
        hashes.append(stage.retire_wave(2).running_hash)
    assert hashes[:2] == hashes[2:]
    assert hashes[0] != hashes[1]


def test_release_waits_when_the_wave_it_names_has_not_retired(stage: StageDriver) -> None:
    a = stage.announce("a", range(9))
    stage.prepare(a)
    stage.release(a, after_wave=1)  # overtook the wave on another stream
    stage.release(a, after_wave=1)
    assert room(stage) == (16, 0, 3)
    prepared, _ = stage.run_wave(Row(a, 0, 9, final=True))
    assert not prepared.work.rows[0].void  # what was sent is executed
    assert room(stage) == (14, 2, 0)
    assert stage.machine.inventory().holds == ()


def test_release_waits_for_a_wave_in_flight_when_the_sender_forgot_it(stage: StageDriver) -> None:
    a = stage.announce("a", range(9))
    stage.prepare(a)
    stage.send_wave(Row(a, 0, 9, final=True))
    stage.prepare_wave(1)
    stage.release(a)
    assert room(stage) == (13, 0, 0)
    stage.retire_wave(1)
    assert room(stage) == (14, 2, 0)


def test_later_rows_are_void_when_their_request_was_released(stage: StageDriver) -> None:
    a = stage.announce("a", range(9))
    stage.prepare(a)
    stage.run_wave(Row(a, 0, 4))
    stage.release(a, after_wave=1)
    prepared, _ = stage.run_wave(Row(a, 4, 5, final=True))
    assert prepared.work.rows[0].void
    assert room(stage) == (15, 1, 0)


def test_announcement_stays_when_a_release_prepares_for_another_try(stage: StageDriver) -> None:
    a = stage.announce("a", range(9))
    stage.prepare(a)
    stage.post(stage.next_round(releases=[Release(a)]))
    assert stage.machine.inventory().announced == (a,)
    assert stage.prepare(a).outcome is VoteOutcome.COMMITTED
    stage.post(stage.next_round(releases=[Release(a, ended=True)]))
    assert stage.machine.inventory().announced == ()
    assert stage.prepare(a).outcome is VoteOutcome.NOT_ANNOUNCED


def test_announcement_goes_with_an_attempt_that_ran(stage: StageDriver) -> None:
    """What ran is tried again as another attempt only, and that one is announced for itself."""
    a = stage.announce("a", range(9))
    stage.prepare(a)
    stage.run_wave(Row(a, 0, 4))
    stage.release(a, after_wave=1)
    assert stage.machine.inventory().announced == ()
    assert stage.prepare(a).outcome is VoteOutcome.NOT_ANNOUNCED


def test_hit_is_the_same_when_the_release_of_the_first_comes_late(stage: StageDriver) -> None:
    """field bug 6: what is reused follows from the decision, not from when a stage let go."""
    votes = []
    for late in (False, True):
        tokens = range(50 * late, 50 * late + 12)
        first, second = stage.announce(f"a{late}", tokens), stage.announce(f"b{late}", tokens)
        stage.prepare(first)
        stage.run_wave(Row(first, 0, 12, final=True))
        if not late:
            stage.release(first, stage.wave_ordinal, ended=True)
        vote = stage.prepare(second, 8)
        votes.append((vote.outcome, vote.endpoint, vote.own_hit, vote.demand_blocks))
        stage.release(first, stage.wave_ordinal, ended=True)
        stage.release(second, ended=True)
    assert votes == [(VoteOutcome.COMMITTED, 8, 8, 1)] * 2


def test_announcement_does_not_resurrect_when_the_cancel_came_first(stage: StageDriver) -> None:
    """field bug 40"""
    a = key("a")
    stage.post(ev.ReleaseArrived(stage.fence(), Release(a, ended=True), 0.0))
    assert stage.post(ev.Announced(stage.frame("a", range(9)), 0.0)) == []
    assert stage.prepare(a).outcome is VoteOutcome.NOT_ANNOUNCED
    assert stage.machine.inventory().announced == ()


@pytest.mark.parametrize("known", [False, True])
def test_prepare_holds_nothing_when_its_release_overtook_it(stage: StageDriver, known: bool) -> None:
    """A round's release comes before the announcement that another stream brings, or before its second copy."""
    a = stage.announce("a", range(9)) if known else key("a")
    stage.votes(releases=[Release(a, ended=True)])
    assert stage.post(ev.Announced(stage.frame("a", range(9)), 0.0)) == []
    assert stage.prepare(a).outcome is VoteOutcome.NOT_ANNOUNCED
    assert (stage.machine.inventory().holds, room(stage)) == ((), (16, 0, 0))
    b = stage.announce("a", range(9), attempt=2)
    assert stage.prepare(b).outcome is VoteOutcome.COMMITTED
    stage.release(b)


def test_cancels_change_nothing_when_they_are_unknown_and_come_in_thousands(stage: StageDriver) -> None:
    """field bug 45"""
    before = stage.machine.inventory()
    for index in range(MAX_TOMBSTONES + 10):
        stage.machine.handle(ev.ReleaseArrived(stage.fence(), Release(key(f"r{index}"), ended=True), 0.0))
    assert stage.machine.inventory() == before
    stage.machine.check()


class CountedRows(tuple[Row, ...]):
    """Rows of a wave that count how often they are walked."""

    walks = 0

    def __iter__(self) -> Iterator[Row]:
        CountedRows.walks += 1
        return super().__iter__()


def test_release_walks_no_queued_wave_when_the_ring_is_full(stage: StageDriver) -> None:
    lanes = [stage.announce(f"r{lane}", range(32)) for lane in range(4)]
    for hold in lanes:
        stage.prepare(hold)
    for start in range(32):  # the ring of 16 stages
        rows = CountedRows(Row(hold, start, 1, final=start == 31) for hold in lanes)
        stage.machine.handle(ev.WaveArrived(WaveCommand(stage.fence(start + 1), rows), 0.0))
    CountedRows.walks = 0
    for hold in lanes:
        stage.machine.handle(ev.ReleaseArrived(stage.fence(), Release(hold, ended=True), 0.0))
    assert CountedRows.walks == 0
    assert stage.machine.inventory().holds  # they wait for the wave that was not named
    for ordinal in range(1, 33):
        stage.prepare_wave(ordinal)
        stage.retire_wave(ordinal)
    assert stage.machine.inventory().holds == ()


def test_release_waits_once_when_a_later_wave_puts_it_off(stage: StageDriver) -> None:
    a = stage.announce("a", range(12))
    stage.prepare(a)
    stage.send_wave(Row(a, 0, 4))
    stage.release(a, after_wave=1)
    stage.send_wave(Row(a, 4, 4))
    stage.release(a, after_wave=1)
    stage.release(a, after_wave=3)
    for ordinal in (1, 2):
        stage.prepare_wave(ordinal)
        stage.retire_wave(ordinal)
    assert [held.key for held in stage.machine.inventory().holds] == [a]
    stage.run_wave(Row(a, 8, 4, final=True))
    assert stage.machine.inventory().holds == ()


def voids(driver: StageDriver) -> int:
    serving = driver.machine._serving
    assert serving is not None
    return len(serving.waves._void)


@pytest.mark.parametrize("late", [False, True])
def test_voids_are_forgotten_with_their_requests(stage: StageDriver, late: bool) -> None:
    """A formation may last for months: what is void goes with the request, and with the last of its queued rows."""
    for number in range(20):
        a, unknown = stage.announce(f"a{number}", range(12)), key(f"u{number}")
        stage.prepare(a)
        ordinal = stage.wave_ordinal + 1
        stage.send_wave(Row(a, 0, 4), Row(unknown, 0, 4))
        stage.send_wave(Row(a, 4, 4), Row(unknown, 4, 4))
        stage.prepare_wave(ordinal)
        if late:
            stage.release(a, ordinal + 1, ended=True)
        stage.retire_wave(ordinal, void=0b11)
        assert stage.prepare_wave(ordinal + 1).faults == ()  # told once
        stage.retire_wave(ordinal + 1)
        assert voids(stage) == int(not late)
        stage.release(a, ordinal + 1, ended=True)
        assert voids(stage) == 0


def test_voids_are_forgotten_when_a_row_comes_after_its_release(stage: StageDriver) -> None:
    a = stage.announce("a", range(9))
    stage.prepare(a)
    stage.run_wave(Row(a, 0, 4))
    stage.release(a, after_wave=1, ended=True)
    prepared, _ = stage.run_wave(Row(a, 4, 5, final=True))
    assert (prepared.work.rows[0].void, voids(stage)) == (True, 0)
