"""Items about the activation link: payloads of the device from one stage to the next, and lost peers."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.gpu.items import Host
from wavepp_proto.errors import LinkFault
from wavepp_proto.terms import Epoch, Formation, Incarnation, LinkKind, StageIndex, WaveOrdinal
from wavepp_stage.engine.base import LinkPlan, WaveHeader
from wavepp_stage.engine.torch.gloo_link import TorchLink, open_store

HIDDEN, WAIT_S = 512, 60.0


@dataclass
class End:
    """One stage as far as its link sees it."""

    device: torch.device
    arrived: queue.Queue[Any] = field(default_factory=queue.Queue)
    lost: queue.Queue[str] = field(default_factory=queue.Queue)

    def receive_buffer(self, tokens: int) -> torch.Tensor:
        return torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=self.device)

    def on_activation(self, header: WaveHeader, payload: torch.Tensor) -> None:
        self.arrived.put(payload)

    def on_link_lost(self, reason: str | LinkFault) -> None:
        self.lost.put(str(reason))


def _open(kind: LinkKind, store: str, formation: int, ends: list[End]) -> list[TorchLink]:
    links = [
        TorchLink(LinkPlan(kind, Epoch(1), Formation(formation), StageIndex(stage), len(ends), store, "",
                           Incarnation(0), "127.0.0.1", WAIT_S, WAIT_S), end, end)
        for stage, end in enumerate(ends)
    ]  # fmt: skip
    with ThreadPoolExecutor(len(links)) as pool:
        list(pool.map(lambda link: link.open(), links))
    return links


def _carry(kind: LinkKind, devices: list[torch.device]) -> str:
    """Waves of many sizes over all stages, twice: a new formation makes new communicators."""
    kept, store = open_store("127.0.0.1", "127.0.0.1")
    for formation in (1, 2):
        ends = [End(device) for device in devices]
        links = _open(kind, store, formation, ends)
        try:
            for ordinal, tokens in enumerate([1, 300, 7, 2048]):
                payload = torch.randn(tokens, HIDDEN).to(torch.bfloat16)
                for stage, link in enumerate(links):
                    if stage:
                        link.expect(WaveOrdinal(ordinal), tokens)
                    if stage < len(links) - 1:
                        sent = payload.to(devices[stage])
                        if sent.is_cuda:
                            torch.cuda.synchronize(sent.device)
                        link.send(WaveHeader(formation, ordinal, bytes(16), tokens, HIDDEN, 0, 0), sent)
                for end in ends[1:]:
                    found = end.arrived.get(timeout=WAIT_S)
                    assert found.device == end.device
                    assert torch.equal(found.cpu(), payload), f"wave {ordinal} changed on its way"
            assert all(end.lost.empty() for end in ends)
        finally:
            for link in links:
                link.close()
    del kept
    return f"{len(devices)} stages, two formations, bit for bit"


def through_host_memory(host: Host) -> str:
    """Several stages on one device: the link that is chosen there."""
    return "gloo: " + _carry(LinkKind.GLOO, [host.device] * 3)


def nccl(host: Host) -> str:
    return "nccl: " + _carry(LinkKind.NCCL, host.gpus(2)[:2])


def nccl_on_one_device(host: Host) -> str:
    """Forced by hand it is refused when the link opens, in time and by name, and the process lives on."""
    host.need_cuda()
    kept, store = open_store("127.0.0.1", "127.0.0.1")
    try:
        links = _open(LinkKind.NCCL, store, 3, [End(host.device), End(host.device)])
    except LinkFault as fault:
        return f"refused: {fault.message[:160]}"
    finally:
        del kept
    for link in links:
        link.close()
    raise AssertionError("two stages on one GPU were linked by nccl")
