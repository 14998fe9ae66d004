"""What `wavepp prefill` and `wavepp status` read and print, without a cluster."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests.harness.ports import free_port
from wavepp import AsyncClient
from wavepp.commands import _status_tables as tables
from wavepp.commands import prefill as prefill_command
from wavepp.commands._shared import explain
from wavepp.commands.gathered import build_app
from wavepp.testing import Answer, FakeController
from wavepp_controller.core.stage_model import BELIEVED_ERROR
from wavepp_proto.errors import DeadlineExpired
from wavepp_proto.terms import StageIndex, Timings
from wavepp_proto.v1 import admin_pb2, common_pb2

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


def test_text_prompt_is_told_the_options_when_there_is_no_tokenizer() -> None:
    with FakeController.sync() as controller:
        finished = CliRunner().invoke(build_app(), ["prefill", "text", "--controller", controller.address])
    assert finished.exit_code == 1
    assert finished.stderr == (
        "prompt 0: error: TOKENIZER_UNAVAILABLE: the controller names no model folder for pipeline default: "
        "give --tokenizer PATH of a copy of the model's folder, or give --tokens 1,2,3 "
        "(field=tokenizer, pipeline=default)\n"
    )


FILES = {
    "lines.txt": (b"one\ntw\xff\nthree\n", {1: r"'\udcff'"}),
    "objects.jsonl": (
        b'{"text": "one"}\n{"text": "tw\xff"}\n{"text": "\\ud800"}\n{"token_ids": [4]}\n',
        {1: r"'\udcff'", 2: r"'\ud800'"},
    ),
}


@pytest.mark.parametrize("source", ["--file", "-", "--file -"])
@pytest.mark.parametrize("name", FILES)
def test_prompt_that_is_not_utf_8_fails_alone(tmp_path: Path, name: str, source: str) -> None:
    data, bad = FILES[name]
    (tmp_path / name).write_bytes(data)
    given = ["--file", str(tmp_path / name)] if source == "--file" else source.split()
    if source != "--file" and name.endswith("jsonl"):
        bad = {1: r"'\udcff'"}  # standard input has one text a line, so an escape is six letters
    with FakeController.sync() as controller:
        arguments = ["prefill", *given, "--tokenizer", str(_letters(tmp_path)), "--controller", controller.address]
        finished = CliRunner().invoke(build_app(), [*arguments, "--json"], input=data)
    assert finished.exit_code == 1, finished.stderr
    outcomes = [json.loads(line) for line in finished.stdout.splitlines()]
    assert len(outcomes) == len(data.splitlines())
    failed = {one["index"]: one["error"] for one in outcomes if "error" in one}
    assert {index: (error["reason"], error["fields"]["value"]) for index, error in failed.items()} == {
        index: ("INVALID_REQUEST", value) for index, value in bad.items()
    }


def test_argument_that_is_not_utf_8_is_refused_by_name() -> None:
    with FakeController.sync() as controller:
        arguments = ["prefill", "te\udcffxt", "--controller", controller.address]
        by_prompt = CliRunner().invoke(build_app(), arguments)
        arguments = ["prefill", "--tokens", "1", "--cache-salt", "\udcff", "--controller", controller.address]
        by_salt = CliRunner().invoke(build_app(), arguments)
    assert (by_prompt.exit_code, by_salt.exit_code) == (1, 1)
    assert by_prompt.stderr == (
        r"prompt 0: error: INVALID_REQUEST: prompt is not UTF-8: character 2 is '\udcff' "
        r"(field=prompt, index=2, limit=UTF-8, value='\udcff')" "\n"
    )  # fmt: skip
    assert "field=cache_salt" in by_salt.stderr


def _letters(folder: Path) -> Path:
    """A tokenizer.json that knows no word, only that it is one."""
    path = folder / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return path


# --- status --------------------------------------------------------------------------------------

KEY = common_pb2.DaemonKey(pipeline="p", stage=1)
ROOM = common_pb2.Capacity(
    free_blocks=60, evictable_blocks=30, host_free_blocks=32, recurrent_free=1, recurrent_evictable=5
)
DAEMON = admin_pb2.StageStatus(
    key=KEY, incarnation=7, address="a:1", engine="torch", first_layer=2, last_layer=4, pool_blocks=100,
    host_pool_blocks=32, state_slots=8, capacity=ROOM, waves_done=9, heartbeat_age_ms=12,
)  # fmt: skip
LOST = common_pb2.Error(reason="STAGE_LOST", message="gone", fields={"stage": "1", "incarnation": "7"})


def _pipeline(state: str, daemon: admin_pb2.StageStatus = DAEMON, **changes: Any) -> admin_pb2.PipelineStatus:
    return admin_pb2.PipelineStatus(pipeline="p", state=state, stages=2, daemons=[daemon], **changes)


def test_status_shows_what_is_in_use_when_the_pipeline_serves() -> None:
    row = tables.stage_row(_pipeline("serving"), DAEMON)
    assert row == ("1", "a:1", "torch", "2:4", "10+30/100", "0/32", "2+5/8", "9", "12")


def test_status_shows_nothing_for_tiers_that_a_stage_does_not_have() -> None:
    plain = admin_pb2.StageStatus(key=KEY, pool_blocks=4, capacity=common_pb2.Capacity(free_blocks=4))
    assert tables.stage_row(_pipeline("serving", plain), plain)[4:7] == ("0+0/4", "-", "-")


def test_status_says_that_a_stage_reconnects_when_its_streams_are_broken() -> None:
    broken = admin_pb2.StageStatus(key=KEY, reconnecting=True, heartbeat_age_ms=300)
    assert tables.stage_row(_pipeline("serving", broken), broken)[-1] == "reconnecting"


@pytest.mark.parametrize(
    ("state", "fault", "beat"),
    [
        ("forming", None, "-"),
        ("forming", LOST, "-"),
        ("broken", LOST, "lost"),
        ("broken", common_pb2.Error(reason="STAGE_LOST", fields={"stage": "1"}), "lost"),
        ("broken", common_pb2.Error(reason="STAGE_LOST", fields={"stage": "0", "incarnation": "7"}), "-"),
        ("broken", common_pb2.Error(reason="STAGE_LOST", fields={"stage": "1", "incarnation": "6"}), "-"),
        ("broken", common_pb2.Error(reason="LINK_FAULT", fields={"stage": "1"}), "-"),
    ],
    ids=["forming", "formed again", "lost", "unreachable", "another stage", "came back", "no loss"],
)
def test_status_shows_no_stage_as_alive_when_its_pipeline_does_not_serve(
    state: str, fault: common_pb2.Error | None, beat: str
) -> None:
    row = tables.stage_row(_pipeline(state, last_fault=fault), DAEMON)
    assert row == ("1", "a:1", "torch", "2:4", "-/100", "-/32", "-/8", "-", beat)


def test_status_shows_a_refused_daemon_in_its_place() -> None:
    places = [common_pb2.DaemonKey(pipeline="p", stage=stage) for stage in (0, 2)]
    refused = [admin_pb2.RefusedMember(key=places[1], address="far:7421")]
    refused += [admin_pb2.RefusedMember(key=common_pb2.DaemonKey(pipeline="q", stage=0), address="elsewhere:1")]
    pipeline = _pipeline("broken", missing=places)
    table = tables.stages(pipeline, refused=refused)
    assert list(table.columns[1].cells) == ["-", "a:1", "far:7421"]
    assert list(table.columns[-1].cells) == ["missing", "-", "refused"]
    assert tables.without_daemon(pipeline, refused) == ["stage 0"]


def test_status_has_a_line_for_every_stage_when_one_is_missing() -> None:
    table = tables.stages(_pipeline("broken", missing=[common_pb2.DaemonKey(pipeline="p", stage=0)]))
    assert list(table.columns[0].cells) == ["0", "1"]
    assert list(table.columns[-1].cells) == ["missing", "-"]


def test_status_has_a_line_for_every_rank_when_stages_have_several() -> None:
    missing = [common_pb2.DaemonKey(pipeline="p", stage=stage, rank=1) for stage in (1, 0)]
    table = tables.stages(_pipeline("broken", missing=missing))
    assert list(table.columns[0].cells) == ["0.1", "1.0", "1.1"]
    assert list(table.columns[-1].cells) == ["missing", "-", "missing"]


@pytest.mark.parametrize(("rank", "beat"), [(0, "-"), (1, "lost")])
def test_status_shows_the_rank_as_lost_that_was_lost(rank: int, beat: str) -> None:
    fault = common_pb2.Error(reason="STAGE_LOST", fields={"stage": "1", "rank": "1", "incarnation": "7"})
    daemon = admin_pb2.StageStatus(key=common_pb2.DaemonKey(pipeline="p", stage=1, rank=rank), incarnation=7)
    assert tables.stage_row(_pipeline("broken", daemon, last_fault=fault), daemon)[-1] == beat


def test_status_cuts_no_figure_when_the_terminal_is_narrow() -> None:
    out = io.StringIO()
    far = admin_pb2.StageStatus()
    far.CopyFrom(DAEMON)
    far.address = "127.127.127.127:65535"
    console = Console(file=out, width=80)
    console.print(tables.stages(_pipeline("serving", far), console))
    lines = [[cell.strip() for cell in line.split("│")] for line in out.getvalue().splitlines() if line[:1] == "│"]
    assert lines == [["", "1", far.address, "10+30/100", "0/32", "2+5/8", "12", ""]]


def test_status_leaves_out_tiers_when_no_stage_has_any() -> None:
    plain = admin_pb2.StageStatus(key=KEY, pool_blocks=4)
    shown = [column.header for column in tables.stages(_pipeline("serving", plain)).columns]
    assert [header for header in shown if str(header).startswith(("host", "states"))] == []


def _learnt(policy: str, *errors: float, believed: bool | None = None) -> list[str]:
    daemons = [
        admin_pb2.StageStatus(
            key=common_pb2.DaemonKey(pipeline="p", stage=stage),
            costs=admin_pb2.StageCosts(
                c_us=2500.0, b_us=1.5, a_us=1e-4, g_us=0.25, error=error, samples=40, believed=believed
            ),
        )
        for stage, error in enumerate(errors)
    ]
    return tables.learnt(
        admin_pb2.PipelineStatus(pipeline="p", state="serving", stages=2, policy=policy, daemons=daemons)
    )


def test_status_says_what_a_wave_takes_in_units_that_can_be_read() -> None:
    first, _, verdict = _learnt("adaptive", 0.01, 0.02)
    assert first == (
        "stage 0: 2.50 ms a wave + 1.5 ms a thousand tokens + 0.1 ms a million (token, token before it) pairs + "
        "0.25 ms a thousand prefix tokens of a chunk; off by 1.0% of late, 40 waves"
    )
    assert verdict == "adaptive plans with these times"


def test_status_says_who_plans_when_times_are_not_believed() -> None:
    assert _learnt("adaptive", 0.01, 0.5)[-1].startswith("mpu plans for now")
    assert _learnt("adaptive", 0.01)[-1].endswith("(too few waves yet)")
    assert len(_learnt("mpu", 0.5, 0.5)) == 2
    assert tables.BELIEVED_ERROR == BELIEVED_ERROR


def test_status_goes_by_what_the_controller_believes() -> None:
    """Errors of 25 % that are noise; errors of 10 % of too few waves."""
    assert _learnt("adaptive", 0.25, 0.25, believed=True)[-1] == "adaptive plans with these times"
    assert _learnt("adaptive", 0.25, 0.25, believed=False)[-1].endswith(
        "(stage 0, stage 1: off by more than 15%, not known to be noise)"
    )
    assert _learnt("adaptive", 0.1, 0.1, believed=False)[-1].endswith("(too few waves yet)")


@pytest.mark.parametrize(("link", "said"), [("", ""), ("gloo", ", link gloo")])
def test_status_names_the_link_only_when_there_is_one(link: str, said: str) -> None:
    pipeline = _pipeline("forming", formation=3, model="m", link=link)
    assert tables.title(pipeline) == f"p: forming, formation 3, m{said}, 0 queued, 0 running"


def test_status_names_policy_and_mode() -> None:
    pipeline = _pipeline("serving", policy="mpu", mode="drain")
    assert tables.title(pipeline).endswith(", policy mpu, mode drain, 0 queued, 0 running")


@pytest.mark.parametrize(
    ("state", "waiting_for", "said"),
    [
        ("hinted", "its turn", "waiting for its turn"),
        ("hinted", "", "waiting for its turn"),
        ("waiting", "capacity on stage 2", "waiting for capacity on stage 2"),
        ("queued", "hashes", "queued, waiting for hashes"),
        ("running", "", "running"),
    ],
)
def test_status_says_what_a_request_waits_for(state: str, waiting_for: str, said: str) -> None:
    assert tables.request_state(admin_pb2.RequestStatus(state=state, waiting_for=waiting_for)) == said


def test_error_says_what_was_awaited_when_the_deadline_passed_before_a_turn() -> None:
    error = DeadlineExpired("request r was hinted when its 5 ms were over", state="hinted")
    assert explain(error) == (
        "error: DEADLINE_EXPIRED: request r was waiting for its turn when its 5 ms were over (state=hinted)"
    )


@pytest.mark.parametrize("command", [["status"], ["prefill", "--tokens", "1"]], ids=["status", "prefill"])
def test_command_goes_through_the_proxy_that_it_is_given(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at the proxy: a command that went straight would find the controller."""
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with FakeController.sync() as controller:
        arguments = [*command, "--controller", controller.address]
        straight = CliRunner().invoke(build_app(), arguments)
        away = {"WAVEPP_PROXY": f"http://127.0.0.1:{free_port()}"}
        refused = CliRunner().invoke(build_app(), arguments, env=away)
    assert "CONTROLLER_UNAVAILABLE" not in straight.stderr
    assert refused.exit_code == 1
    assert "CONTROLLER_UNAVAILABLE" in refused.stderr


def test_prefill_says_at_once_that_there_is_no_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of a client wait for one that was killed to be replaced; a command that finds none sends none."""
    monkeypatch.setattr(AsyncClient, "prefill_many", lambda *_, **__: pytest.fail("it sent requests"))
    address = f"127.0.0.1:{free_port()}"
    refused = CliRunner().invoke(build_app(), ["prefill", "--tokens", "1", "--controller", address])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.startswith("error: CONTROLLER_UNAVAILABLE: ")
    assert "wavepp up" in refused.stderr


def test_equal_errors_are_one_line_with_their_count(capsys: pytest.CaptureFixture[str]) -> None:
    """A file of 342 prompts for a pipeline that is not there printed the same line 342 times."""
    from wavepp import PrefillOutcome
    from wavepp.commands.prefill import _as_dict, _print
    from wavepp.errors import InvalidRequest

    down, other = InvalidRequest("no such thing", field="a", value="12"), InvalidRequest("else", field="pipeline")
    outcomes = [PrefillOutcome(index, None, other if index == 3 else down) for index in range(342)]
    _print(outcomes, as_json=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("prompts 0, 1, 2, 4, 5 and 336 more: ")
    assert lines[1].startswith("prompt 3: ")
    assert _as_dict(outcomes[0])["error"]["fields"] == {"field": "a", "value": 12}


def test_integers_of_every_width_are_numbers_in_the_json_of_status() -> None:
    from wavepp.commands.status import as_dict
    from wavepp_proto.v1 import admin_pb2

    reply = admin_pb2.StatusResponse(cluster="7", epoch=2**40, pid=5)
    reply.pipelines.add(pipeline="8", formation=9).daemons.add(pool_blocks=128)
    data = as_dict(reply)
    assert (data["cluster"], data["epoch"], data["pid"]) == ("7", 2**40, 5)
    assert (data["pipelines"][0]["pipeline"], data["pipelines"][0]["formation"]) == ("8", 9)
    assert data["pipelines"][0]["daemons"][0]["pool_blocks"] == 128
