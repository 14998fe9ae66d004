"""Workloads: the paper's lengths and shares, one seed one workload, streams that share prefixes, trace lines."""

from __future__ import annotations

import json

import numpy as np
import pytest

from wavepp_proto import workload
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.workload import Part, Prompt


@pytest.mark.parametrize(
    ("name", "model", "tokens", "reusable"),
    [
        ("short_cold", "glm", 128_000, 0),
        ("long_cold", "minimax", 195_000, 0),
        ("short_reuse", "glm", 128_000, 115_200),
        ("long_reuse", "k3", 262_144, 235_904),
        ("suffix4k", "minimax", 129_088, 124_992),
    ],
)
def test_lengths_are_the_papers_when_a_family_is_named(name: str, model: str, tokens: int, reusable: int) -> None:
    prompt = workload.family(name, model, 8).prompt(5)
    assert (prompt.tokens, prompt.reusable_tokens) == (tokens, reusable)
    assert prompt.tokens - prompt.reusable_tokens >= tokens // 10 or name == "suffix4k"


def test_one_in_each_four_is_long_and_cold_when_mixed() -> None:
    mixed = workload.family("mixed", "k3", 8, seed=3)
    kinds = [mixed.prompt(number) for number in range(40)]
    for start in range(0, 40, 4):
        four = kinds[start : start + 4]
        assert sorted(prompt.kind for prompt in four) == ["cold", "warm", "warm", "warm"]
        assert {prompt.tokens for prompt in four} == {131_072, 262_144}
    assert len({prompt.parts for prompt in kinds}) == 40


def test_preloaded_is_what_all_warm_prompts_share() -> None:
    reuse = workload.family("short_reuse", "glm", 8)
    (prefix,) = reuse.preloaded
    assert all(reuse.prompt(number).parts[0] == prefix.parts[0] for number in range(20))
    assert workload.family("short_cold", "glm", 8).preloaded == ()


def test_a_seed_gives_one_workload_when_asked_again() -> None:
    first, again, other = (workload.family("mixed", "glm", 8, seed) for seed in (1, 1, 2))
    assert [first.prompt(n) for n in range(30)] == [again.prompt(n) for n in range(30)]
    assert not {first.prompt(n).parts for n in range(30)} & {other.prompt(n).parts for n in range(30)}
    assert workload.poisson(first, 2.0, 60.0) == workload.poisson(again, 2.0, 60.0)


def test_poisson_keeps_the_mean_rate() -> None:
    trace = workload.poisson(workload.family("short_cold", "glm", 1), per_second=5.0, seconds=400.0)
    assert 1850 < len(trace.arrivals) < 2150
    assert [one.at_s for one in trace.arrivals] == sorted(one.at_s for one in trace.arrivals)


def test_the_tables_have_as_many_cells_as_the_paper() -> None:
    assert [len(workload.cells(model)) for model in ("glm", "minimax", "k3")] == [20, 20, 28]
    for cell in workload.cells("k3"):
        assert workload.family(cell.family, "k3", cell.concurrency, tokens=cell.tokens).concurrency == cell.concurrency


@pytest.mark.parametrize("vocabulary", [1, 2, 100, 256, 300, 32_000, 200_000])
def test_tokens_lie_in_the_vocabulary_and_prefixes_are_equal(vocabulary: int) -> None:
    long = np.frombuffer(Prompt((Part("a", 5000),)).packed(vocabulary), dtype="<i4")
    two = np.frombuffer(Prompt((Part("a", 3000), Part("b", 2000))).packed(vocabulary), dtype="<i4")
    assert long.min() >= 0
    assert long.max() < vocabulary
    assert (long[:3000] == two[:3000]).all()
    assert vocabulary == 1 or (long[3000:] != two[3000:]).any()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("nothing", "glm", 8), "family"),
        (("mixed", "gpt", 8), "lengths"),
        (("mixed", "glm", 0), "concurrency"),
        (("mixed", "glm", 8, 0, 100), "prompt_tokens"),
    ],
)
def test_a_family_is_refused_by_name_when_an_argument_is_wrong(arguments: tuple[object, ...], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        workload.family(*arguments)  # type: ignore[arg-type]
    assert ("field", field) in refused.value.info().fields


def _line(at_ms: int, tokens: int, ids: list[int]) -> str:
    return json.dumps({"timestamp": at_ms, "input_length": tokens, "output_length": 1, "hash_ids": ids})


def test_equal_hash_ids_are_equal_streams_when_a_trace_is_read() -> None:
    trace = workload.mooncake("m", [_line(0, 1100, [0, 1, 2]), "", _line(2500, 1025, [0, 1, 7]), _line(900, 512, [0])])
    first, single, second = trace.arrivals
    assert [one.at_s for one in trace.arrivals] == [0.0, 0.9, 2.5]
    assert first.prompt.parts == (Part("m/0", 512), Part("m/1", 512), Part("m/2", 76))
    assert [one.prompt.reusable_tokens for one in (first, second, single)] == [0, 1024, 448]
    hits = (second.prompt.good_hit(1000), second.prompt.good_hit(512), first.prompt.good_hit(0))
    assert hits == (True, False, None)


def test_a_trace_is_cut_and_sped_up() -> None:
    trace = workload.mooncake("m", [_line(1000 * at, 600, [at, 100 + at]) for at in range(10)])
    faster = trace.first(5.0).faster(2.0)
    assert [one.at_s for one in faster.arrivals] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert faster.arrivals[0].prompt == trace.arrivals[0].prompt


@pytest.mark.parametrize(
    "line",
    [
        "nonsense", "{}", "[]", "[" * 100_000, _line(0, 600, [1]), _line(0, 0, []),
        '{"timestamp": NaN, "input_length": 9, "hash_ids": [1]}',
        '{"timestamp": -1, "input_length": 9, "hash_ids": [1]}',
        '{"timestamp": 1e308, "input_length": 9, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": Infinity, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 9, "hash_ids": [Infinity]}',
    ],
)  # fmt: skip
def test_a_line_is_refused_by_number_when_it_is_no_request(line: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        workload.mooncake("m", [_line(0, 512, [1]), line])
    assert ("value", "2") in [(name, str(value)) for name, value in refused.value.info().fields]


@pytest.mark.parametrize(
    ("rate", "seconds"),
    [(float("inf"), 1.0), (float("nan"), 1.0), (0.0, 1.0), (1.0, float("inf")), (1.0, float("nan")), (1e9, 60.0)],
)
def test_arrivals_are_refused_when_they_would_never_end(rate: float, seconds: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        workload.poisson(workload.family("short_cold", "glm", 1), rate, seconds)
    assert ("field", "rate") in refused.value.info().fields
