"""A local cluster: what its plan says of planning reaches the controller."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from wavepp._child import last_words
from wavepp.local_cluster import LocalCluster, LocalPlan
from wavepp_proto import convert
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.terms import DaemonKey, PipelineId, StageIndex
from wavepp_proto.v1 import admin_pb2, common_pb2


async def started_with(plan: LocalPlan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of the controller."""
    told: list[str] = []

    async def spawn(name: str, module: str, argv: list[str], **_: Any) -> None:
        told.extend(argv)

    local = LocalCluster(plan, folder)
    monkeypatch.setattr(local, "_spawn", spawn)
    await local.start_controller()
    return told


async def test_controller_is_told_how_to_plan_when_the_plan_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LocalPlan("emulated", "emulated", policy="mpu", mode="lockstep", fills=1, model_file=tmp_path / "m.json")
    told = await started_with(plan, tmp_path, monkeypatch)
    pairs = dict(pairwise(told))
    assert (pairs["--policy"], pairs["--mode"], pairs["--fills"]) == ("mpu", "lockstep", "1")
    assert pairs["--model-file"] == str(tmp_path / "m.json")


async def test_controller_plans_by_its_own_defaults_when_the_plan_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = await started_with(LocalPlan("emulated", "emulated"), tmp_path, monkeypatch)
    assert not {"--policy", "--mode", "--fills", "--min-wave-tokens", "--model-file"} & set(told)


async def test_only_the_last_lifes_words_are_told_when_a_process_ends_at_once(tmp_path: Path) -> None:
    """Logs are added to: what an earlier cluster said there is not why this one does not start."""
    (tmp_path / "controller.log").write_text("error: what went wrong yesterday\n")
    local = LocalCluster(LocalPlan("emulated", "emulated"), tmp_path)
    child = await local._spawn("controller", "wavepp_controller", ["--policy", "guess"])
    await child.process.wait()
    assert "guess" in child.tail()
    assert "yesterday" not in child.tail()


def words_of(log: Path, text: str) -> str:
    log.write_text(text)
    return last_words(log)


def test_last_words_leave_out_the_records_of_the_log(tmp_path: Path) -> None:
    record = json.dumps({"event": "listening", "level": "info"})
    words = words_of(tmp_path / "log", f"{record}\nerror: INVALID_REQUEST: no such model\n{record}\n")
    assert words == "error: INVALID_REQUEST: no such model"


def test_last_record_is_told_when_there_are_no_words_or_it_is_an_error(tmp_path: Path) -> None:
    calm = json.dumps({"event": "listening", "level": "info"})
    error = json.dumps({"event": "a controller loop failed", "error": "out of memory", "level": "error"})
    assert words_of(tmp_path / "a", f"{calm}\n{calm}\n") == "listening"
    assert words_of(tmp_path / "b", f"{calm}\n{error}\n") == "a controller loop failed: out of memory"
    assert words_of(tmp_path / "c", f"advice\n{error}\n") == "advice\na controller loop failed: out of memory"


def test_last_words_of_a_long_log_are_short(tmp_path: Path) -> None:
    assert words_of(tmp_path / "log", "x" * 1_000_000) == "[...] " + "x" * 2000
    record = json.dumps({"event": "listening", "level": "info"})
    assert words_of(tmp_path / "records", f"{record}\n" * 10_000) == "listening", "a record cut in two is no words"


@pytest.mark.parametrize(
    ("allowed", "gpus"), [(None, ["0", "1"]), ("6,7", ["6", "7"]), ("GPU-a, GPU-b,GPU-c", ["GPU-a", "GPU-b"])]
)
def test_daemons_get_a_gpu_each_of_those_that_the_operator_allows(
    tmp_path: Path, allowed: str | None, gpus: list[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    plan = LocalPlan(str(tmp_path), "trtllm", stages=2)
    assert plan.gpus(allowed) == dict(zip(plan.places, gpus, strict=True))
    assert LocalPlan(str(tmp_path), "trtllm", stages=2, device="cpu").gpus(allowed) == {}
    assert LocalPlan(str(tmp_path), "torch", stages=2).gpus(allowed) == {}


def test_too_few_gpus_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest) as caught:
        LocalPlan(str(tmp_path), "trtllm", stages=2, ranks=2).gpus("6,7,")
    assert caught.value.fields == {"field": "CUDA_VISIBLE_DEVICES", "value": "6,7,", "limit": "4"}


@pytest.mark.parametrize(("engine", "device"), [("trtllm", "cpu"), ("torch", None), ("emulated", None)])
def test_link_between_gpus_is_refused_without_any(tmp_path: Path, engine: str, device: str | None) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = "emulated" if engine == "emulated" else str(tmp_path)
    with pytest.raises(InvalidRequest) as caught:
        LocalPlan(model, engine, device=device, link="nccl")
    assert caught.value.fields == {"field": "link", "value": "nccl", "limit": "gloo, grpc"}
    assert LocalPlan(str(tmp_path), "trtllm", link="nccl").link == "nccl"


async def test_each_refusal_is_told_once_while_a_pipeline_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of what a stage refuses is tried again until the time is over: nobody should wait for that in silence."""

    def status(state: str, *refusals: str) -> admin_pb2.StatusResponse:
        key = convert.daemon_key_to_pb(DaemonKey(PipelineId("default"), StageIndex(1)))
        refused = [admin_pb2.RefusedMember(key=key, error=common_pb2.Error(message=text)) for text in refusals]
        return admin_pb2.StatusResponse(
            pipelines=[admin_pb2.PipelineStatus(pipeline="default", state=state)], refused=refused
        )

    told: list[str] = []
    answers = iter([status("forming", "a"), status("forming", "a"), status("forming", "b"), status("serving")])
    local = LocalCluster(LocalPlan("emulated", "emulated"), tmp_path)

    async def answer() -> admin_pb2.StatusResponse:
        return next(answers)

    monkeypatch.setattr(local, "status", answer)
    await local.wait_serving(time.monotonic() + 60, told.append)
    assert told == ["stage 1 is refused: a", "stage 1 is refused: b"]


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ("nan_token=99999999999999999999,nan_layer=-1", "nan_token", "99999999999999999999"),
        ("nan_token=7,nan_layer=-1", "nan_layer", "-1"),
        ("layers=" + "9" * 5000, "layers", "9" * 5000),
        ("layers=x", "layers", "x"),
        ("layers=0", "layers", "0"),
        ("layers=2,layers=3", "layers", "3"),
        ("token_us=nan", "token_us", "nan"),
        ("speedup=0", "speedup", "0"),
        ("cache_thread=none", "cache_thread", "none"),
        ("layer=2", "layer", "2"),
        ("profile=f.json,window=9", "window", "9"),
    ],
    ids=lambda one: one[:40],
)
def test_preset_that_every_stage_would_refuse_is_refused_before_anything_starts(
    settings: str, field: str, value: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LocalPlan(f"emulated:{settings}", "emulated", stages=2)
    assert (caught.value.fields["field"], caught.value.fields["value"]) == (field, value)


def test_preset_that_stages_take_is_taken() -> None:
    taken = "emulated:layers=4,nan_token=7,nan_layer=3,wave_us=1.5,speedup=2,cache_thread=engine,hang=f"
    assert LocalPlan(taken, "emulated", stages=2).model == taken
