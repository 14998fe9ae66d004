"""One wave's report as messages that the wire carries.

Owns the cut only: rows that asked for their logits make a report longer than a message may be, so
results go ahead in partial reports and everything else follows in the last one. Called by
`execution_service`; the controller's link puts the parts together again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from wavepp_proto import limits
from wavepp_proto.terms import RowResult, StageTimes, WaveReport

PART_BYTES: Final = limits.MAX_MESSAGE_BYTES // 2
"""Logits of one part; a row of the largest vocabulary has as many."""


def report_parts(report: WaveReport) -> Iterator[WaveReport]:
    """Partial reports of at most PART_BYTES of logits each, then the one that ends the wave."""
    if not any(result.logits for result in report.results):
        yield report
        return
    group: list[RowResult] = []
    size = 0
    for result in report.results:
        if group and size + len(result.logits) > PART_BYTES:
            yield WaveReport(report.fence, report.done, 0, b"", StageTimes(), tuple(group), partial=True)
            group, size = [], 0
        group.append(result)
        size += len(result.logits)
    yield replace(report, results=tuple(group))
