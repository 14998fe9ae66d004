"""What the bench measures: names, settings, prompts shortened for small pipelines, arrivals; and resuming."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from wavepp.bench.cells import Cell, arriving, closed, replayed, scaled, scaled_prefix
from wavepp.bench.store import SCHEMA, Document, Store
from wavepp_proto import workload
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.workload import FAMILIES, Part, Prompt

LIKE = Cell(lengths="glm")
TRACE = "".join(
    json.dumps({"timestamp": 1000 * second, "input_length": 600, "output_length": 1, "hash_ids": [0, second]}) + "\n"
    for second in range(1, 91)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "conversation.jsonl"
    path.write_text(TRACE)
    return path


def test_cells_are_every_family_under_every_load(trace: Path) -> None:
    loops = closed(("mixed", "suffix4k"), (1, 128), LIKE)
    assert [cell.name for cell in loops] == ["mixed-c1", "mixed-c128", "suffix4k-c1", "suffix4k-c128"]
    assert [cell.row for cell in loops] == ["mixed", "mixed", "suffix4k", "suffix4k"]
    long = replace(LIKE, prompt_tokens=65_536)
    assert [cell.name for cell in arriving(("short_cold",), (0.5, 2), long)] == [
        "short_cold-65536-r0.5", "short_cold-65536-r2"
    ]  # fmt: skip
    assert replayed(trace, replace(LIKE, speed=2.5)).name == "conversation-x2.5"


def test_a_cell_is_measured_once_when_it_is_named_twice() -> None:
    loops = closed(("mixed", "short_cold", "mixed"), (4, 8, 4), LIKE)
    assert [cell.name for cell in loops] == ["mixed-c4", "mixed-c8", "short_cold-c4", "short_cold-c8"]
    assert [cell.name for cell in arriving(("mixed",), (2, 2.0, 1), LIKE)] == ["mixed-r2", "mixed-r1"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": 129}, "concurrency"),
        ({"rate": 0.0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"speed": -1.0}, "speed"),
        ({"minutes": 0.0}, "minutes"),
        ({"scale": 0.0}, "scale"),
        ({"scale": 1.5}, "scale"),
        ({"requests": 0}, "requests"),
        ({"warmup": -1}, "warmup"),
        ({"seconds": float("inf")}, "seconds"),
        ({"concurrency": 1, "family": "lukewarm"}, "family"),
        ({"concurrency": 1, "family": "mixed", "lengths": "gpt"}, "lengths"),
        ({"concurrency": 1, "family": "mixed", "prompt_tokens": 9}, "prompt_tokens"),
        ({"trace": "/nowhere"}, "trace"),
        ({"trace": "a" * 5000}, "trace"),
        ({"rate": 1e-320, "family": "mixed"}, "rate"),
    ],
)
def test_cell_that_cannot_be_is_refused_by_name(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        replace(LIKE, **change).check()  # type: ignore[arg-type]
    assert refused.value.fields["field"] == field


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("scale", "block_tokens"), [(0.01, 16), (0.003, 64), (0.5, 512)])
def test_shortened_prompts_share_what_the_long_ones_share(name: str, scale: float, block_tokens: int) -> None:
    family = workload.family(name, "glm", 8)
    prefixes = [scaled_prefix(prompt, scale, block_tokens) for prompt in family.preloaded]
    for number in range(8):
        whole = family.prompt(number)
        short = scaled(whole, scale, block_tokens)
        assert [part.stream for part in short.parts] == [part.stream for part in whole.parts]
        assert short.reusable_tokens % block_tokens == 0
        if whole.reusable_tokens:
            assert short.reusable_tokens == short.parts[0].tokens
            assert (short.parts[0],) in [prefix.parts for prefix in prefixes]
        else:
            assert short.reusable_tokens == 0
        assert abs(short.tokens - scale * whole.tokens) <= block_tokens


def test_shortened_parts_are_whole_blocks_and_leave_something_to_compute() -> None:
    parts = (Part("a", 512), Part("b", 512), Part("c", 100))
    short = scaled(Prompt(parts, 1024), 0.1, 16)
    assert short == Prompt((Part("a", 48), Part("b", 48), Part("c", 10)), 96)
    # All of it was known: at most what lies before its last token can be reused, in whole blocks.
    assert scaled(Prompt(parts[:2], 960), 0.1, 16) == Prompt((Part("a", 48), Part("b", 51)), 80)
    assert scaled(Prompt((Part("a", 1), Part("b", 1)), 0), 0.01, 16) == Prompt((Part("a", 16), Part("b", 1)), 0)


def test_prompts_stay_as_they_are_at_full_scale() -> None:
    prompt = workload.family("suffix4k", "glm", 8).prompt(5)
    assert scaled(prompt, 1, 64) is prompt


def test_poisson_arrivals_are_the_same_for_one_seed_and_others_for_another() -> None:
    cell = replace(LIKE, family="short_cold", rate=2.0, requests=40)
    arrivals = cell.arrivals().arrivals
    assert len(arrivals) == 44  # a tenth comes before the measured part
    assert cell.warmup_of(40) == 4
    assert cell.arrivals().arrivals == arrivals
    assert replace(cell, requests=80).arrivals().arrivals[:44] == arrivals
    assert replace(cell, seed=1).arrivals().arrivals != arrivals
    timed = replace(cell, requests=None, seconds=10.0).arrivals().arrivals
    assert timed == arrivals[: len(timed)]
    assert timed[-1].at_s < 10 <= arrivals[len(timed)].at_s


def test_trace_is_cut_in_its_own_time_and_then_sent_faster(trace: Path) -> None:
    cell = replayed(trace, replace(LIKE, speed=2.0, minutes=1.0))
    arrivals = cell.arrivals().arrivals
    assert [one.at_s for one in arrivals] == [second / 2 for second in range(1, 60)]
    assert cell.warmup_of(len(arrivals)) == 0
    assert [one.prompt.reusable_tokens for one in arrivals[:3]] == [0, 512, 512]
    assert len(replace(cell, requests=5).arrivals().arrivals) == 5
    assert replace(cell, minutes=None).arrivals().arrivals[-1].at_s == 45


@pytest.mark.parametrize("text", ["", "\n\n", "{}", "[1]", '{"timestamp": 0, "input_length": 600, "hash_ids": [1]}'])
def test_file_that_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest):
        replayed(path, LIKE).arrivals()


def _measured(**settings: object) -> Document:
    return {"schema": SCHEMA, "name": "mixed-c8", "settings": settings, "unexpected_failures": 0}


def test_cell_is_done_when_the_same_settings_measured_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.done("mixed-c8", {"seed": 0}) is None
    store.put(_measured(seed=0))
    assert Store(tmp_path).done("mixed-c8", {"seed": 0}) == _measured(seed=0)
    assert store.done("mixed-c16", {"seed": 0}) is None
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["mixed-c8.json"]


def test_cell_of_a_trace_is_refused_when_the_file_of_that_name_changed(tmp_path: Path, trace: Path) -> None:
    store = Store(tmp_path)
    cell = replayed(trace, LIKE)
    assert cell.trace_sha256 == hashlib.sha256(TRACE.encode()).hexdigest()
    store.put(_measured(**cell.settings()))
    assert store.done("mixed-c8", replayed(trace, LIKE).settings()) is not None
    trace.write_text(TRACE.replace("600", "601"))
    with pytest.raises(InvalidRequest, match="another trace_sha256"):
        store.done("mixed-c8", replayed(trace, LIKE).settings())


def test_cell_of_a_trace_is_measured_again_when_it_was_kept_without_a_hash(tmp_path: Path, trace: Path) -> None:
    store = Store(tmp_path)
    settings = replayed(trace, LIKE).settings()
    old = {name: value for name, value in settings.items() if name != "trace_sha256"}
    store.put(_measured(**old))
    assert store.done("mixed-c8", settings) is None
    with pytest.raises(InvalidRequest, match="another seed"):
        store.done("mixed-c8", settings | {"seed": 1})


def test_cell_of_a_family_stays_done_when_it_was_kept_before_traces_had_a_hash(tmp_path: Path) -> None:
    store = Store(tmp_path)
    settings = closed(("mixed",), (8,), LIKE)[0].settings()
    store.put(_measured(**{name: value for name, value in settings.items() if name != "trace_sha256"}))
    assert store.done("mixed-c8", settings) is not None


def test_trace_is_replayed_when_its_name_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "talk\udcff.jsonl"
    path.write_text(TRACE)
    first = replayed(path, LIKE).arrivals().arrivals[0]
    assert len(workload.stream_tokens(first.prompt.parts[0].stream, 600, 1000)) == 4 * 600


def test_cell_with_failures_is_measured_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(_measured(seed=0) | {"unexpected_failures": 1})
    assert store.done("mixed-c8", {"seed": 0}) is None


def test_cell_of_other_settings_is_refused_and_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(_measured(seed=0, policy="fixed"))
    with pytest.raises(InvalidRequest, match="another policy"):
        store.done("mixed-c8", {"seed": 0, "policy": "mpu"})
    assert store.done("mixed-c8", {"seed": 0, "policy": "fixed"}) is not None


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 100_000, '{"schema": 0}', '{"schema": 1}', '{"schema":1,"settings":{}}']
)
def test_file_that_is_no_cell_is_refused(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path)
    (tmp_path / "cells" / "mixed-c8.json").write_text(text)
    with pytest.raises(InvalidRequest):
        store.done("mixed-c8", {})


def test_full_disk_is_told_by_name_and_leaves_no_part(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / "cells" / "mixed-c8.json").mkdir()
    with pytest.raises(InvalidRequest, match="cannot write"):
        store.put(_measured(seed=0))
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["mixed-c8.json"]
