"""Which reports a stage says again when its controller's stream was cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.harness.stage_core import join_plan
from wavepp_proto.errors import EngineFault, FormationEnded, StaleMessage
from wavepp_proto.terms import StageTimes, WaveOrdinal, WaveReport
from wavepp_stage.runtime.report_log import RINGS, ReportLog

PLAN = join_plan()
MOST = RINGS * 2 * PLAN.stages


def report(ordinal: int) -> WaveReport:
    return WaveReport(replace(PLAN.fence, ordinal=ordinal), True, 0, bytes(32), StageTimes())


def ordinals(log: ReportLog, after: int) -> list[int]:
    return [found.fence.ordinal for found in log.after(WaveOrdinal(after))]


def test_reports_after_the_last_one_heard_are_said_again_in_order() -> None:
    log = ReportLog(PLAN)
    for ordinal in range(1, 6):
        log.add(report(ordinal))
    assert ordinals(log, 2) == [3, 4, 5]
    log.add(report(6))
    assert ordinals(log, 2) == [3, 4, 5, 6]
    log.acknowledge(WaveOrdinal(6))
    assert ordinals(log, 6) == []


def test_nothing_is_forgotten_when_an_older_acknowledgement_comes_late() -> None:
    log = ReportLog(PLAN)
    for ordinal in range(1, 4):
        log.add(report(ordinal))
    log.acknowledge(WaveOrdinal(2))
    log.acknowledge(WaveOrdinal(1))
    assert ordinals(log, 2) == [3]


def test_nothing_is_forgotten_when_a_report_is_acknowledged_that_was_never_made() -> None:
    log = ReportLog(PLAN)
    for ordinal in range(1, 4):
        log.add(report(ordinal))
    for said in (log.acknowledge, log.after):
        with pytest.raises(StaleMessage) as refused:
            said(WaveOrdinal(4))
        assert refused.value.fields == {"field": "reported_wave", "value": "4", "limit": "3"}
    assert ordinals(log, 0) == [1, 2, 3]


def test_fault_is_said_again_although_it_is_about_no_wave() -> None:
    log = ReportLog(PLAN)
    fault = replace(report(0), done=False, error=EngineFault("it broke").info())
    log.add(report(1))
    log.add(fault)
    assert log.after(WaveOrdinal(1)) == (fault,)


def test_log_is_bounded_and_a_controller_that_missed_more_is_refused() -> None:
    log = ReportLog(PLAN)
    for ordinal in range(1, MOST + 4):
        log.add(report(ordinal))
    assert len(log) == MOST
    assert ordinals(log, 3)[0] == 4
    fresh = ReportLog(PLAN)
    for ordinal in range(1, MOST + 4):
        fresh.add(report(ordinal))
    with pytest.raises(FormationEnded) as refused:
        fresh.after(WaveOrdinal(2))
    assert refused.value.fields["field"] == "reported_wave"
    assert refused.value.fields["limit"] == "3"
