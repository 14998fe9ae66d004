"""Whole wave reports out of the parts that a daemon sent.

Owns the results of the one wave whose report is under way on a stream: at most a wave's lanes, each
of at most the largest row of logits. Called by `daemon_link`, one per stream: what a broken stream
left behind goes with it.
"""

from __future__ import annotations

from dataclasses import replace

from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.terms import Fence, RowResult, WaveReport


class ReportMerger:
    """Parts in, in the order of the stream; the report comes out with its last part."""

    def __init__(self) -> None:
        self._fence: Fence | None = None
        self._results: list[RowResult] = []

    def add(self, part: WaveReport) -> WaveReport | None:
        """The report that `part` ends, or None.

        Raises InvalidRequest when parts of two waves mix, or hold more results than a wave has lanes.
        """
        if self._fence is None and not part.partial:
            return part
        if self._fence is not None and part.fence != self._fence:
            message = f"wave {part.fence.ordinal} is reported inside the report of wave {self._fence.ordinal}"
            raise InvalidRequest(message, field="wave", value=part.fence.ordinal, limit=self._fence.ordinal)
        count = len(self._results) + len(part.results)
        if count > limits.MAX_LANES:
            message = f"a report has {count} results, at most {limits.MAX_LANES}"
            raise InvalidRequest(message, field="results", value=count, limit=limits.MAX_LANES)
        self._results += part.results
        if part.partial:
            self._fence = part.fence
            return None
        whole = replace(part, results=tuple(self._results))
        self._fence, self._results = None, []
        return whole
