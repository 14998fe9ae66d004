"""The ring of waves in flight: slots, order of reports, running hashes."""

from __future__ import annotations

import pytest

from wavepp_controller.core.ring import Place, Ring
from wavepp_proto.errors import InternalError
from wavepp_proto.terms import (
    Attempt,
    DaemonKey,
    Epoch,
    ErrorInfo,
    Fence,
    Formation,
    HoldKey,
    Incarnation,
    PipelineId,
    Rank,
    RequestId,
    Row,
    RowFault,
    StageIndex,
    StageTimes,
    WaveOrdinal,
    WaveReport,
)

FIRST, LAST = (DaemonKey(PipelineId("p"), StageIndex(stage)) for stage in (0, 1))
ROWS = (Row(HoldKey(RequestId("a"), Attempt(1)), 0, 16),)


def report(ordinal: int, digest: bytes = b"same", *, void: int = 0, faults: tuple[RowFault, ...] = ()) -> WaveReport:
    fence = Fence(Epoch(1), Formation(1), Incarnation(1), ordinal)
    return WaveReport(fence, True, void, digest, StageTimes(), faults=faults)


def full_ring() -> Ring:
    ring = Ring(4, [FIRST, LAST])
    for _ in range(4):
        ring.send(ROWS)
    return ring


def test_no_room_is_left_when_every_slot_is_taken() -> None:
    ring = full_ring()
    assert (ring.in_flight, ring.room) == (4, False)
    with pytest.raises(InternalError):
        ring.send(ROWS)


def test_slot_frees_at_the_last_stages_report_when_earlier_ones_have_not_spoken() -> None:
    ring = full_ring()
    assert not ring.report(FIRST, report(1)).slot_freed
    done = ring.report(LAST, report(1))
    assert (done.slot_freed, done.complete, ring.in_flight) == (True, True, 3)
    early = ring.report(LAST, report(2))
    assert (early.slot_freed, early.complete, ring.in_flight) == (True, False, 2)
    late = ring.report(FIRST, report(2))
    assert (late.slot_freed, late.complete, ring.in_flight) == (False, True, 2)
    assert ring.check() == []


def test_slot_frees_once_when_the_last_stage_has_several_ranks() -> None:
    ranks = [DaemonKey(PipelineId("p"), StageIndex(0), Rank(rank)) for rank in (0, 1)]
    ring = Ring(2, ranks)
    ring.send(ROWS)
    assert not ring.report(ranks[0], report(1)).slot_freed
    assert ring.report(ranks[1], report(1)).slot_freed
    assert ring.in_flight == 0


@pytest.mark.parametrize("ordinal", [0, 5])
def test_report_is_refused_when_its_wave_was_never_sent(ordinal: int) -> None:
    ring = full_ring()
    with pytest.raises(InternalError, match=f"stage 0 reported wave {ordinal}, not 1"):
        ring.place(FIRST, ordinal)


def test_report_has_its_place_when_it_comes_again_or_skips_one() -> None:
    ring = full_ring()
    ring.report(FIRST, report(1))
    assert [ring.place(FIRST, ordinal) for ordinal in (1, 2, 3)] == [Place.AGAIN, Place.NEXT, Place.AHEAD]
    assert (ring.reported(FIRST), ring.reported(LAST), ring.sent) == (1, 0, 4)
    assert [flight.ordinal for flight in ring.unreported(FIRST)] == [2, 3, 4]
    assert [flight.ordinal for flight in ring.unreported(LAST)] == [1, 2, 3, 4]


@pytest.mark.parametrize("ordinal", [1, 3])
def test_report_is_not_taken_when_it_is_not_the_next(ordinal: int) -> None:
    ring = full_ring()
    ring.report(LAST, report(1))
    with pytest.raises(InternalError, match=f"stage 1 reported wave {ordinal}, not 2"):
        ring.report(LAST, report(ordinal))
    assert ring.in_flight == 3


def test_running_hashes_are_remembered_for_four_rings_when_everybody_has_reported() -> None:
    ring = Ring(2, [FIRST, LAST])
    for ordinal in range(1, 11):
        ring.send(ROWS)
        ring.report(FIRST, report(ordinal, b"%d" % ordinal))
        assert ring.running_hash(WaveOrdinal(ordinal)) == b"%d" % ordinal
        ring.report(LAST, report(ordinal, b"%d" % ordinal))
    assert [ring.running_hash(WaveOrdinal(ordinal)) for ordinal in (0, 2, 3, 10, 11)] == [None, None, b"3", b"10", None]


def test_running_hashes_are_compared_when_the_second_daemon_reports() -> None:
    ring = full_ring()
    ring.report(FIRST, report(1, b"one"))
    with pytest.raises(InternalError, match="stage 1 executed other rows") as caught:
        ring.report(LAST, report(1, b"two"))
    assert caught.value.fields["wave"] == "1"


def test_first_cause_is_kept_when_a_row_is_voided_on_the_way() -> None:
    ring = full_ring()
    cause = ErrorInfo("ROW_VOIDED", "bad canary")
    ring.report(FIRST, report(1, void=1, faults=(RowFault(0, cause),)))
    done = ring.report(LAST, report(1, void=1, faults=(RowFault(0, ErrorInfo("X", "later")),)))
    assert done.flight.faults == {0: (FIRST, cause)}
    assert done.flight.void_bitmap == 1
    assert done.slot_freed


def test_daemon_that_stops_reporting_is_named_when_it_lags_four_rings() -> None:
    ring = Ring(4, [FIRST, LAST])
    for ordinal in range(1, 17):
        ring.send(ROWS)
        assert ring.report(LAST, report(ordinal)).slot_freed
    ring.send(ROWS)
    with pytest.raises(InternalError, match="stage 0 has not reported since wave 1"):
        ring.report(LAST, report(17))
