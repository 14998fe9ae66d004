"""What `wavepp prefill` and `wavepp status` read and print, without a cluster."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import typer

from wavepp.commands import prefill as prefill_command

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
