"""The command line is a contract: every option has its WAVEPP_* twin, a help text, and exit codes hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.testing import CliRunner

from tests.harness.command import json_lines, wavepp
from wavepp import local_plan
from wavepp.commands.gathered import build_app
from wavepp.commands.up import RESTART_WINDOW_S, RESTARTS_PER_STAGE, Restarts
from wavepp.local_plan import PRESET_FORM
from wavepp_controller.core.config import POLICIES
from wavepp_controller.core.modes import MODES
from wavepp_proto import __version__
from wavepp_proto.runtime.command_line import run_app

COMMANDS = {"up", "prefill", "status", "doctor", "controller", "stage"}
COMMON = {"up": {"--json"}, "prefill": {"--json"}, "status": {"--json"}, "doctor": {"--json"}}


def _commands() -> dict[str, TyperCommand]:
    app = typer.main.get_command(build_app())
    assert isinstance(app, TyperGroup)
    return {name: command for name, command in app.commands.items() if isinstance(command, TyperCommand)}


def _options() -> Iterator[tuple[str, TyperOption]]:
    for name, command in _commands().items():
        for parameter in command.params:
            if isinstance(parameter, TyperOption) and parameter.name != "help":
                yield f"{name} {max(parameter.opts, key=len)}", parameter


def _grouped_options() -> Iterator[tuple[str, TyperOption]]:
    """Of the commands within groups: `simulate plan` and its like."""
    app = typer.main.get_command(build_app())
    assert isinstance(app, TyperGroup)
    for group in app.commands.values():
        for name, command in group.commands.items() if isinstance(group, TyperGroup) else ():
            for parameter in command.params:
                if isinstance(parameter, TyperOption) and parameter.name != "help":
                    yield f"{name} {parameter.opts[0]}", parameter


def test_every_command_is_there_and_says_what_it_does() -> None:
    commands = _commands()
    assert commands.keys() >= COMMANDS
    assert [name for name, command in commands.items() if not command.help] == []


def test_every_option_has_its_twin_and_a_help_text() -> None:
    """--pool-blocks and WAVEPP_POOL_BLOCKS say the same: what one sets, the other does."""
    options = dict(_options())
    assert len(options) > 50
    twins = {name: "WAVEPP_" + name.partition(" --")[2].replace("-", "_").upper() for name in options}
    assert {name: option.envvar for name, option in options.items()} == twins
    assert [name for name, option in options.items() if not option.help] == []


def test_a_variable_is_a_switch_everywhere_or_nowhere() -> None:
    """What is a number of one command would be nonsense where another reads yes or no."""
    kinds: dict[object, set[bool]] = {}
    for _, option in [*_options(), *_grouped_options()]:
        kinds.setdefault(option.envvar, set()).add(option.is_flag)
    assert [name for name, switches in kinds.items() if len(switches) > 1] == []


def test_the_names_of_policies_and_modes_are_the_controllers() -> None:
    assert sorted(local_plan.POLICIES) == sorted(POLICIES)
    assert local_plan.MODES == MODES


@pytest.mark.parametrize("name", sorted(COMMON))
def test_a_program_may_read_the_output(name: str) -> None:
    options = {text for parameter in _commands()[name].params for text in parameter.opts}
    assert options >= COMMON[name]


def test_the_version_is_the_package_s(tmp_path: Path) -> None:
    finished = wavepp(tmp_path, "--version")
    assert (finished.returncode, finished.stdout) == (0, f"wavepp {__version__}\n")


def test_doctor_says_for_programs_what_can_run_and_why_not(tmp_path: Path) -> None:
    finished = wavepp(tmp_path, "doctor", "--json")
    assert finished.returncode == 0, finished.stderr
    (findings,) = json_lines(finished)
    assert all(set(finding) == {"what", "ok", "detail"} and finding["detail"] for finding in findings)
    found = {finding["what"]: finding["ok"] for finding in findings}
    assert all(found[what] for what in ("engine emulated", "grpcio", "etcd3"))
    assert {"engine torch", "engine trtllm", "etcd for `wavepp up`", "cache"} <= found.keys()


def test_doctor_removes_the_caches_and_nothing_else_when_asked_to(tmp_path: Path) -> None:
    cache, other = tmp_path / "xdg_cache_home" / "wavepp", tmp_path / "xdg_cache_home" / "other"
    for folder in (cache, other):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    assert wavepp(tmp_path, "doctor", "--clean").returncode == 0
    assert not cache.exists()
    assert (other / "file").exists()


@pytest.mark.parametrize(
    ("arguments", "environment", "status", "said"),
    [
        pytest.param(("prefill",), {}, 2, "no prompt", id="no prompt"),
        pytest.param(("prefill", "--tokens", "1,x"), {}, 2, "--tokens must be numbers", id="no tokens"),
        pytest.param(("prefill", "--tokens", "1,,2"), {}, 2, "commas between, got '1,,2'", id="a token left out"),
        pytest.param(("prefill", "--file", "/nowhere"), {}, 2, "cannot read /nowhere", id="no file"),
        pytest.param(("prefill", "--no-such"), {}, 2, "No such option", id="no option"),
        pytest.param(("stage", "--stage", "0"), {}, 2, "--stages", id="missing option"),
        pytest.param(
            ("controller", "--share-tokens", "x"), {}, 2, "(field=share_tokens, value=x)", id="text for a number"
        ),
        pytest.param(
            ("controller",), {"WAVEPP_INVENTORY_MS": "soon"}, 2, "(field=inventory_ms, value=soon)",
            id="text for a number in the environment",
        ),
        pytest.param(
            ("status",), {"WAVEPP_CONTROLLER": "127.0.0.1:1"}, 1, "CONTROLLER_UNAVAILABLE", id="no controller"
        ),
        pytest.param(("status", "--controller", "nonsense"), {}, 1, "INVALID_REQUEST", id="no address"),
        pytest.param(
            ("controller",), {"WAVEPP_LISTEN": "0.0.0.0:0"}, 1, "needs --advertise", id="wildcard without advertise"
        ),
        pytest.param(("up", "--model", "emulated", "--pool-blocks", "a,b"), {}, 1, "pool_blocks", id="no pools"),
        pytest.param(("up", "--model", "/nowhere"), {}, 1, "no model folder", id="no model"),
        pytest.param(
            ("controller", "--link", "foo"), {}, 1, "limit=none, gloo, nccl, grpc", id="no link of a controller"
        ),
        pytest.param(("controller", "--log-level", "loud"), {}, 1, "field=log_level", id="no level of a controller"),
        pytest.param(
            ("stage", "--stage", "0", "--stages", "1", "--model", "emulated", "--log-level", "loud"), {}, 1,
            "limit=debug, info, warning, error", id="no level of a stage",
        ),
        pytest.param(
            ("controller", "--tls-cert", "/nowhere/cert.pem"), {}, 1, "field=tls_key", id="half a key pair"
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_an_exit_status(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], status: int, said: str
) -> None:
    finished = wavepp(tmp_path, *arguments, environment=environment)
    assert finished.returncode == status, finished.stderr
    assert said in finished.stderr
    lines = [line for line in finished.stderr.splitlines() if not line.startswith("port 7411 is taken")]
    assert [line.partition(":")[0] for line in lines] == ["error"]
    assert finished.stdout == ""


NO_PRESETS = ("emulated:", "emulated:layers", "emulated:layers=2,", "emulated:=2")
UP = ("up", "--model", "emulated", "--engine", "emulated", "--stages", "2", "--listen", "127.0.0.1:0")


@pytest.fixture
def no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be started, and no channel opened."""

    def refused(*_: object) -> None:
        raise AssertionError("a process was started or a channel opened")

    monkeypatch.setattr("wavepp.local_cluster.EtcdServer.start", refused)
    monkeypatch.setattr("grpc.aio.insecure_channel", refused)
    monkeypatch.setattr("grpc.aio.secure_channel", refused)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--link", "foo"), "unknown link 'foo' (field=link, limit=none, gloo, nccl, grpc, value=foo)"),
        (("--log-level", "loud"), "(field=log_level, limit=debug, info, warning, error, value=loud)"),
        (("--stages", "65"), "(field=stages, limit=1..64, value=65)"),
        (("--stages", "0"), "(field=stages, limit=1..64, value=0)"),
        (("--pool-blocks", "0"), "(field=pool_blocks, limit=1..1073741824, value=0)"),
        (("--pool-blocks", "9,8,7"), "pool_blocks has 3 values for 2 stages"),
        (("--host-pool-blocks", "9,8,7"), "host_pool_blocks has 3 values for 2 stages"),
        (("--host-pool-blocks", "x"), "host_pool_blocks must be numbers with commas between, got 'x'"),
        (("--state-slots", "0"), "(field=state_slots, limit=1..1048576, value=0)"),
        (("--headroom-blocks", "-1"), "(field=headroom_blocks, limit=0..1023, value=-1)"),
        (
            ("--headroom-blocks", "9", "--pool-blocks", "9,20"),
            "--headroom-blocks 9 must be less than the smallest pool has (9 blocks) "
            "(field=headroom_blocks, limit=0..8, value=9)",
        ),
        (("--headroom-blocks", "10", "--pool-blocks", "20,9"), "(field=headroom_blocks, limit=0..8, value=10)"),
        (("--timeout-s", "0"), "--timeout-s must be over 0 seconds, got 0 (field=timeout_s, limit=>0, value=0.0)"),
        (("--timeout-s", "-1"), "--timeout-s must be over 0 seconds, got -1"),
        (("--timeout-s", "nan"), "--timeout-s must be over 0 seconds, got nan"),
        (("--threads", "0"), "--threads must be at least 1, got 0 (field=threads, limit=1, value=0)"),
        (("--threads", "-2"), "--threads must be at least 1, got -2"),
        (("--trace-sample", "1.5"), "--trace-sample is a share of requests from 0 to 1, got 1.5"),
        (("--trace-sample", "-0.1"), "(field=trace_sample, limit=0..1, value=-0.1)"),
        (("--trace-sample", "nan"), "--trace-sample is a share of requests from 0 to 1, got nan"),
        *((("--model", model), f"'{model}' is no emulated model: {PRESET_FORM}") for model in NO_PRESETS),
        (
            ("--model", "emulated", "--engine", "torch"),
            f"no model folder 'emulated'; without a model: {PRESET_FORM} (field=model, value=emulated)",
        ),
        (("--snapshot-tokens", "-1"), "(field=snapshot_tokens, limit=0..4194304, value=-1)"),
        (("--share-tokens", "9999999"), "(field=share_tokens, limit=0..4194304, value=9999999)"),
        (("--wave-tokens", "63"), "(field=wave_tokens, limit=64..16777216, value=63)"),
        (("--block-tokens", "0"), "(field=block_tokens, limit=1..1024, value=0)"),
        (("--policy", "best"), "unknown policy 'best' (field=policy, limit=adaptive, mpu, fixed, value=best)"),
        (("--mode", "best"), "unknown mode 'best' (field=mode, limit=overlapped, lockstep, drain, value=best)"),
        (("--fills", "-1"), "(field=fills, limit=0..64, value=-1)"),
        (
            ("--short-share", "0.95"),
            "short_share must be from 0 to 0.9, got 0.95 (field=short_share, limit=0.9, value=0.95)",
        ),
        (("--min-wave-tokens", "0"), "(field=min_wave_tokens, limit=1..16777216, value=0)"),
        (("--model", "emulated:profile=nothing"), "no profile 'nothing': neither a file nor one of glm_5_2_pp4"),
        (("--layers", "0:2"), "layers has 1 values for 2 stages"),
        (("--layers", "0:2,x:4"), "layers must be first:last, got 'x:4'"),
        (("--layers", "0:2,3:4"), "band 3:4 must begin at layer 2"),
        (("--layers", "1:2,2:4"), "band 1:2 must begin at layer 0"),
        (("--layers", "0:2,2:2"), "band 2:2 must begin at layer 2 and not be empty"),
        (("--trace-file", "/nope/x.json"), "cannot write into /nope: No such file or directory (field=trace_file"),
        (("--trace-file", "/tmp"), "/tmp is a folder (field=trace_file, value=/tmp)"),
        (("--log-dir", "/proc/nope"), "cannot make /proc/nope: No such file or directory (field=log_dir"),
        (("--log-dir", "/proc"), "cannot write into /proc"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_before_anything_starts(
    no_connections: None, arguments: tuple[str, ...], said: str
) -> None:
    finished = CliRunner().invoke(build_app(), [*UP, *arguments])
    assert (finished.exit_code, type(finished.exception)) == (1, SystemExit)
    assert finished.stderr.startswith("error: INVALID_REQUEST: ")
    assert said in finished.stderr
    assert finished.stdout == ""


_CONNECTING = {
    "prefill": ("prefill", "--tokens", "1", "--controller", "127.0.0.1:1"),
    "status": ("status", "--controller", "127.0.0.1:1"),
    "up": UP,
}


@pytest.mark.parametrize("by_environment", [False, True], ids=["option", "twin"])
@pytest.mark.parametrize("option", ["--tls-cert", "--tls-key", "--tls-server-name"])
@pytest.mark.parametrize("name", sorted(_CONNECTING))
def test_tls_without_a_ca_is_refused_before_anything_is_sent(
    no_connections: None, name: str, option: str, by_environment: bool
) -> None:
    twin = {"WAVEPP_" + option.removeprefix("--").replace("-", "_").upper(): "/nowhere"}
    arguments = [*_CONNECTING[name], *([] if by_environment else [option, "/nowhere"])]
    finished = CliRunner().invoke(build_app(), arguments, env=twin if by_environment else {})
    field = option.removeprefix("--").replace("-", "_")
    assert finished.exit_code == 1
    assert finished.stderr == (
        f"error: INVALID_REQUEST: {option} needs --tls-ca: without it the connection would be plain text "
        f"(field={field}, value=/nowhere)\n"
    )


@pytest.mark.parametrize("name", sorted(_CONNECTING))
def test_a_ca_that_cannot_be_read_is_named_before_anything_is_sent(no_connections: None, name: str) -> None:
    finished = CliRunner().invoke(build_app(), [*_CONNECTING[name], "--tls-ca", "/nowhere"])
    assert finished.exit_code == 1
    assert finished.stderr == (
        "error: INVALID_REQUEST: tls_ca: cannot read /nowhere: No such file or directory "
        "(field=tls_ca, value=/nowhere)\n"
    )


def test_a_cluster_with_a_ca_alone_is_refused_before_anything_starts(no_connections: None, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("a certificate")
    finished = CliRunner().invoke(build_app(), [*UP, "--tls-ca", str(tmp_path / "ca.pem")])
    assert finished.exit_code == 1
    assert finished.stderr == (
        "error: INVALID_REQUEST: --tls-ca needs --tls-cert and --tls-key: every process here is a server too "
        "(field=tls_cert)\n"
    )


def test_prompts_nested_too_deeply_are_one_line_of_error(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a prompt"}\n' + '{"text":' * 200_000 + "\n")
    finished = CliRunner().invoke(build_app(), ["prefill", "--file", str(file)])
    assert (finished.exit_code, finished.stderr) == (2, "error: line 2 is not a JSON object with text or token_ids\n")


def test_restarts_count_only_when_they_were_within_the_window() -> None:
    restarts = Restarts()
    assert [restarts.allow(float(at)) for at in range(RESTARTS_PER_STAGE)] == [True] * RESTARTS_PER_STAGE
    assert not restarts.allow(RESTART_WINDOW_S - 1)
    assert restarts.allow(RESTART_WINDOW_S)  # the first is forgotten now, the second is not
    assert not restarts.allow(RESTART_WINDOW_S)
    assert restarts.allow(RESTART_WINDOW_S + 1)


def test_json_errors_of_prompts_are_data(tmp_path: Path) -> None:
    finished = wavepp(
        tmp_path, "prefill", "--tokens", "1,2", "--json", "--controller", "127.0.0.1:1", "--deadline-s", "1"
    )
    assert finished.returncode == 1
    assert json.loads(finished.stdout)["error"]["reason"] == "CONTROLLER_UNAVAILABLE"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--listen", "7711"), "listen must be host:port, got '7711' (field=listen, value=7711)"),
        (("--dtype", "int8"), "unknown dtype 'int8' (field=dtype, limit=auto, float32, bfloat16, float16, value=int8)"),
    ],
)
def test_mistyped_option_is_refused_before_anything_starts(
    no_connections: None, arguments: tuple[str, ...], said: str
) -> None:
    """They were found by a process that had been started, after 11 seconds."""
    finished = CliRunner().invoke(build_app(), [*UP, *arguments])
    assert (finished.exit_code, type(finished.exception)) == (1, SystemExit)
    assert said in finished.stderr


def test_folder_without_a_configuration_is_no_model_before_anything_starts(
    no_connections: None, tmp_path: Path
) -> None:
    finished = CliRunner().invoke(build_app(), ["up", "--model", str(tmp_path)])
    assert finished.exit_code == 1
    assert "it has no config.json" in finished.stderr


def test_bare_command_shows_its_help_and_nothing_that_went_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_app(build_app(), [])
    assert ended.value.code == 2
    told = capfd.readouterr()
    assert "Usage:" in told.out + told.err
    assert "INVALID_REQUEST" not in told.out + told.err
