"""Reports of one formation, kept until the controller says that it has them.

Owns what is sent again when the controller's wave stream was cut: every report after the last wave that
the controller heard of. `execution_service` keeps one per formation. The ring bounds it: a stage is at
most R = 2P waves ahead of the last one, the controller acknowledges every R reports, and no more than R
waves complete while that acknowledgement travels.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from wavepp_proto.errors import FormationEnded, StaleMessage
from wavepp_proto.terms import Fence, JoinPlan, WaveOrdinal, WaveReport
from wavepp_stage.runtime.running_formation import Report

RINGS: Final = 4
"""Most reports kept, in rings of 2P waves: one more than the protocol needs."""


class ReportLog:
    """Reports in ordinal order, oldest first."""

    def __init__(self, plan: JoinPlan) -> None:
        self.fence = plan.fence
        self._most = RINGS * 2 * plan.stages
        self._reports: deque[WaveReport] = deque()
        self._dropped: WaveOrdinal = WaveOrdinal(0)
        """The latest report that was let go without an acknowledgement."""
        self._latest: WaveOrdinal = WaveOrdinal(0)
        """The latest wave that was reported at all."""

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, report: WaveReport) -> None:
        self._reports.append(report)
        self._latest = max(self._latest, WaveOrdinal(report.fence.ordinal))
        if len(self._reports) > self._most:
            self._dropped = WaveOrdinal(self._reports.popleft().fence.ordinal)

    def acknowledge(self, reported: WaveOrdinal) -> None:
        """The controller has the reports up to `reported`. A fault is kept: it is about no wave.

        Raises StaleMessage for a report that was never made: letting go of others for it would lose them."""
        if reported > self._latest:
            raise StaleMessage("no such wave was reported", field="reported_wave", value=reported, limit=self._latest)
        while self._reports and self._reports[0].error is None and self._reports[0].fence.ordinal <= reported:
            self._reports.popleft()

    def after(self, reported: WaveOrdinal) -> tuple[WaveReport, ...]:
        """What a controller that has the reports up to `reported` must hear again.

        Raises FormationEnded when some of it is gone: that controller cannot go on. StaleMessage as `acknowledge`."""
        if reported < self._dropped:
            raise FormationEnded(
                f"reports up to wave {self._dropped} are gone, wave {reported} was the last one heard",
                field="reported_wave", value=reported, limit=self._dropped, formation=self.fence.formation,
            )  # fmt: skip
        self.acknowledge(reported)
        return tuple(self._reports)


def wave_report(plan: JoinPlan, report: Report) -> WaveReport:
    """A wave's report as the controller hears it."""
    fence, done = plan.fence, report.done
    return WaveReport(
        fence=Fence(fence.epoch, fence.formation, fence.incarnation, report.ordinal),
        done=done is not None,
        void_bitmap=done.void_bitmap if done else 0,
        running_hash=done.running_hash if done else b"",
        times=report.times,
        results=done.results if done else (),
        faults=done.faults if done else (),
        capacity=done.capacity if done else None,
        error=report.error,
    )
