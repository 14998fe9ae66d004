"""The NCCL link's rules, against a process group that only plays along: no test here has a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.eventually import eventually_sync
from tests.harness.fake_cuda import CUDA, FakeCuda
from wavepp_proto.errors import LinkFault
from wavepp_proto.terms import LinkKind
from wavepp_stage.engine.base import LinkPlan
from wavepp_stage.engine.torch import nccl_transport
from wavepp_stage.engine.torch.nccl_transport import WATCHDOG, NcclTransport, edges

TOKEN = torch.zeros(1)


@dataclass
class Group:
    """A ProcessGroupNCCL whose moves end as `finish` says: True, False (never), or an error from `wait`."""

    finish: Callable[[str, int], bool | str] = lambda kind, peer: True
    moves: list[tuple[str, int]] = field(default_factory=list)
    aborted: threading.Event = field(default_factory=threading.Event)
    timeout: timedelta | None = None

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._move("send", peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._move("recv", peer)

    def _move(self, kind: str, peer: int) -> Any:
        self.moves.append((kind, peer))
        end = self.finish(kind, peer)

        def wait() -> None:
            if isinstance(end, str):
                raise RuntimeError(end)

        return SimpleNamespace(is_completed=lambda: end is not False, wait=wait)

    def abort(self) -> None:
        self.aborted.set()


def plan_of(stage: int, stages: int = 3, wave_timeout_s: float = 30.0) -> LinkPlan:
    return LinkPlan(LinkKind.NCCL, 1, 2, stage, stages, "", "", 0, "127.0.0.1", 1.0, wave_timeout_s)


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in WATCHDOG:
        monkeypatch.setenv(name, "3")  # put back at the end

    def build(group: Group, plan: LinkPlan, within_s: float = 30.0) -> NcclTransport:
        def make(store: Any, rank: int, size: int, options: Any) -> Group:
            assert (rank, size) == (plan.stage, plan.stages)
            group.timeout = options._timeout
            assert {name: os.environ[name] for name in WATCHDOG} == WATCHDOG
            return group

        make.Options = SimpleNamespace  # type: ignore[attr-defined]
        monkeypatch.setattr(dist, "ProcessGroupNCCL", make, raising=False)
        monkeypatch.setattr(nccl_transport, "_CUDA", FakeCuda())
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: TOKEN)
        store: Any = None
        return NcclTransport(store, plan, CUDA, timedelta(seconds=within_s))

    return build


@pytest.mark.parametrize(("stage", "moves"), [(0, [("send", 1)]), (1, [("recv", 0), ("send", 2)]), (2, [("recv", 1)])])
def test_every_edge_meets_when_the_link_opens(connect: Any, stage: int, moves: list[tuple[str, int]]) -> None:
    group = Group()
    connect(group, plan_of(stage))
    assert group.moves == moves


@given(st.integers(2, 40))
def test_no_stage_waits_in_a_circle_when_edges_meet(stages: int) -> None:
    """Two rounds are enough, however long the pipeline: an edge meets when it is next on both its stages."""
    send: Any = "send"
    recv: Any = "recv"
    order: list[list[Any]] = [list(edges(stage, stages, send, recv)) for stage in range(stages)]
    rounds = 0
    while any(order):
        rounds += 1
        ready = [
            stage for stage in range(stages - 1)
            if order[stage][:1] == [("send", stage + 1)] and order[stage + 1][:1] == [("recv", stage)]
        ]  # fmt: skip
        assert ready
        for stage in ready:
            del order[stage][0], order[stage + 1][0]
    assert rounds <= 2


def test_connecting_is_refused_with_the_way_out_when_nccl_finds_a_shared_gpu(connect: Any) -> None:
    group = Group(finish=lambda kind, peer: "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000")
    with pytest.raises(LinkFault, match=r"a GPU for each stage.*Duplicate GPU detected") as caught:
        connect(group, plan_of(0))
    assert caught.value.fields["limit"] == "gloo"
    assert group.aborted.wait(30)


def test_connecting_ends_at_its_deadline_when_a_neighbour_never_comes(connect: Any) -> None:
    group = Group(finish=lambda kind, peer: False)
    with pytest.raises(LinkFault, match="cannot meet its neighbours"):
        connect(group, plan_of(1), within_s=0.05)
    assert group.aborted.wait(30)


def test_move_ends_by_its_own_deadline_before_the_watchdog_when_a_peer_hangs(connect: Any) -> None:
    group = Group()
    transport = connect(group, plan_of(1))
    assert group.timeout is not None
    assert group.timeout > timedelta(seconds=plan_of(1).fill_timeout_s)
    group.finish = lambda kind, peer: False
    with pytest.raises(RuntimeError, match=r"stage 0 did not answer within 0\.05 s"):
        transport.recv(TOKEN, 0, 0, 0.05)


def test_move_raises_what_it_ended_in_when_a_peer_is_lost(connect: Any) -> None:
    group = Group()
    transport = connect(group, plan_of(1))
    group.finish = lambda kind, peer: "NCCL communicator was aborted on rank 1"
    with pytest.raises(RuntimeError, match="aborted on rank 1"):
        transport.send(TOKEN, 2, 0, 30.0)


def test_blocked_move_ends_when_the_link_is_closed(connect: Any) -> None:
    group, ended = Group(), []
    transport = connect(group, plan_of(1))
    group.finish = lambda kind, peer: False

    def receive() -> None:
        try:
            transport.recv(TOKEN, 0, 0, 30.0)
        except RuntimeError as error:
            ended.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    eventually_sync(lambda: group.moves[-1] == ("recv", 0) and len(group.moves) == 3, about="the move is under way")
    transport.close()
    thread.join(30)
    assert (ended, group.aborted.wait(30)) == (["the link is closed"], True)
