"""Reports of one formation on one stage, kept until the controller says that it has them.

Follows `wavepp_stage.runtime.report_log`: what is said again when a wave stream was cut, and how many are
kept. Called by `stage` and `session`.
"""

from __future__ import annotations

from collections import deque

from wavepp_proto.errors import FormationEnded
from wavepp_proto.terms import WaveReport

RINGS = 4


class ReportLog:
    """Reports in ordinal order, oldest first."""

    def __init__(self, stages: int) -> None:
        self._most = RINGS * 2 * stages
        self._reports: deque[WaveReport] = deque()
        self._dropped = 0
        """The latest report that was let go without an acknowledgement."""

    def add(self, report: WaveReport) -> None:
        self._reports.append(report)
        if len(self._reports) > self._most:
            self._dropped = self._reports.popleft().fence.ordinal

    def acknowledge(self, reported: int) -> None:
        """The controller has the reports up to `reported`. A fault is kept: it is about no wave."""
        while self._reports and self._reports[0].error is None and self._reports[0].fence.ordinal <= reported:
            self._reports.popleft()

    def after(self, reported: int) -> tuple[WaveReport, ...]:
        """What a controller that has the reports up to `reported` must hear again; FormationEnded if it is gone."""
        if reported < self._dropped:
            raise FormationEnded("reports are gone that the controller has not heard", field="reported_wave")
        self.acknowledge(reported)
        return tuple(self._reports)
