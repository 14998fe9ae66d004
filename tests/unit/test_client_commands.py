"""What `wavepp prefill` and `wavepp status` read and print, without a cluster."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from wavepp.__main__ import build_app
from wavepp.commands import prefill as prefill_command
from wavepp.testing import Answer, FakeController
from wavepp_proto.terms import StageIndex, Timings

PROSE = '{P0, P1} are stages\n\n{"token_ids": [1]}\n[2]\n'


@pytest.mark.parametrize("name", ["notes.md", "prompts", "prompts.json", "-", "--file -"])
def test_every_line_is_text_when_the_file_is_no_jsonl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PROSE))
    (tmp_path / name).write_text(PROSE)
    file = Path("-") if name == "--file -" else tmp_path / name
    prompts = ["-"] if name == "-" else []
    assert prefill_command._read(prompts, None if prompts else file, None) == [
        "{P0, P1} are stages",
        '{"token_ids": [1]}',
        "[2]",
    ]


def test_every_line_is_an_object_when_the_file_is_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"token_ids": [1, 2]}\n\n{"text": "one\u2028line"}\n', encoding="utf-8")
    assert prefill_command._read([], file, None) == [[1, 2], "one\u2028line"]


@pytest.mark.parametrize("line", ["prose", "[1]", '"text"', "7", '{"tokens": [1]}', "{"])
def test_line_is_named_when_a_jsonl_file_holds_no_object(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(typer.Exit) as caught:
        prefill_command._read([], file, None)
    assert caught.value.exit_code == 2
    assert capsys.readouterr().err == "error: line 2 is not a JSON object with text or token_ids\n"


def _prefilled(answer: Answer, *options: str) -> str:
    """What `wavepp prefill` prints of one prompt that is answered so."""
    with FakeController.sync(answer=answer) as controller:
        arguments = ["prefill", "--tokens", "1,2,3", "--controller", controller.address, *options]
        finished = CliRunner().invoke(build_app(), arguments, env={"COLUMNS": "200"})
    assert finished.exit_code == 0, finished.stderr
    return finished.stdout


HELD = Answer(limiting_stage=StageIndex(1), best_stage_hit=688)
NO_SNAPSHOT = Answer(cached_tokens=64, lost_to_snapshots=128)
SHARED = Answer(cached_tokens=160, shared_tokens=160, timings=Timings(sharing_wait_ms=104.2))
ALL = Answer(
    cached_tokens=64, limiting_stage=StageIndex(0), best_stage_hit=96, lost_to_snapshots=16, shared_tokens=64,
    timings=Timings(sharing_wait_ms=9.6),
)  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "limits"),
    [
        (Answer(cached_tokens=64), ""),
        (HELD, "stage 1 (another held 688)"),
        (NO_SNAPSHOT, "no snapshot (192 held)"),
        (SHARED, "waited 104 ms, saved 160"),
        (ALL, "stage 0 (another held 96); no snapshot (80 held); waited 10 ms, saved 64"),
    ],
    ids=["nothing", "stage", "snapshot", "sharing", "all"],
)
def test_table_says_why_reuse_was_less(answer: Answer, limits: str) -> None:
    (row,) = [line.split("│") for line in _prefilled(answer).splitlines() if line.startswith("│")]
    assert row[5].strip() == limits


def test_json_says_why_reuse_was_less() -> None:
    found = json.loads(_prefilled(ALL, "--json"))
    assert (found["lost_to_snapshots"], found["shared_tokens"]) == (16, 64)
    assert found["timings"]["sharing_wait_ms"] == 9.6
