"""`wavepp up` and the commands beside it, as a user runs them: processes, exit codes, nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.harness.command import Up, json_lines, wavepp
from tests.harness.eventually import eventually_sync
from tests.harness.ports import free_port
from tests.harness.processes import QUICK, VOCABULARY, random_prompt
from wavepp.bench.timeline import read_timeline
from wavepp_proto.errors import ENGINE_HUNG
from wavepp_proto.runtime.timeline import check_timeline
from wavepp_stage.engine.emulated import expected_first_token

pytestmark = pytest.mark.processes

SMALL = ("--model", QUICK, "--engine", "emulated", "--stages", "2", "--pool-blocks", "128,64", "--block-tokens", "16")


def _listen() -> tuple[str, str]:
    return "--listen", f"127.0.0.1:{free_port()}"


def test_a_cluster_serves_the_other_commands_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    with Up(tmp_path, *SMALL, *_listen(), "--trace-file", str(timeline)) as up:
        facts = up.serving()
        assert set(facts["pids"]) == {"etcd", "controller", "stage-0", "stage-1"}
        assert set(facts["pids"].values()) <= up.seen

        status = wavepp(tmp_path, "status", "--json")
        assert status.returncode == 0, status.stderr
        (found,) = json_lines(status)
        assert (found["ready"], found["pid"]) == (True, facts["pids"]["controller"])
        assert [daemon["pool_blocks"] for daemon in found["pipelines"][0]["daemons"]] == [128, 64]

        prompts = [[1, 2, 3], random_prompt(1, 100), random_prompt(2, 33)]
        lines = "".join(json.dumps({"token_ids": prompt}) + "\n" for prompt in prompts)
        (tmp_path / "prompts.jsonl").write_text(lines)
        one = wavepp(tmp_path, "prefill", "--tokens", "1,2,3", "--json")
        many = wavepp(tmp_path, "prefill", "--file", str(tmp_path / "prompts.jsonl"), "--json")
        again = wavepp(
            tmp_path,
            "prefill",
            "--file",
            str(tmp_path / "prompts.jsonl"),
            "--json",
            "--controller",
            facts["controller"],
        )
        wanted = [expected_first_token(prompt, VOCABULARY) for prompt in prompts]
        for finished, tokens in ((one, wanted[:1]), (many, wanted), (again, wanted)):
            assert finished.returncode == 0, finished.stderr
            assert [answer["first_token"] for answer in json_lines(finished)] == tokens
        assert [answer["cached_tokens"] for answer in json_lines(again)] == [0, 96, 32]

        bad = wavepp(tmp_path, "prefill", "--tokens", f"1,{VOCABULARY}", "--json")
        assert bad.returncode == 1
        assert json_lines(bad)[0]["error"]["reason"] == "TOKEN_OUT_OF_RANGE"

        up.signal(signal.SIGINT)
        assert up.ended() == 0, up.said
        up.nothing_is_left()
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == []
    assert wavepp(tmp_path, "status", "--json", "--controller", facts["controller"]).returncode == 1
    summary = check_timeline(timeline.read_text())
    assert summary.stages == ("pipeline default: stage 0", "pipeline default: stage 1")
    assert summary.admissions == 7
    assert summary.arrows == 7


def test_bench_draws_the_waves_of_a_cluster_that_still_runs(tmp_path: Path) -> None:
    trace = tmp_path / "up.trace.json"
    with Up(tmp_path, *SMALL, *_listen(), "--trace-file", str(trace)) as up:
        up.serving()
        load = ("--family", "short_cold", "--prompt-tokens", "256", "--concurrency", "2", "--requests", "4")
        done = wavepp(tmp_path, "bench", *load, "--timeline", str(trace), "--out", str(tmp_path / "results"))
        assert done.returncode == 0, done.stderr
        assert "its waves are older" not in done.stderr
        assert [path.name for path in (tmp_path / "results").glob("timeline.png")] == ["timeline.png"]
        assert len(read_timeline(trace)) == 2
        up.signal(signal.SIGINT)
        assert up.ended() == 0, up.said


def test_stages_are_sized_as_asked_when_a_hybrid_model_is_served(tmp_path: Path) -> None:
    hybrid = (
        "--model",
        f"{QUICK},attention_every=3",
        "--stages",
        "2",
        "--block-tokens",
        "16",
        "--headroom-blocks",
        "2",
    )
    sizes = ("--pool-blocks", "128", "--host-pool-blocks", "32,48", "--state-slots", "20", "--snapshot-tokens", "64")
    with Up(tmp_path, *hybrid, *sizes, *_listen()) as up:
        up.serving()
        (found,) = json_lines(wavepp(tmp_path, "status", "--json"))
        daemons = found["pipelines"][0]["daemons"]
        assert [daemon["host_pool_blocks"] for daemon in daemons] == [32, 48]
        assert [daemon["state_slots"] for daemon in daemons] == [20, 20]
        assert [daemon["groups"] for daemon in daemons] == [["attention", "recurrent"]] * 2
        table = wavepp(tmp_path, "status")
        assert table.returncode == 0, table.stderr
        assert all(size in table.stdout for size in ("0+0/128", "0/32", "0/48", "0+0/20"))
        up.signal(signal.SIGINT)
        assert up.ended() == 0, up.said


def test_a_stage_that_dies_is_started_again_and_a_killed_up_leaves_no_child(tmp_path: Path) -> None:
    with Up(tmp_path, *SMALL, *_listen()) as up:
        facts = up.serving()
        os.kill(facts["pids"]["stage-1"], signal.SIGKILL)
        eventually_sync(lambda: "stage 1 ended with status -9; starting it again" in up.said)
        answered = wavepp(tmp_path, "prefill", "--tokens", "1,2,3", "--json")
        assert answered.returncode == 0, answered.stderr
        assert json_lines(answered)[0]["first_token"] == expected_first_token([1, 2, 3], VOCABULARY)

        up.signal(signal.SIGKILL)
        assert up.ended() == -signal.SIGKILL
        up.nothing_is_left()


def test_a_stage_whose_engine_hangs_is_named_exits_and_serves_again_in_another_process(tmp_path: Path) -> None:
    wish = tmp_path / "hang"  # stage 1 takes hang.1 away, once
    model = ("--model", f"{QUICK},hang={wish}")
    with Up(tmp_path, *SMALL, *model, *_listen(), "--hang-ms", "2000") as up:
        facts = up.serving()
        tokens = ",".join(map(str, random_prompt(1, 40)))
        before = wavepp(tmp_path, "prefill", "--tokens", tokens, "--json")
        assert before.returncode == 0, before.stderr
        Path(f"{wish}.1").touch()
        lost = wavepp(tmp_path, "prefill", "--tokens", tokens, "--json")
        (told,) = json_lines(lost)
        fields = told["error"]["fields"]
        assert (told["error"]["reason"], fields["stage"], fields["cause"]) == ("STAGE_LOST", 1, ENGINE_HUNG)
        after = wavepp(tmp_path, "prefill", "--tokens", tokens, "--json")
        assert after.returncode == 0, after.stderr
        assert json_lines(after)[0]["first_token"] == json_lines(before)[0]["first_token"]
        assert not psutil.pid_exists(facts["pids"]["stage-1"])
        assert psutil.pid_exists(facts["pids"]["stage-0"])
        up.signal(signal.SIGINT)
        assert up.ended() == 0, up.said
    assert "stage 1 ended with status 75 (its engine hung); starting it again (restart 1 of 5 in 600 s)" in up.said
    logged = (Path(facts["logs"]) / "stage-1.log").read_text()
    assert '"event": "engine hung"' in logged


def test_every_rank_has_its_process_and_its_track_and_is_started_again_when_it_dies(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    ranks = ("--ranks", "2", "--pool-blocks", "128,96,64,128")
    with Up(tmp_path, *SMALL, *ranks, *_listen(), "--trace-file", str(timeline)) as up:
        facts = up.serving()
        names = ["stage-0.0", "stage-0.1", "stage-1.0", "stage-1.1"]
        assert set(facts["pids"]) == {"etcd", "controller", *names}
        (found,) = json_lines(wavepp(tmp_path, "status", "--json"))
        sizes = [daemon["pool_blocks"] for daemon in found["pipelines"][0]["daemons"]]
        assert sizes == [128, 96, 64, 128]
        os.kill(facts["pids"]["stage-1.1"], signal.SIGKILL)
        eventually_sync(lambda: "stage 1.1 ended with status -9; starting it again" in up.said)
        answered = wavepp(tmp_path, "prefill", "--tokens", "1,2,3", "--json")
        assert answered.returncode == 0, answered.stderr
        assert json_lines(answered)[0]["first_token"] == expected_first_token([1, 2, 3], VOCABULARY)
        table = wavepp(tmp_path, "status")
        assert all(f" {place} " in table.stdout for place in ("0.0", "0.1", "1.0", "1.1")), table.stdout
        up.signal(signal.SIGINT)
        assert up.ended() == 0, up.said
        up.nothing_is_left()
    tracks = check_timeline(timeline.read_text()).stages
    assert tracks == tuple(
        f"pipeline default: {place}" for place in ("stage 0", "stage 0 rank 1", "stage 1", "stage 1 rank 1")
    )


ONE_STAGE = ("--model", QUICK, "--stages", "1", "--block-tokens", "16")


def test_two_clusters_are_told_apart_and_the_older_is_found_when_the_newer_stops(tmp_path: Path) -> None:
    with Up(tmp_path, *ONE_STAGE, *_listen()) as older:
        first = older.serving()["controller"]
        with Up(tmp_path, *ONE_STAGE, *_listen(), "--cluster", "second") as newer:
            second = newer.serving()["controller"]
            refused = wavepp(tmp_path, "prefill", "--tokens", "1,2,3")
            assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
            assert f"{first} (cluster default, " in refused.stderr
            assert f"{second} (cluster second, " in refused.stderr
            for named in ({"WAVEPP_CONTROLLER": second}, {}):
                asked = ("status", "--json") + (() if named else ("--controller", second))
                status = wavepp(tmp_path, *asked, environment=named)
                assert (json_lines(status)[0]["cluster"], status.stderr) == ("second", "")
            newer.signal(signal.SIGINT)
            assert newer.ended() == 0, newer.said
        status = wavepp(tmp_path, "status", "--json")
        assert status.returncode == 0, status.stderr
        assert json_lines(status)[0]["cluster"] == "default"
        assert status.stderr == f"controller {first} (cluster default of `wavepp up` with pid {older.process.pid})\n"
        older.process.kill()  # which leaves its note
        older.ended()
        assert "no `wavepp up` of this user runs here" in wavepp(tmp_path, "status", "--json").stderr
        older.nothing_is_left()


def test_up_serves_without_a_place_for_its_notes_and_says_what_is_lost(tmp_path: Path) -> None:
    """A home that is read-only, or of a user who has none."""
    poor = {"HOME": "/proc/nowhere", "XDG_STATE_HOME": "", "PYTHONIOENCODING": "ascii"}
    with Up(tmp_path, *ONE_STAGE, *_listen(), environment=poor) as up:
        address = up.serving()["controller"]
        asked = ("prefill", "--tokens", "1,2,3", "--controller", address)
        assert wavepp(tmp_path, *asked, environment=poor).returncode == 0
        up.signal(signal.SIGINT)
        assert up.ended() == 0, up.said
        up.nothing_is_left()
    lines = [line for line in up.said.splitlines() if line.startswith("cannot ")]
    assert len(lines) == 2, up.said
    assert f": logs go to {tmp_path}/tmp/wavepp-logs-" in lines[0]
    assert lines[1].endswith(f": other commands need --controller {address}")


def test_another_port_is_taken_when_the_default_one_has_a_holder(tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # somebody else on this machine has it: just as good
            held.enter_context(socket.create_server(("127.0.0.1", 7411)))
        with Up(tmp_path, *SMALL) as up:
            facts = up.serving()
            assert "port 7411 is taken; using a free one" in up.said
            assert not facts["controller"].endswith(":7411")
            up.signal(signal.SIGTERM)
            assert up.ended() == 0


def test_the_holder_is_named_when_the_chosen_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        with Up(tmp_path, *SMALL, "--listen", address) as up:
            assert up.ended() == 1
            assert address in up.said
            assert f"(pid {os.getpid()})" in up.said
            up.nothing_is_left()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param(
            ("--layers", "0:3,3:5", "--timeout-s", "20"), "did not form within 20 s: stage 1 is refused", id="bands"
        ),
        pytest.param(("--model", "emulated:layers=1"), "1 layers cannot fill 2 stages", id="too-few-layers"),
        pytest.param(("--model", "/nowhere", "--engine", "torch"), "no model folder '/nowhere'", id="no-model"),
    ],
)
def test_up_says_why_and_stops_when_a_stage_cannot_serve(
    tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    with Up(tmp_path, *SMALL, *arguments, *_listen()) as up:
        assert up.ended() == 1
        assert reason in up.said
        assert "Traceback" not in up.said
        up.nothing_is_left()


def test_up_names_the_stage_and_stops_within_its_limit_when_it_never_registers(tmp_path: Path) -> None:
    with Up(tmp_path, *SMALL, *_listen(), "--timeout-s", "20") as up:
        stage = eventually_sync(lambda: up.child("--stage", "1"))
        stage.send_signal(signal.SIGSTOP)
        assert up.ended() == 1
        assert "did not form within 20 s: no daemon for stage 1" in up.said
        up.nothing_is_left()


def test_up_says_so_and_serves_on_when_its_etcd_dies(tmp_path: Path) -> None:
    with Up(tmp_path, *SMALL, *_listen()) as up:
        os.kill(up.serving()["pids"]["etcd"], signal.SIGKILL)
        eventually_sync(lambda: "etcd ended" in up.said)
        answer = wavepp(tmp_path, "prefill", "--tokens", "1,2,3", "--json")
        assert json_lines(answer)[0]["first_token"] == expected_first_token([1, 2, 3], VOCABULARY)
        up.signal(signal.SIGINT)
        assert up.ended() == 0, up.said
        up.nothing_is_left()
