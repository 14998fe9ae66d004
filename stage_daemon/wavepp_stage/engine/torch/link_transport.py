"""Process groups of torch.distributed, one per formation, without the global default group.

Owns how the stages of a formation meet (a store on stage 0, a key prefix per formation and rank) and the two
ways to move one tensor between neighbours with a deadline. Does not own order, headers or threads:
`gloo_link.py` does, and is the only caller. Several daemons may live in one process.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # where torch keeps their types

from wavepp_proto.errors import InvalidRequest, LinkFault
from wavepp_proto.terms import LinkKind
from wavepp_stage.engine.base import LinkPlan
from wavepp_stage.engine.torch.device import first_line
from wavepp_stage.engine.torch.nccl_transport import NcclTransport

STORE_TIMEOUT = timedelta(seconds=10)


class Transport(Protocol):
    """Blocking point-to-point moves of whole tensors; RuntimeError when a peer is gone or late."""

    device: torch.device
    """Where a tensor must be to be moved."""

    def send(self, tensor: Tensor, peer: int, tag: int, timeout_s: float) -> None: ...

    def recv(self, tensor: Tensor, peer: int, tag: int, timeout_s: float) -> None:
        """Fill `tensor`. Its size must be the sender's: see WaveHeader for how the receiver knows it."""

    def close(self) -> None:
        """Leave the group without waiting for anybody."""


def open_store(listen_host: str, advertise_host: str) -> tuple[TCPStore, str]:
    """A store that this daemon serves on a free port, and the "host:port" where peers reach it.

    It listens on the advertised host alone; where that is not an address of this machine (a name or address that
    only others know), where the daemon itself listens. TCPStore by itself would listen on every interface: it is
    handed a socket that is bound already. InvalidRequest if neither can be bound.
    """
    try:
        listener = _listen(advertise_host)
    except OSError:
        try:
            listener = _listen(listen_host or "0.0.0.0")
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen on {listen_host}: {error.strerror or error}", field="listen", value=listen_host
            ) from error
    bound, port = listener.getsockname()[:2]
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound)
    store = TCPStore(
        own, port, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT, master_listen_fd=listener.detach()
    )
    return store, f"[{advertise_host}]:{port}" if ":" in advertise_host else f"{advertise_host}:{port}"


def _listen(host: str) -> socket.socket:
    family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2], family=family, backlog=128)


def gpu_name(device: str, host: str) -> str:
    """What names `device` of `host` among the GPUs of all hosts; empty for the CPU."""
    chosen = torch.device(device)
    if chosen.type != "cuda":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(chosen), "uuid", None)
    return str(uuid) if uuid is not None else f"{host} cuda:{chosen.index or 0}"


def connect(plan: LinkPlan, device: torch.device) -> Transport:
    """Meet the other stages of the formation. Blocks up to `connect_timeout_s`; raises LinkFault."""
    deadline = time.monotonic() + plan.connect_timeout_s
    host, _, port = plan.store.rpartition(":")
    try:
        store = TCPStore(
            host.strip("[]"),
            int(port),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=plan.connect_timeout_s),
        )
        left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        store.set_timeout(left)
        prefixed = PrefixStore(f"{plan.epoch}.{plan.formation}.{plan.rank}", store)
        if plan.kind is LinkKind.NCCL:
            return NcclTransport(prefixed, plan, device, left)
        return GlooTransport(prefixed, plan, left)
    except (RuntimeError, ValueError) as error:
        raise LinkFault(
            f"stage {plan.stage} could not join formation {plan.formation}: {first_line(error)}",
            field="link",
            stage=plan.stage,
            store=plan.store,
            advertise_host=plan.advertise_host,
        ) from error


class GlooTransport:
    """gloo on the host's memory, bound to the address that others reach us by."""

    def __init__(self, store: Store, plan: LinkPlan, connect_timeout: timedelta) -> None:
        self.device = torch.device("cpu")
        group: Any = dist.ProcessGroupGloo
        options = group._Options()
        options._devices = [group.create_device(hostname=plan.advertise_host, lazy_init=False)]
        # The group's own time-out bounds connecting; every move names its own.
        options._timeout = connect_timeout
        options._threads = 1
        self._group: Any = group(store, plan.stage, plan.stages, options)

    def send(self, tensor: Tensor, peer: int, tag: int, timeout_s: float) -> None:
        self._group.send([tensor], peer, tag).wait(timedelta(seconds=timeout_s))

    def recv(self, tensor: Tensor, peer: int, tag: int, timeout_s: float) -> None:
        self._group.recv([tensor], peer, tag).wait(timedelta(seconds=timeout_s))

    def close(self) -> None:
        # gloo has no abort: whoever is blocked in a move keeps the group alive until the other end closes its own, or
        # its process ends, or the move's time-out.
        self._group = None
