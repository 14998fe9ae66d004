"""Kept results of benches: whole, or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.kept import read_kept, write_kept


def test_result_comes_back_and_nothing_lies_beside_it_when_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "cell.json"
    assert read_kept(path) is None
    write_kept(path, {"key": "k", "result": [1]})
    assert read_kept(path, "key", "result") == {"key": "k", "result": [1]}
    assert [one.name for one in tmp_path.iterdir()] == ["cell.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"key": "k"', '{"key": "k"}', "[" * 100_000])
def test_result_counts_as_not_measured_when_its_file_is_damaged(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cell.json"
    path.write_text(text)
    assert read_kept(path, "key", "result") is None
    told = capsys.readouterr().err
    assert str(path) in told
    assert len(told.splitlines()) == 1
