"""Chunks of any prompts, hits, budgets and block sizes: positive, contiguous, summing to the suffix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wavepp_controller.core.planner import Lane, plan_fixed
from wavepp_proto.hashing import reuse_cap
from wavepp_proto.terms import Attempt, HoldKey, RequestId, Row


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int, int, int, list[tuple[int, int]]]:
    block = draw(st.sampled_from([1, 2, 16, 64]))
    wave = block * draw(st.integers(1, 20))
    rows = draw(st.integers(1, 8))
    prompts = draw(st.lists(st.integers(1, 40 * block), min_size=1, max_size=12))
    hits = [draw(st.integers(0, reuse_cap(prompt, block) // block)) * block for prompt in prompts]
    return block, wave, rows, list(zip(hits, prompts, strict=True))


@given(workloads())
def test_chunks_cover_every_suffix_exactly_when_waves_are_planned_to_the_end(
    workload: tuple[int, int, int, list[tuple[int, int]]],
) -> None:
    block, wave, most_rows, requests = workload
    lanes = {HoldKey(RequestId(str(i)), Attempt(1)): [hit, prompt] for i, (hit, prompt) in enumerate(requests)}
    chunks: dict[HoldKey, list[Row]] = {key: [] for key in lanes}
    while any(start < prompt for start, prompt in lanes.values()):
        view = [Lane(key, start, prompt) for key, (start, prompt) in lanes.items() if start < prompt]
        rows = plan_fixed(view, wave, most_rows, block)
        assert rows == plan_fixed(view, wave, most_rows, block)  # replayable
        assert 1 <= len(rows) <= most_rows
        assert 0 < sum(row.length for row in rows) <= wave
        assert rows[0].key == view[0].key  # the first lane always advances
        assert len({row.key for row in rows}) == len(rows)
        for row in rows:
            assert row.start == lanes[row.key][0]
            lanes[row.key][0] = row.start + row.length
            chunks[row.key].append(row)
    for (hit, prompt), rows_of in zip(requests, chunks.values(), strict=True):
        assert all(row.length > 0 for row in rows_of)
        assert sum(row.length for row in rows_of) == prompt - hit
        assert all((row.start + row.length) % block == 0 for row in rows_of[:-1])
        assert [row.final for row in rows_of] == [False] * (len(rows_of) - 1) + [True]
