"""Which controller is meant when none was named: the clusters that `wavepp up` runs on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

import wavepp
from wavepp import _discovery as discovery
from wavepp._discovery import DEFAULT_ADDRESS, RunningCluster, choose, forget_cluster, remember_cluster
from wavepp.commands._shared import address_of
from wavepp_proto.errors import InvalidRequest

MODEL = "emulated:layers=4"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the notes, of a user of whom nothing else is known."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("WAVEPP_CONTROLLER", raising=False)
    return tmp_path / "wavepp" / "running"


def note(folder: Path, pid: int, address: str, later_s: float = 0.0, cluster: str = "default") -> Path:
    """What a `wavepp up` of process `pid` leaves; `later_s`: when it began, beside when that process did."""
    folder.mkdir(parents=True, exist_ok=True)
    started_s = psutil.Process(pid).create_time() if psutil.pid_exists(pid) else 0.0
    path = folder / f"{pid}.json"
    path.write_text(json.dumps(asdict(RunningCluster(address, pid, started_s + later_s, cluster, MODEL))))
    return path


@pytest.fixture
def other() -> int:
    """Process id of another living process."""
    return os.getppid()


def test_default_port_is_tried_when_nothing_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose().address == DEFAULT_ADDRESS
    assert address_of(None) == DEFAULT_ADDRESS
    assert capsys.readouterr() == (
        "", f"controller {DEFAULT_ADDRESS} (the default: no `wavepp up` of this user runs here)\n"
    )  # fmt: skip


def test_only_cluster_is_taken_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    remember_cluster("127.0.0.1:4711", "one", MODEL)
    assert address_of(None) == "127.0.0.1:4711"
    said = f"controller 127.0.0.1:4711 (cluster one of `wavepp up` with pid {os.getpid()})\n"
    assert capsys.readouterr() == ("", said)
    assert wavepp.AsyncClient()._address == "127.0.0.1:4711"
    forget_cluster()
    forget_cluster()
    assert choose().address == DEFAULT_ADDRESS


def test_several_clusters_are_listed_and_none_is_taken(
    state: Path, other: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remember_cluster("127.0.0.1:7411", "one", MODEL)
    theirs = note(state, other, "127.0.0.1:4712", cluster="two")
    for ask in (choose, lambda: address_of(None), wavepp.AsyncClient, wavepp.Client):
        with pytest.raises(InvalidRequest) as caught:
            ask()
        assert caught.value.message == (
            "2 clusters run here, name one by --controller (in code: address) or WAVEPP_CONTROLLER: "
            f"127.0.0.1:4712 (cluster two, model {MODEL}, pid {other}); "
            f"127.0.0.1:7411 (cluster one, model {MODEL}, pid {os.getpid()})"
        )
        assert caught.value.fields == {"field": "controller", "value": "2", "limit": "1"}
    assert address_of("127.0.0.1:7411") == "127.0.0.1:7411"
    monkeypatch.setenv("WAVEPP_CONTROLLER", "host:1")
    assert choose().address == "host:1"
    monkeypatch.delenv("WAVEPP_CONTROLLER")
    assert capsys.readouterr() == ("", "")

    # the newer one stops: the older one is still found, which one file for all would have lost
    forget_cluster()
    assert (choose().address, theirs.exists()) == ("127.0.0.1:4712", True)


def test_notes_of_dead_processes_count_for_nothing_and_go(state: Path, other: int) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    broken = subprocess.Popen([sys.executable, "-c", ""])
    broken.wait(30)
    stale = [note(state, gone.pid, "127.0.0.1:1"), state / f"{broken.pid}.json"]
    stale[1].write_text("{")
    came_again = note(state, other, "127.0.0.1:2", later_s=-3600.0)
    remember_cluster("127.0.0.1:3", "default", MODEL)
    assert choose().address == "127.0.0.1:3"
    assert [path.name for path in (*stale, came_again) if path.exists()] == []


NO_NOTES: dict[str, Callable[[Path], object]] = {
    "deep": lambda path: path.write_text("[" * 100_000),
    "a list": lambda path: path.write_text("[]"),
    "half": lambda path: path.write_text("{"),
    "pipe": lambda path: make_pipe(path),
    "pid": lambda path: rewrite(path, pid=None),
    "another's pid": lambda path: rewrite(path, pid=1),
    "address": lambda path: rewrite(path, address=5),
    "no address": lambda path: rewrite(path, address="nowhere"),
    "endless port": lambda path: rewrite(path, address="a:" + "9" * 5000),
    "start": lambda path: rewrite(path, started_s=None),
    "start beyond numbers": lambda path: path.write_text(
        path.read_text().replace('"started_s": ', '"started_s": 1e999, "x": ')
    ),
    "cluster": lambda path: rewrite(path, cluster=["one"]),
}


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", NO_NOTES)
def test_note_that_makes_no_sense_counts_for_nothing_and_stays_while_its_process_lives(
    state: Path, other: int, name: str
) -> None:
    path = note(state, other, "127.0.0.1:1")
    NO_NOTES[name](path)
    assert discovery.running_clusters() == []
    assert choose().address == DEFAULT_ADDRESS
    assert path.exists()
    remember_cluster("127.0.0.1:3", "one", MODEL)
    assert choose().address == "127.0.0.1:3"


def test_note_of_a_later_version_is_read_as_far_as_it_is_known(state: Path, other: int) -> None:
    path = note(state, other, "127.0.0.1:4712")
    rewrite(path, ranks=[2, 2], version=7)
    assert choose().address == "127.0.0.1:4712"
    assert path.exists()


def test_file_that_no_process_names_is_left_alone(state: Path) -> None:
    state.mkdir(parents=True)
    (state / "notes.json").write_text("{")
    assert discovery.running_clusters() == []
    assert (state / "notes.json").exists()


def test_note_stays_while_the_system_hides_its_process(
    state: Path, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = note(state, other, "127.0.0.1:1")

    def hidden(pid: int) -> float:
        raise psutil.AccessDenied(pid)

    monkeypatch.setattr(discovery, "_started_s", hidden)
    discovery.running_clusters()
    assert path.exists()


@pytest.mark.parametrize("home", ["/proc/nowhere", ""])
def test_nothing_is_found_and_nothing_raises_without_a_home(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr("wavepp._paths.pwd.getpwuid", _no_such_user)
    assert discovery.running_clusters() == []
    assert choose().address == DEFAULT_ADDRESS
    with pytest.raises(InvalidRequest) as caught:
        remember_cluster("127.0.0.1:3", "default", MODEL)
    assert caught.value.fields["field"] == ("XDG_STATE_HOME" if home else "HOME")
    forget_cluster()


def _no_such_user(uid: int) -> None:
    raise KeyError(uid)
