"""A wave's report cut for the wire, and put together again on the other side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wavepp_controller.runtime.report_merger import ReportMerger
from wavepp_proto import convert, errors, limits, terms
from wavepp_stage.runtime.report_parts import report_parts


def report_with(sizes: list[int]) -> terms.WaveReport:
    fence = terms.Fence(terms.Epoch(1), terms.Formation(1), terms.Incarnation(1), 9)
    results = tuple(terms.RowResult(row, row, (), bytes(4 * size)) for row, size in enumerate(sizes))
    return terms.WaveReport(fence, True, 2, b"h" * 32, terms.StageTimes(5), results, capacity=terms.Capacity(1, 2, 3))


@pytest.mark.parametrize(
    ("sizes", "grouped"),
    [
        ([], [0]),
        ([0] * 128, [128]),
        ([200_000] * 5, [2, 2, 1]),
        ([limits.MAX_VOCABULARY] * 3, [1, 1, 1]),
        ([0, limits.MAX_VOCABULARY, 0, 1], [3, 1]),
    ],
)
def test_report_fits_its_messages_and_comes_back_whole_when_rows_carry_logits(
    sizes: list[int], grouped: list[int]
) -> None:
    report = report_with(sizes)
    messages = [convert.wave_response_to_pb(part) for part in report_parts(report)]
    assert max(message.ByteSize() for message in messages) <= limits.MAX_MESSAGE_BYTES
    assert [len(message.report.results) for message in messages] == grouped
    assert [message.report.partial for message in messages] == [True] * (len(grouped) - 1) + [False]
    merger = ReportMerger()
    merged: list[terms.WaveReport | None] = []
    for message in messages:
        part = convert.wave_response_from_pb(message)
        assert isinstance(part, terms.WaveReport)
        merged.append(merger.add(part))
    assert merged == [None] * (len(grouped) - 1) + [report]
    assert merger.add(report) == report  # nothing stayed behind


def test_parts_are_refused_when_waves_mix_or_rows_exceed_the_lanes() -> None:
    part = replace(report_with([1] * 100), partial=True)
    merger = ReportMerger()
    assert merger.add(part) is None
    with pytest.raises(errors.InvalidRequest) as refused:
        merger.add(replace(part, fence=replace(part.fence, ordinal=10)))
    assert refused.value.fields == {"field": "wave", "value": "10", "limit": "9"}
    with pytest.raises(errors.InvalidRequest) as refused:
        merger.add(part)
    assert refused.value.fields == {"field": "results", "value": "200", "limit": str(limits.MAX_LANES)}
