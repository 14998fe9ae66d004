"""The torch.distributed link: order, header checks, lost peers, and a close that waits for nobody.

All ranks live in this process, as daemons may; the peer that stops dead is a process of its own.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from tests.harness.eventually import eventually_sync
from wavepp_proto.errors import InvalidRequest, LinkFault
from wavepp_proto.terms import LinkKind, WaveOrdinal
from wavepp_stage.engine.base import LinkPlan, WaveHeader
from wavepp_stage.engine.torch import gloo_link
from wavepp_stage.engine.torch.gloo_link import TorchLink, abandoned_threads, open_store

HIDDEN = 8
CHUNKS = b"0123456789abcdef"
WAIT_S = 30.0
_formations = count(1)


@dataclass
class Listener:
    arrived: queue.Queue[tuple[WaveHeader, torch.Tensor]] = field(default_factory=queue.Queue)
    lost: queue.Queue[str | LinkFault] = field(default_factory=queue.Queue)

    def on_activation(self, header: WaveHeader, payload: Any) -> None:
        self.arrived.put((header, payload))

    def on_link_lost(self, reason: str | LinkFault) -> None:
        self.lost.put(reason)


class Buffers:
    """An engine as far as a link sees it."""

    def __init__(self, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> None:
        self.hidden, self.dtype = hidden, dtype

    def receive_buffer(self, tokens: int) -> torch.Tensor:
        return torch.empty(tokens, self.hidden, dtype=self.dtype)


@dataclass
class Rank:
    link: TorchLink
    listener: Listener


def plan_of(store: str, stage: int, stages: int, formation: int, **changes: Any) -> LinkPlan:
    values: dict[str, Any] = {"connect_timeout_s": WAIT_S, "wave_timeout_s": WAIT_S, "advertise_host": "127.0.0.1"}
    values |= {"fill_timeout_s": WAIT_S} | changes
    return LinkPlan(LinkKind.GLOO, 7, formation, stage, stages, store, "", 0, **values)


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    kept, address = open_store("127.0.0.1", "127.0.0.1")
    yield address
    del kept


@pytest.mark.parametrize("advertised", ["10.99.99.99", "nosuch.invalid"])
def test_store_listens_where_the_daemon_does_when_only_others_know_the_advertised_host(advertised: str) -> None:
    kept, address = open_store("127.0.0.1", advertised)
    host, _, port = address.rpartition(":")
    assert host == advertised
    reader = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=WAIT_S))
    kept.set("told", "here")
    assert reader.get("told") == b"here"


def test_store_refuses_a_host_that_is_not_of_this_machine() -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_store("10.99.99.99", "10.99.99.99")
    assert (caught.value.fields["field"], caught.value.fields["value"]) == ("listen", "10.99.99.99")


@pytest.fixture
def ring(store: str) -> Iterator[Any]:
    """Makes the open links of one formation; closes what a test left open."""
    made: list[TorchLink] = []

    def build(stages: int, engine: Buffers | None = None, **changes: Any) -> list[Rank]:
        formation = next(_formations)
        ranks = []
        for stage in range(stages):
            listener = Listener()
            plan = plan_of(store, stage, stages, formation, **changes)
            ranks.append(Rank(TorchLink(plan, engine or Buffers(), listener), listener))
        made.extend(rank.link for rank in ranks)
        with ThreadPoolExecutor(stages) as pool:
            list(pool.map(lambda rank: rank.link.open(), ranks))
        return ranks

    yield build
    for link in made:
        link.close()
    eventually_sync(lambda: abandoned_threads() == 0, about="threads of closed links end")


def header_of(rank: Rank, ordinal: int, tokens: int) -> WaveHeader:
    formation = rank.link._plan.formation
    return WaveHeader(formation, ordinal, CHUNKS, tokens, HIDDEN, payload_bytes=0, void_bitmap=5)


def payload_of(ordinal: int, tokens: int) -> torch.Tensor:
    return torch.full((tokens, HIDDEN), float(ordinal)) + torch.arange(tokens)[:, None]


@pytest.mark.parametrize("stages", [2, 4])
def test_every_wave_arrives_in_order_when_all_stages_send(ring: Any, stages: int) -> None:
    ranks = ring(stages)
    sizes = [1, 300, 7, 64]
    for ordinal, tokens in enumerate(sizes):
        for rank in ranks[1:]:
            rank.link.expect(WaveOrdinal(ordinal), tokens)
        for rank in ranks[:-1]:
            rank.link.send(header_of(rank, ordinal, tokens), payload_of(ordinal, tokens))
    for rank in ranks[1:]:
        for ordinal, tokens in enumerate(sizes):
            header, payload = rank.listener.arrived.get(timeout=WAIT_S)
            assert (header.ordinal, header.tokens, header.void_bitmap, header.chunks) == (ordinal, tokens, 5, CHUNKS)
            assert torch.equal(payload, payload_of(ordinal, tokens))
    assert all(rank.listener.lost.empty() for rank in ranks)


def test_payload_keeps_bits_when_bfloat16(ring: Any) -> None:
    first, last = ring(2, Buffers(dtype=torch.bfloat16))
    payload = payload_of(3, 5).to(torch.bfloat16)
    last.link.expect(WaveOrdinal(0), 5)
    first.link.send(header_of(first, 0, 5), payload)
    header, arrived = last.listener.arrived.get(timeout=WAIT_S)
    assert header.payload_bytes == 5 * HIDDEN * 2
    assert torch.equal(arrived, payload)


def test_send_returns_at_once_when_nobody_expects_the_wave(ring: Any) -> None:
    first, last = ring(2)
    payloads = [payload_of(ordinal, 4000) for ordinal in range(8)]
    for ordinal, payload in enumerate(payloads):
        first.link.send(header_of(first, ordinal, 4000), payload)
    del payload
    payloads.clear()  # the link owns the buffers
    for ordinal in range(8):
        last.link.expect(WaveOrdinal(ordinal), 4000)
    for ordinal in range(8):
        assert torch.equal(last.listener.arrived.get(timeout=WAIT_S)[1], payload_of(ordinal, 4000))


@pytest.mark.parametrize("change", [{"formation": 999}, {"tokens": 4}, {"hidden": 16}, {"ordinal": 1}])
def test_link_is_lost_and_nothing_arrives_when_header_differs(ring: Any, change: Any) -> None:
    first, last = ring(2)
    header = replace(header_of(first, 0, 3), **change)
    last.link.expect(WaveOrdinal(0), 3)
    first.link.send(header, payload_of(0, 3))
    (name, value) = next(iter(change.items()))
    assert refused(last) == {
        "field": name, "value": str(value), "limit": str(getattr(header_of(first, 0, 3), name)), "stage": "1",
        "refused_stage": "0",
    }  # fmt: skip
    assert last.listener.arrived.empty()


@pytest.mark.parametrize(("sent", "got", "want"), [([0, 1, 1], 1, 2), ([0, 2], 2, 1), ([1], 1, 0)],
                         ids=["repeated", "one is missing", "the first is missing"])  # fmt: skip
def test_link_is_lost_at_once_when_a_wave_is_missing_or_comes_again(
    ring: Any, sent: list[int], got: int, want: int
) -> None:
    """Not when the expected wave is late: no receive waits for one wave alone."""
    first, last = ring(2)
    for ordinal in range(len(sent)):
        last.link.expect(WaveOrdinal(ordinal), 3)
    for ordinal in sent:
        first.link.send(header_of(first, ordinal, 3), payload_of(ordinal, 3))
    fields = refused(last)
    assert (fields["field"], fields["value"], fields["limit"]) == ("ordinal", str(got), str(want))
    assert last.listener.arrived.qsize() == len(sent) - 1


def refused(rank: Rank) -> dict[str, str]:
    fault = rank.listener.lost.get(timeout=WAIT_S)
    assert isinstance(fault, LinkFault)
    return fault.fields


def test_link_is_lost_when_payload_is_larger_than_the_wave(ring: Any) -> None:
    """gloo would end the whole process if the payload were received into a smaller buffer."""
    first, last = ring(2)
    last.link.expect(WaveOrdinal(0), 3)
    first.link.send(header_of(first, 0, 3), payload_of(0, 300))
    assert refused(last)["field"] == "payload_bytes"


def test_link_is_lost_on_both_edges_when_the_middle_stage_closes(ring: Any) -> None:
    first, middle, last = ring(3)
    last.link.expect(WaveOrdinal(0), 2)
    middle.link.close()
    assert "stage 2 cannot receive" in str(last.listener.lost.get(timeout=WAIT_S))
    first.link.send(header_of(first, 0, 2), payload_of(0, 2))
    assert "stage 0 cannot send" in str(first.listener.lost.get(timeout=WAIT_S))


class Recorded:
    """A transport that moves nothing: it notes (kind, deadline) of every move."""

    device = torch.device("cpu")

    def __init__(self, header: WaveHeader) -> None:
        self._header = header
        self.moves: list[tuple[str, float]] = []

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout_s: float) -> None:
        self.moves.append(("send", timeout_s))

    def recv(self, tensor: torch.Tensor, peer: int, tag: int, timeout_s: float) -> None:
        self.moves.append(("recv", timeout_s))
        if tensor.dtype == torch.uint8:
            tensor.copy_(torch.frombuffer(bytearray(self._header.pack()), dtype=torch.uint8))

    def close(self) -> None: ...


def test_wave_that_waits_for_those_before_it_has_no_wave_s_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four stages of 18 s: the last one's receive is posted when the wave is sent, 54 s before anything comes."""
    plan, listener = plan_of("", 1, 3, 1, wave_timeout_s=60.0, fill_timeout_s=3600.0), Listener()
    link = TorchLink(plan, Buffers(), listener)
    header = header_of(Rank(link, listener), 0, 2)
    recorded = Recorded(replace(header, payload_bytes=payload_of(0, 2).nbytes))
    monkeypatch.setattr(gloo_link, "connect", lambda plan, device: recorded)
    link.open()
    link.expect(WaveOrdinal(0), 2)
    listener.arrived.get(timeout=WAIT_S)
    link.send(header, payload_of(0, 2))
    eventually_sync(lambda: len(recorded.moves) == 4, about="header and payload have left")
    link.close()
    assert recorded.moves == [("recv", 3600.0), ("recv", 60.0), ("send", 3600.0), ("send", 60.0)]


def test_link_is_lost_when_a_header_never_comes(ring: Any) -> None:
    _, last = ring(2, fill_timeout_s=0.2)
    last.link.expect(WaveOrdinal(0), 2)
    assert "Timed out" in str(last.listener.lost.get(timeout=WAIT_S))


def test_close_abandons_the_thread_and_tells_nobody_when_blocked(ring: Any) -> None:
    first, last = ring(2, fill_timeout_s=2.0)
    before = abandoned_threads()
    last.link.expect(WaveOrdinal(0), 2)
    eventually_sync(lambda: last.link._expected.empty(), about="the receive is posted")
    last.link.close()
    assert abandoned_threads() > before
    eventually_sync(lambda: abandoned_threads() == 0, about="the abandoned thread ends at its time-out")
    assert last.listener.lost.empty()
    assert last.listener.arrived.empty()
    first.link.close()


def test_close_is_harmless_when_repeated_or_never_opened(ring: Any, store: str) -> None:
    first, _ = ring(2)
    first.link.close()
    first.link.close()
    TorchLink(plan_of(store, 0, 2, next(_formations)), Buffers(), Listener()).close()


def test_next_formation_opens_when_the_last_one_is_still_blocked(ring: Any) -> None:
    _, last = ring(2, fill_timeout_s=3.0)
    last.link.expect(WaveOrdinal(0), 2)
    eventually_sync(lambda: last.link._expected.empty(), about="the receive is posted")
    last.link.close()
    first, last = ring(2)
    last.link.expect(WaveOrdinal(0), 2)
    first.link.send(header_of(first, 0, 2), payload_of(0, 2))
    assert torch.equal(last.listener.arrived.get(timeout=WAIT_S)[1], payload_of(0, 2))


def test_open_raises_when_a_peer_never_comes(store: str) -> None:
    link = TorchLink(plan_of(store, 0, 2, next(_formations), connect_timeout_s=0.5), Buffers(), Listener())
    with pytest.raises(LinkFault, match="could not join formation"):
        link.open()


def test_open_raises_when_the_advertised_host_is_not_ours(store: str) -> None:
    plan = plan_of(store, 0, 1, next(_formations), advertise_host="192.0.2.1")
    with pytest.raises(LinkFault) as caught:
        TorchLink(plan, Buffers(), Listener()).open()
    assert caught.value.fields["advertise_host"] == "192.0.2.1"


def test_nccl_is_refused_by_name_when_the_device_is_a_cpu(store: str) -> None:
    plan = LinkPlan(LinkKind.NCCL, 7, next(_formations), 0, 2, store, "", 0, "127.0.0.1", 5.0, 5.0)
    with pytest.raises(LinkFault, match="CUDA") as caught:
        TorchLink(plan, Buffers(), Listener()).open()
    assert caught.value.fields["value"] == "nccl"


def test_store_listens_on_the_given_host_alone(store: str) -> None:
    port = int(store.rpartition(":")[2])
    listening = {
        one.laddr.ip
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    }
    assert listening == {"127.0.0.1"}
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=5)


PEER = """
import sys, torch
from tests.unit.test_torch_link import Buffers, Listener, plan_of
from wavepp_stage.engine.torch.gloo_link import TorchLink
TorchLink(plan_of(sys.argv[1], 0, 2, int(sys.argv[2])), Buffers(), Listener()).open()
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def peer(store: str) -> Iterator[tuple[subprocess.Popen[str], Rank]]:
    """Stage 0 in a process of its own, connected to stage 1 here."""
    formation = next(_formations)
    listener = Listener()
    link = TorchLink(plan_of(store, 1, 2, formation, wave_timeout_s=5.0), Buffers(), listener)
    opening = threading.Thread(target=link.open)
    opening.start()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    child = subprocess.Popen(
        [sys.executable, "-c", PEER, store, str(formation)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    opening.join(WAIT_S)
    yield child, Rank(link, listener)
    child.kill()
    child.communicate()
    link.close()
    eventually_sync(lambda: abandoned_threads() == 0)


def test_link_is_lost_when_the_peer_process_is_killed(peer: tuple[subprocess.Popen[str], Rank]) -> None:
    child, rank = peer
    rank.link.expect(WaveOrdinal(0), 2)
    child.kill()
    assert "stage 1 cannot receive" in str(rank.listener.lost.get(timeout=WAIT_S))


def test_close_does_not_wait_when_the_peer_process_is_stopped(peer: tuple[subprocess.Popen[str], Rank]) -> None:
    """SIGSTOP: the connection stays up and silent. The fixture then waits for the abandoned thread to end."""
    child, rank = peer
    child.send_signal(signal.SIGSTOP)
    rank.link.expect(WaveOrdinal(0), 2)
    eventually_sync(lambda: rank.link._expected.empty(), about="the receive is posted")
    closing = threading.Thread(target=rank.link.close)
    closing.start()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert abandoned_threads() >= 1
