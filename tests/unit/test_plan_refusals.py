"""What `simulate plan` refuses: one line with field, value and limit, status 2, and never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wavepp_proto.profile import Profile, StageCosts, StageProfile
from wavepp_simulator.__main__ import command

FLAT = Profile(
    "flat",
    (StageProfile(StageCosts(c_us=1e5), pool_blocks=4096),),
    block_tokens=16,
    wave_tokens=64,
    min_wave_tokens=32,
    window=4096,
)
"""Every wave takes 100 ms on the only stage."""
LOOP = ("--family", "short_cold", "--prompt-tokens", "64")


@pytest.fixture
def device(tmp_path: Path) -> str:
    path = tmp_path / "flat.json"
    path.write_text(FLAT.to_json())
    return str(path)


def refusal(*arguments: str) -> str:
    """The only line that the command leaves."""
    told = CliRunner().invoke(command, ["plan", *arguments])
    assert (told.exit_code, told.stdout) == (2, ""), told.exception
    (line,) = told.stderr.splitlines()
    assert line.startswith("error: INVALID_REQUEST: ")
    return line


def trace_of(folder: Path, *at_s: float) -> str:
    path = folder / "t.jsonl"
    lines = ({"timestamp": 1e3 * at, "input_length": 64, "hash_ids": [n]} for n, at in enumerate(at_s))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (("--replicas", "65"), "(field=replicas, limit=64, value=65)"),
        (("--concurrency", "4097"), "(field=concurrency, limit=4096, value=4097)"),
        (("--requests", "1000001"), "(field=requests, limit=1000000, value=1000001)"),
        (("--round-ms", "inf"), "(field=round_ms, limit=1000.0, value=inf)"),
        (("--round-ms", "1e300"), "(field=round_ms, limit=1000.0, value=1e+300)"),
        (("--seconds", "86400"), "(field=seconds, limit=86399.0, value=86400.0)"),
        (("--rate", "1", "--speed", "inf"), "(field=speed, limit=1000000000.0, value=inf)"),
        (("--rate", "1e-6", "--minutes", "1"), "(field=rate, value=1e-06)"),
        (("--lengths", "zz"), "(field=lengths, value=zz)"),
    ],
)
def test_an_option_is_refused_by_field_value_and_limit_when_it_is_out_of_range(
    device: str, arguments: tuple[str, ...], fields: str
) -> None:
    assert refusal("--profile", device, *LOOP, *arguments).endswith(fields)


def test_a_prompt_is_refused_when_it_is_longer_than_the_window(device: str) -> None:
    line = refusal("--profile", device, "--family", "short_cold", "--prompt-tokens", "1000000000000")
    assert line.endswith("(field=prompt_tokens, limit=4096, value=1000000000000)")


def test_a_trace_is_refused_when_its_last_request_comes_after_a_day(device: str, tmp_path: Path) -> None:
    asked = ("--profile", device, "--trace", trace_of(tmp_path, 0, 25 * 3600))
    assert refusal(*asked).endswith("(field=last_arrival_s, limit=86399.0, value=90000.0)")
    faster = CliRunner().invoke(command, ["plan", *asked, "--speed", "2", "--json"])
    assert json.loads(faster.stdout)["requests"] == 2


def test_a_trace_is_played_to_the_end_when_it_takes_nearly_a_day(device: str, tmp_path: Path) -> None:
    told = CliRunner().invoke(
        command, ["plan", "--profile", device, "--trace", trace_of(tmp_path, 0, 86_390), "--json"]
    )
    assert (json.loads(told.stdout)["requests"], json.loads(told.stdout)["failed"]) == (2, 0)


def test_a_plan_is_refused_when_its_work_takes_more_than_a_day(tmp_path: Path) -> None:
    slow = tmp_path / "slow.json"
    slow.write_text(FLAT.to_json().replace("100000.0", "1e13"))
    line = refusal("--profile", str(slow), *LOOP, "--requests", "1")
    assert "more than 86399 s of virtual time" in line
    assert "field=virtual_s, limit=86399.0, value=" in line


def test_a_trace_is_refused_when_nobody_asks_in_it(device: str, tmp_path: Path) -> None:
    path = trace_of(tmp_path)
    assert refusal("--profile", device, "--trace", path).endswith(f"(field=trace, value={path})")
    path = trace_of(tmp_path, 90)
    line = refusal("--profile", device, "--trace", path, "--minutes", "1")
    assert line.endswith(f"nobody arrives in that time (field=trace, value={path})")


@pytest.mark.parametrize("option", ["--profile", "--trace"])
def test_a_file_is_refused_by_name_when_it_is_no_utf8(device: str, tmp_path: Path, option: str) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b'{"name": "\xe9\xff"}\n')
    others = ("--profile", device) if option == "--trace" else LOOP
    line = refusal(*others, option, str(path))
    assert line.endswith(f"(field={option[2:]}, value={path})")
    assert f"cannot read {path}" in line
