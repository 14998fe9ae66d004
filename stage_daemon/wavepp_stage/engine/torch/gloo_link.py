"""The torch.distributed activation link: one formation's edges to the neighbouring stages.

Owns two threads (one receives from the previous stage, one sends to the next), the order of waves
on each edge, and the check of every header before a payload is accepted. The executor opens, feeds
and closes it; `link_transport.py` moves the tensors, by gloo through host memory or NCCL on CUDA. A payload
that is handed over is complete; each thread has a stream of its own, so none waits for a running wave.

     executor: expect(w) ──▶ receiver: header w, checked ──▶ buffer, payload w ──▶ on_activation
     executor: send(w)   ──▶ sender: header w, payload w; buffers are dropped when both are taken

A closed link waits for nobody: a thread still blocked in a move is abandoned (gloo cannot be
interrupted), ends when its peer closes the link too, at its time-out at the latest, and is counted by
`abandoned_threads`. A header may be long under way: its wave waits for those before it. A payload follows at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from wavepp_proto.errors import LinkFault
from wavepp_proto.terms import WaveOrdinal
from wavepp_stage.engine.base import HEADER_BYTES, LinkListener, LinkPlan, WaveHeader
from wavepp_stage.engine.torch.device import first_line
from wavepp_stage.engine.torch.link_transport import Transport, connect, open_store
from wavepp_stage.engine.torch.side_stream import SideStream

__all__ = ["MAX_ABANDONED", "TorchLink", "abandoned_threads", "open_store"]

MAX_ABANDONED = 64
"""Abandoned threads of this process above which no new link opens."""
HEADER_TAG, PAYLOAD_TAG = 0, 1
"""The same for every wave: a receive that waited for one wave's own tag would not see that another one came."""
_closed_threads: list[threading.Thread] = []
_closed_lock = threading.Lock()

T = TypeVar("T")


class BufferSource(Protocol):
    """The part of a StageEngine that a link needs."""

    def receive_buffer(self, tokens: int) -> Tensor: ...


def abandoned_threads() -> int:
    """Threads of closed links that have not ended yet (blocked in a move, or about to end)."""
    with _closed_lock:
        _closed_threads[:] = [thread for thread in _closed_threads if thread.is_alive()]
        return len(_closed_threads)


class TorchLink:
    """ActivationLink over torch.distributed, for one formation."""

    def __init__(self, plan: LinkPlan, engine: BufferSource, listener: LinkListener) -> None:
        self._plan = plan
        self._engine = engine
        self._listener = listener
        self._transport: Transport | None = None
        self._expected: SimpleQueue[tuple[WaveOrdinal, int] | None] = SimpleQueue()
        self._outbox: SimpleQueue[tuple[WaveHeader, Tensor] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._ended = False
        """Closed, or lost: from then on the listener hears nothing more."""

    def open(self) -> None:
        if (count := abandoned_threads()) > MAX_ABANDONED:
            raise LinkFault("too many threads wait for lost peers", field="abandoned", value=count, limit=MAX_ABANDONED)
        device = self._engine.receive_buffer(0).device
        transport = connect(self._plan, device)
        with self._lock:
            if self._ended:
                transport.close()
                raise LinkFault("the link was closed while it opened", field="link", stage=self._plan.stage)
            self._transport = transport
            if self._plan.stage > 0:
                self._start("receive", self._expected, partial(self._receive, SideStream(device)))
            if self._plan.stage < self._plan.stages - 1:
                self._start("send", self._outbox, partial(self._send, SideStream(device)))

    def expect(self, ordinal: WaveOrdinal, tokens: int) -> None:
        self._expected.put((ordinal, tokens))

    def send(self, header: WaveHeader, payload: Tensor) -> None:
        self._outbox.put((replace(header, payload_bytes=payload.nbytes), payload))

    def close(self) -> None:
        with self._lock:
            self._ended = True
            threads, self._threads = self._threads, []
            transport, self._transport = self._transport, None
        with _closed_lock:
            _closed_threads.extend(threads)
        self._expected.put(None)
        self._outbox.put(None)
        if transport is not None:
            transport.close()

    # --- the link's own threads ------------------------------------------------------------------

    def _start(self, name: str, queue: SimpleQueue[T | None], job: Callable[[T], None]) -> None:
        label = f"link-{name}-{self._plan.stage}"
        thread = threading.Thread(target=self._serve, args=(queue, job, name), name=label, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, queue: SimpleQueue[T | None], job: Callable[[T], None], name: str) -> None:
        """One job after the other; any failure is the end of the formation."""
        while (item := queue.get()) is not None and not self._ended:
            try:
                job(item)
            except LinkFault as error:
                self._lose(error)
                return
            except Exception as error:  # whatever it is, this edge can carry no further wave
                self._lose(f"stage {self._plan.stage} cannot {name}: {first_line(error)}")
                return

    def _lose(self, reason: str | LinkFault) -> None:
        with self._lock:
            first, self._ended = not self._ended, True
        if first:
            self._listener.on_link_lost(reason)

    def _receive(self, side: SideStream, expected: tuple[WaveOrdinal, int]) -> None:
        ordinal, tokens = expected
        transport, previous = self._in_use(), self._plan.stage - 1
        with side.on():
            raw = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=transport.device)
            transport.recv(raw, previous, HEADER_TAG, self._plan.fill_timeout_s)
            header = WaveHeader.unpack(raw.cpu().numpy().tobytes())
            payload = self._engine.receive_buffer(tokens)
            # Before the payload: gloo aborts the PROCESS when more bytes arrive than a buffer holds.
            self._check(header, ordinal, payload)
            landing = payload if payload.device == transport.device else side.landing(payload)
            transport.recv(landing, previous, PAYLOAD_TAG, self._plan.wave_timeout_s)
        if landing is not payload:
            side.move(landing, payload)
        if not self._ended:
            self._listener.on_activation(header, payload)

    def _send(self, side: SideStream, item: tuple[WaveHeader, Tensor]) -> None:
        header, payload = item
        transport, following = self._in_use(), self._plan.stage + 1
        with side.on():
            raw = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
            transport.send(raw.to(transport.device), following, HEADER_TAG, self._plan.fill_timeout_s)
            moved = payload if payload.device == transport.device else side.to_host(payload)
            transport.send(moved.contiguous(), following, PAYLOAD_TAG, self._plan.wave_timeout_s)

    def _in_use(self) -> Transport:
        transport = self._transport
        if transport is None:
            raise LinkFault("the link is closed", field="link", stage=self._plan.stage)
        return transport

    def _check(self, header: WaveHeader, ordinal: WaveOrdinal, buffer: Tensor) -> None:
        tokens, hidden = buffer.shape
        header.check(
            self._plan.stage, formation=self._plan.formation, ordinal=ordinal, tokens=tokens, hidden=hidden,
            payload_bytes=buffer.nbytes,
        )  # fmt: skip
