"""`wavepp bench` on a pipeline in this process: every request answered, every number consistent, nothing held after."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.harness.cluster import Cluster
from tests.harness.eventually import eventually
from wavepp import profiles
from wavepp.bench.cells import Cell, arriving, closed, replayed
from wavepp.bench.page import write_page
from wavepp.bench.report import without_samples
from wavepp.bench.run import Bench, Plan
from wavepp.bench.running import Options
from wavepp.bench.store import Document, Store
from wavepp.commands.gathered import build_app
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.profile import Profile, StageCosts, StageProfile

LIKE = Cell(lengths="glm", scale=0.005, requests=6)
PROFILE = Profile("two", tuple(StageProfile(StageCosts(b_us=b_us), 256) for b_us in (1.0, 2.0)))
"""The slower stage computes half a million tokens/s."""


def bench_of(cluster: Cluster, folder: Path, cells: list[Cell], profile: Profile | None = None) -> Bench:
    options = Options(cluster.controller.address, deadline_s=60.0, cache_salt="", profile=profile)
    plan = Plan(cells, options, own_salts=True, pipeline=None, command=("wavepp", "bench"))
    return Bench(cluster.client, plan, Store(folder), lambda text: None)


def columns(cell: Document, *names: str) -> list[tuple[int, ...]]:
    where = [cell["samples"]["columns"].index(name) for name in names]
    return [tuple(row[at] for at in where) for row in cell["samples"]["measured"]]


async def finished(cluster: Cluster) -> int:
    return (await cluster.client.status()).counters["finished"]


async def test_closed_loop_answers_everything_and_its_numbers_agree(tmp_path: Path) -> None:
    async with Cluster(stages=2) as cluster:
        bench = bench_of(cluster, tmp_path, closed(("short_cold", "short_reuse"), (2,), LIKE), PROFILE)
        await bench.run()
        assert bench.unexpected_failures == 0
        cold, reuse = bench.document()["cells"]
        for cell in (cold, reuse):
            assert (cell["failed"], cell["interrupted"], cell["stopped_early"]) == ({}, False, False)
            assert cell["requests"]["warmup"] >= 2
            assert cell["requests"]["measured"] == cell["summary"]["finished"] >= 6
            assert [split["stage"] for split in cell["stages"]] == [0, 1]
            assert cell["waves"]["count"] > 0
        assert set(columns(cold, "prompt_tokens", "reusable_tokens", "cached_tokens")) == {(640, 0, 0)}
        # 115,200 of 128,000 tokens are shared; of 1/200 of them, as many as fill blocks of 16.
        assert set(columns(reuse, "prompt_tokens", "reusable_tokens", "cached_tokens")) == {(640, 576, 576)}
        assert (cold["summary"]["good_hit_rate"], reuse["summary"]["good_hit_rate"]) == (None, 1.0)
        assert cold["bound"]["input_tokens_per_s"] == pytest.approx(500_000)
        assert reuse["bound"]["input_tokens_per_s"] == pytest.approx(5_000_000)
        sent = sum(sum(cell["requests"].values()) for cell in (cold, reuse))
        assert await finished(cluster) == sent + 1  # and the shared prefix


async def test_poisson_arrivals_are_all_answered(tmp_path: Path) -> None:
    async with Cluster(stages=1) as cluster:
        cells = arriving(("short_reuse",), (500.0,), replace(LIKE, requests=20))
        bench = bench_of(cluster, tmp_path, cells)
        await bench.run()
        (cell,) = bench.document()["cells"]
        assert (cell["name"], cell["failed"]) == ("short_reuse-r500", {})
        assert cell["requests"] == {"warmup": 2, "measured": 20, "tail": 0}
        assert sorted(number for (number,) in columns(cell, "number")) == list(range(2, 22))


async def test_trace_is_replayed_whole(tmp_path: Path) -> None:
    """Five conversations of four turns, each of which adds a block of the trace and ends on a part of one."""
    trace = tmp_path / "talk.jsonl"
    lines = [
        {"timestamp": 100 * turn, "input_length": 512 * (1 + turn % 4) + 100, "output_length": 1,
         "hash_ids": [*(turn // 4 * 10 + block for block in range(1 + turn % 4)), 1000 + turn]}
        for turn in range(20)
    ]  # fmt: skip
    trace.write_text("\n".join(map(json.dumps, lines)))
    async with Cluster(stages=2) as cluster:
        cell = replayed(trace, replace(LIKE, requests=None, scale=0.125, speed=100.0))
        bench = bench_of(cluster, tmp_path / "out", [cell])
        await bench.run()
        (measured,) = bench.document()["cells"]
        assert measured["name"] == "talk-x100"
        assert (measured["failed"], measured["requests"]) == ({}, {"warmup": 0, "measured": 20, "tail": 0})
        told = sorted(columns(measured, "number", "prompt_tokens", "reusable_tokens"))
        assert told == [
            (turn, 64 * (1 + turn % 4) + 12, 64 * (turn % 4)) for turn in range(20)
        ]  # fmt: skip
        # Turns overlap at this speed: one may even reuse what a later one computed first.
        assert all(
            cached % 16 == 0 and cached < size for cached, size in columns(measured, "cached_tokens", "prompt_tokens")
        )


async def test_cells_that_were_measured_are_not_repeated(tmp_path: Path) -> None:
    async with Cluster(stages=1) as cluster:
        first = bench_of(cluster, tmp_path, closed(("short_cold",), (1,), LIKE))
        await first.run()
        before = await finished(cluster)
        second = bench_of(cluster, tmp_path, closed(("short_cold",), (1,), LIKE))
        await second.run()
        assert await finished(cluster) == before
        assert second.document()["cells"] == json.loads(json.dumps(first.document()["cells"]))
        other = bench_of(cluster, tmp_path, closed(("short_cold",), (1,), replace(LIKE, seed=7)))
        with pytest.raises(InvalidRequest, match="another seed"):
            await other.run()


async def test_cells_of_the_folder_stay_in_the_summary_when_another_bench_measures_there(tmp_path: Path) -> None:
    async with Cluster(stages=1) as cluster:
        await bench_of(cluster, tmp_path, closed(("short_cold",), (1,), LIKE)).run()
        second = bench_of(cluster, tmp_path, closed(("short_cold",), (2,), LIKE))
        assert second.document()["cells"] == []
        await second.run()
        assert [cell["name"] for cell in second.document()["cells"]] == ["short_cold-c1", "short_cold-c2"]
        options = Options(cluster.controller.address, deadline_s=5.0, cache_salt="")
        plan = Plan(closed(("short_cold",), (4,), LIKE), options, own_salts=True, pipeline=None, command=())
        third = Bench(cluster.client, plan, Store(tmp_path), lambda text: None)
        with pytest.raises(InvalidRequest, match="short_cold-c1 was measured in this folder with another deadline_s"):
            await third.run()


async def test_requests_of_others_on_the_same_controller_are_told(tmp_path: Path) -> None:
    async with Cluster(stages=1) as cluster:
        bench = bench_of(cluster, tmp_path, closed(("short_cold",), (1,), replace(LIKE, requests=300)))
        running = asyncio.create_task(bench.run())
        await eventually(lambda: bool(bench.document()["cells"]), about="a measured request")
        await cluster.client.prefill(list(range(40)))
        await running
        (cell,) = bench.document()["cells"]
        assert cell["foreign_requests"] == 1


async def test_interrupted_bench_has_what_it_measured_so_far_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with Cluster(stages=2) as cluster:
        bench = bench_of(cluster, tmp_path, closed(("short_cold",), (2,), replace(LIKE, requests=100_000)))
        running = asyncio.create_task(bench.run())
        await eventually(lambda: bool(bench.document()["cells"]), about="a measured request")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        (cell,) = bench.document()["cells"]
        assert cell["interrupted"]
        assert cell["summary"]["finished"] >= 1
        assert list((tmp_path / "cells").iterdir()) == []


async def test_failed_requests_are_counted_by_reason_and_the_cell_is_measured_again(tmp_path: Path) -> None:
    """Prompts of 640 tokens need 40 blocks where there are 32."""
    async with Cluster(stages=1, pool_blocks=(32,)) as cluster:
        bench = bench_of(cluster, tmp_path, closed(("short_cold",), (1,), LIKE))
        await bench.run()
        (cell,) = bench.document()["cells"]
        assert cell["failed"].keys() == {"NEVER_FITS"}
        assert (bench.unexpected_failures, cell["summary"]["finished"]) == (cell["failed"]["NEVER_FITS"], 0)
        assert Store(tmp_path).done(cell["name"], {}) is None


@pytest.mark.parametrize("wrong", ["window", "window of arrivals", "profile"])
async def test_cell_that_the_pipeline_cannot_serve_is_refused_before_it_is_sent(tmp_path: Path, wrong: str) -> None:
    async with Cluster(stages=1) as cluster:
        like = LIKE if wrong == "profile" else replace(LIKE, scale=1.0)
        cells = arriving(("long_cold",), (1.0,), like) if "arrivals" in wrong else closed(("mixed",), (1,), like)
        bench = bench_of(cluster, tmp_path, cells, PROFILE if wrong == "profile" else None)
        with pytest.raises(InvalidRequest):
            await bench.run()
        assert bench.document()["cells"] == []


async def test_page_holds_everything_it_shows(tmp_path: Path) -> None:
    async with Cluster(stages=2) as cluster:
        bench = bench_of(cluster, tmp_path, closed(("mixed",), (1, 2), LIKE), PROFILE)
        await bench.run()
    page = write_page(bench.document(), tmp_path).read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page
    assert all(text in page for text in ("mixed-c1", "mixed-c2", "warm", "admission wait", "wavepp bench"))
    assert [(tmp_path / name).read_bytes()[:4] for name in ("throughput.png", "completion.png")] == [b"\x89PNG"] * 2
    assert "samples" not in json.dumps(without_samples(bench.document()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--concurrency", "8,x"), "concurrency must be numbers with commas between"),
        (("--concurrency", "129"), "at most 128 slots"),
        (("--rate", "0"), "rate must be at least 1e-06"),
        (("--family", "lukewarm"), "no family lukewarm"),
        (("--lengths", "gpt"), "no model gpt"),
        (("--trace", "/nowhere"), "no trace file /nowhere"),
        (("--expect", "BAD_LUCK"), "no reason 'BAD_LUCK'"),
        (("--profile", "/nowhere"), "no profile '/nowhere'"),
        (("--plots", "--timeline", "/nowhere"), "no timeline in /nowhere"),
        (("--out", "/proc/nope"), "cannot make /proc/nope"),
        (("--controller", "127.0.0.1:1"), "CONTROLLER_UNAVAILABLE"),
    ],
)
def test_mistake_is_one_line_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WAVEPP_CONTROLLER", "127.0.0.1:1")  # whatever `wavepp up` runs on this machine
    finished = CliRunner().invoke(build_app(), ["bench", "--deadline-s", "1", *arguments])
    assert (finished.exit_code, type(finished.exception)) == (1, SystemExit)
    assert said in finished.stderr
    assert finished.stdout == ""


def test_profiles_that_ship_may_be_named() -> None:
    assert {len(profiles.load(name).stages) for name in profiles.names()} == {4, 8}
