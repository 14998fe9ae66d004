"""Rules about the tree itself: short files, runnable scripts, the change log's headings, the pure part listed."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("proto", "controller", "stage_daemon", "client", "simulator")
# A file is one noun of the field: short enough to read in one sitting, never cut in two for this limit.
MOST_LINES = 600
# One table of message types each, no logic: splitting it would hide which words belong to the wire.
TABLES = {ROOT / "proto" / "wavepp_proto" / "terms.py"}
HEADINGS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Measured"]

MODULES = [
    path
    for root in SOURCE_ROOTS
    for path in sorted((ROOT / root).rglob("*.py"))
    if not path.stem.endswith(("_pb2", "_pb2_grpc")) and path not in TABLES
]
SCRIPTS = sorted([*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_is_short_when_written_by_hand(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_is_runnable_when_called(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=30)
    is_sourced = path.name.startswith("_")
    assert os.access(path, os.X_OK) is not is_sourced
    assert "set -euo pipefail" in path.read_text() or "/_env.sh" in path.read_text()


def test_changelog_uses_the_listed_headings_in_order_when_read() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    comment, _, body = text.partition("-->")
    assert comment.startswith("<!--")
    assert ", ".join(HEADINGS) in comment
    releases = re.split(r"^## ", body, flags=re.MULTILINE)[1:]
    assert releases
    for release in releases:
        used = re.findall(r"^### (.+)$", release, flags=re.MULTILINE)
        assert used == [heading for heading in HEADINGS if heading in used]
        assert used


def test_import_rule_lists_every_pure_module_when_one_is_added() -> None:
    """A module beside terms.py is pure unless it is the bridge to protobuf; import-linter needs it by name."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (pure,) = (contract for contract in contracts if contract["name"].startswith("pure code"))
    listed = {name.removeprefix("wavepp_proto.") for name in pure["source_modules"] if name.startswith("wavepp_proto.")}
    modules = {path.stem for path in (ROOT / "proto" / "wavepp_proto").glob("*.py")}
    assert listed == modules - {"__init__", "convert"}
