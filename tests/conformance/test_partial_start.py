"""Every step of a start fails in turn: its own error is what is seen, and nothing that had begun is left."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import socket
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import wavepp
from tests.harness.etcd import is_running
from tests.harness.eventually import eventually
from tests.harness.ports import free_port
from wavepp import local_cluster
from wavepp.local_cluster import LocalCluster, LocalPlan
from wavepp_controller.runtime import controller
from wavepp_controller.runtime.controller import Controller
from wavepp_controller.runtime.settings import ControllerSettings
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.limits import MAX_NAME_CHARS, MAX_PATH_CHARS
from wavepp_proto.runtime import etcd_server, trace_sink
from wavepp_proto.runtime.closers import Closers
from wavepp_proto.runtime.etcd_binary import EtcdBinary
from wavepp_proto.runtime.etcd_server import EtcdServer
from wavepp_proto.runtime.memory_store import MemoryStore
from wavepp_proto.runtime.trace_sink import TraceSink
from wavepp_stage.runtime import daemon
from wavepp_stage.runtime.daemon import StageDaemon
from wavepp_stage.runtime.settings import StageSettings

MODEL = "emulated:layers=4,vocabulary=100,window=1024"


class PlantedError(Exception):
    """What the step under test fails with."""


def steps(owner: type, module: ModuleType, method: str = "start") -> list[str]:
    """What `owner.method` calls: names of `module`, its own methods as `.method`, and those of its parts as
    `part.method`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(owner, method))))
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {func.id for func in called if isinstance(func, ast.Name) and hasattr(module, func.id)}
    methods = set()
    for func in called:
        match func:
            case ast.Attribute(value=ast.Name(id="self"), attr=method):
                methods.add(f".{method}")
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=part), attr=method):
                methods.add(f"{part}.{method}")
    # gRPC never fails to start what it has bound, and frees the port of a server that was not started with the process.
    return sorted(name for name in names | methods if not name.startswith("_closers") and name != "_server.start")


def fail(*given: object, **_: object) -> Any:
    for value in given:
        if inspect.iscoroutine(value):
            value.close()
    raise PlantedError


def plant(monkeypatch: pytest.MonkeyPatch, module: ModuleType, owner: object, step: str) -> None:
    """Make `step` fail. A part's method is replaced as soon as the owner has the part."""
    part, dot, method = step.rpartition(".")
    if not part:
        monkeypatch.setattr(type(owner) if dot else module, method, fail)
        return

    def assign(self: object, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name == part:
            setattr(value, method, fail)

    monkeypatch.setattr(type(owner), "__setattr__", assign, raising=False)


def _begun(before: set[threading.Thread]) -> list[str]:
    """Threads since then, but for the pools of asyncio and gRPC."""
    names = [thread.name for thread in threading.enumerate() if thread not in before]
    return [name for name in names if "asyncio" not in name and "_poll_wrapper" not in name]


async def assert_fails_clean(owner: StageDaemon | Controller, port: int, store: MemoryStore) -> None:
    """Running it ends in the planted error, leaves no task, no thread of ours, no key and no listener on `port`."""
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    with pytest.raises(PlantedError):
        await owner.run(asyncio.Event())
    await eventually(lambda: asyncio.all_tasks() == tasks)
    await eventually(lambda: not _begun(threads))
    assert (await store.get_prefix("")).items == ()
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize("step", steps(StageDaemon, daemon))
async def test_stage_daemon_ends_what_it_began_when_a_step_of_its_start_fails(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    port, store = free_port(), MemoryStore()
    settings = StageSettings(
        0, 1, MODEL, "emulated", listen=f"127.0.0.1:{port}", metrics="127.0.0.1:0", reflection=True
    )
    stage = StageDaemon(settings, store)
    plant(monkeypatch, daemon, stage, step)
    await assert_fails_clean(stage, port, store)


@pytest.mark.parametrize("step", steps(Controller, controller))
async def test_controller_ends_what_it_began_when_a_step_of_its_start_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str
) -> None:
    port, store = free_port(), MemoryStore()
    settings = ControllerSettings(
        listen=f"127.0.0.1:{port}", metrics="127.0.0.1:0", reflection=True, model_file=tmp_path / "learnt.json"
    )
    one = Controller(settings, store)
    plant(monkeypatch, controller, one, step)
    await assert_fails_clean(one, port, store)


@pytest.mark.parametrize("step", ["find_etcd", "_free_ports", "child_argv", "EtcdStore"])
async def test_etcd_leaves_no_folder_and_no_process_when_a_step_of_its_start_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str
) -> None:
    pids: list[int] = []
    spawn = asyncio.create_subprocess_exec

    async def counted(*argv: str, **options: Any) -> asyncio.subprocess.Process:
        process = await spawn(*argv, **options)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", counted)
    monkeypatch.setattr(etcd_server, step, fail)
    with pytest.raises(PlantedError):
        await EtcdServer.start(base=tmp_path)
    assert (os.listdir(tmp_path), [pid for pid in pids if is_running(pid)]) == ([], [])


@pytest.mark.parametrize(
    "step", ["make_writable", ".start_controller", ".start_stage", "._leader", ".wait_serving", "EtcdServer"]
)
@pytest.mark.parametrize("closing", ["well", "badly"])
async def test_local_cluster_ends_every_process_when_a_step_of_its_start_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str, closing: str
) -> None:
    """`badly`: the end of one process fails too, which is logged and hides neither the first error nor the rest."""
    ended: list[str] = []

    class Etcd:
        options, endpoint, pid = None, "127.0.0.1:1", 1
        binary = EtcdBinary(tmp_path, "3.6.0", "setting")

        @classmethod
        async def start(cls) -> Etcd:
            return cls()

        async def close(self) -> None:
            ended.append("etcd")

    async def run(self: LocalCluster, name: str, *_: object) -> None:
        if not self.children:
            self._closers.push("processes", self._end_children)
        self.children[name] = Child()  # type: ignore[assignment]

    class Child:
        name, alive = "controller", True
        process = type("Process", (), {"pid": 2, "send_signal": lambda self, number: None})()

    async def reap(self: LocalCluster, child: object) -> None:
        ended.append("process")
        if closing == "badly":
            raise OSError("no such process")

    async def lead(*_: object) -> str:
        return "127.0.0.1:1"

    for name, stand_in in (("_spawn", run), ("_reap", reap), ("_leader", lead), ("_common", lambda self: [])):
        monkeypatch.setattr(LocalCluster, name, stand_in)
    monkeypatch.setattr(local_cluster, "EtcdServer", Etcd)
    local = LocalCluster(LocalPlan(MODEL, "emulated", stages=1), tmp_path)
    if step == "EtcdServer":
        monkeypatch.setattr(Etcd, "start", fail)
    else:
        plant(monkeypatch, local_cluster, local, step)
    with pytest.raises(PlantedError):
        await local.start()
    processes = {".start_stage": 1, "._leader": 2, ".wait_serving": 2}.get(step, 0)
    assert ended == ["process"] * processes + ["etcd"] * (step not in ("make_writable", "EtcdServer"))


def test_blocking_client_leaves_no_thread_when_its_settings_are_refused() -> None:
    before = set(threading.enumerate())
    for refused in ({"address": "no port"}, {"deadline": -1.0}, {"tls": wavepp.ClientSecurity(None, Path("cert"))}):
        with pytest.raises(InvalidRequest):
            wavepp.Client(**refused)
    assert _begun(before) == []


async def test_client_closes_its_tracer_when_its_channel_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    client = wavepp.AsyncClient("127.0.0.1:1")
    monkeypatch.setattr(client._tracer, "close", lambda: closed.append(True))
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(client)
        wire = client._wire
        assert wire is not None
        monkeypatch.setattr(wire._runs, "close", fail)
        with pytest.raises(PlantedError):
            await client.close()
    assert closed == [True]
    await wire._channel.close()


async def test_trace_sink_frees_its_port_when_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_sink, "bind_server", fail)
    with pytest.raises(PlantedError):
        await TraceSink.start()


async def test_closing_goes_on_after_a_step_that_fails_and_after_a_cancelled_call() -> None:
    ended, hold = [], asyncio.Event()
    closers = Closers()
    closers.push("first", lambda: ended.append("first"))
    closers.push("slow", hold.wait)
    closers.push("bad", fail)
    closing = asyncio.create_task(closers.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert (closing.cancelled(), ended) == (True, [])
    hold.set()
    await closers.close()
    await closers.close()
    assert ended == ["first"]


# --- what is refused before anything starts ------------------------------------------------------

LONG = "x" * (MAX_NAME_CHARS + 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in ("cluster", "pipeline") for value in ("llama 70b", "modèle", "a/b", "", "a\n", LONG)],
)
def test_names_are_refused_by_the_settings(field: str, value: str) -> None:
    makers: list[Callable[..., object]] = [
        lambda **name: StageSettings(0, 1, MODEL, "emulated", **name),
        lambda **name: LocalPlan(MODEL, "emulated", **name),
    ]
    makers += [ControllerSettings] if field == "cluster" else []
    for make in makers:
        with pytest.raises(InvalidRequest) as caught:
            make(**{field: value})
        assert caught.value.fields["field"] == field


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("listen", {"listen": "7411"}),
        ("listen", {"listen": "a b:1"}),
        ("listen", {"listen": f"{LONG}:1"}),
        ("advertise", {"advertise": "häst:1"}),
        ("advertise", {"advertise": LONG}),
        ("advertise", {"listen": "0.0.0.0:0"}),
        ("metrics", {"metrics": "9090"}),
    ],
)
async def test_addresses_are_refused_before_the_engine_is_loaded(
    monkeypatch: pytest.MonkeyPatch, field: str, settings: dict[str, str]
) -> None:
    monkeypatch.setattr(daemon, "equip", fail)
    for owner in (
        StageDaemon(StageSettings(0, 1, MODEL, "emulated", **settings), MemoryStore()),  # type: ignore[arg-type]
        Controller(ControllerSettings(**settings), MemoryStore()),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequest) as caught:
            await owner.run(asyncio.Event())
        assert caught.value.fields["field"] == field


async def test_long_path_of_a_model_is_served_and_a_longer_one_refused_by_name() -> None:
    """The folder's name travels in the record: what Linux allows must not end a start."""
    store, stop = MemoryStore(), asyncio.Event()
    preset = MODEL.replace("layers=4", f"layers={'0' * MAX_NAME_CHARS}4")
    assert MAX_NAME_CHARS < len(preset) <= MAX_PATH_CHARS
    stage = StageDaemon(StageSettings(0, 1, preset, "emulated"), store)
    running = asyncio.create_task(stage.run(stop))
    await eventually(lambda: running.done() or stage.address)
    await eventually(lambda: running.done() or stage._registrar.registered.is_set())
    stop.set()
    await running
    with pytest.raises(InvalidRequest) as caught:
        StageSettings(0, 1, "x" * (MAX_PATH_CHARS + 1))
    assert caught.value.fields["field"] == "model"
