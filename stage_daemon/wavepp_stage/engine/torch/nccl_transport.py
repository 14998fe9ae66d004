"""Moves between neighbours by NCCL, on CUDA memory: one communicator per edge and formation.

Owns what makes NCCL bearable for a daemon that outlives its links: both ends of every edge meet at connect
time, by a deadline; a move polls for its end, so that it has a deadline too and costs no sleep of a
millisecond; and torch's watchdog never ends the process. Called by `link_transport.py`. Written to the
documented rules and tested against a stand-in: no test here has a GPU; `scripts/gpu-check` runs it on two.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store  # where torch keeps its type

from wavepp_proto.errors import LinkFault
from wavepp_stage.engine.base import LinkPlan
from wavepp_stage.engine.torch.device import first_line

WATCHDOG: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""torch's defaults end the PROCESS when a move is late, or when its own watchdog is. A late move ends a link here."""
WATCHDOG_GRACE: Final = timedelta(minutes=1)
"""Our deadline comes first, and names the stage."""
POLL_S: Final = 50e-6

_CUDA: Any = torch.cuda


class NcclTransport:
    """See link_transport.Transport. The caller's current stream orders its tensors; tags are not needed: NCCL keeps
    the order of moves on an edge."""

    def __init__(self, store: Store, plan: LinkPlan, device: torch.device, connect_timeout: timedelta) -> None:
        """Raises LinkFault where NCCL is not to be had or an edge cannot be made by the deadline."""
        group: Any = getattr(dist, "ProcessGroupNCCL", None)
        if group is None or device.type != "cuda":
            raise LinkFault("link nccl needs a CUDA build of torch and a CUDA device", field="link", value="nccl")
        os.environ.update(WATCHDOG)
        self.device = device
        connect_s = connect_timeout.total_seconds()
        options = group.Options()
        options._timeout = timedelta(seconds=plan.fill_timeout_s) + WATCHDOG_GRACE
        self._group: Any = group(store, plan.stage, plan.stages, options)
        self._meet(plan, connect_s)

    def _meet(self, plan: LinkPlan, connect_s: float) -> None:
        """NCCL makes an edge's communicator at its first move, waits there for the other end without a deadline, and
        only then finds out that two stages share a GPU: so that happens here, on a thread that can be given up."""
        failed: list[Exception] = []

        def exchange() -> None:
            try:
                with _CUDA.device(self.device):
                    token = torch.zeros(1, device=self.device)
                    for move, peer in edges(plan.stage, plan.stages, self.send, self.recv):
                        move(token, peer, 0, connect_s)
            except Exception as error:  # whatever it is, the caller tells it
                failed.append(error)

        thread = threading.Thread(target=exchange, name=f"link-meet-{plan.stage}", daemon=True)
        thread.start()
        thread.join(connect_s)
        if thread.is_alive() or failed:
            self.close()
            reason = first_line(failed[0]) if failed else f"not there within {connect_s:.1f} s"
            raise LinkFault(
                f"stage {plan.stage} cannot meet its neighbours by nccl (which needs a GPU for each stage): {reason}",
                field="link", value="nccl", limit="gloo",
            )  # fmt: skip

    def send(self, tensor: Tensor, peer: int, tag: int, timeout_s: float) -> None:
        self._finish(self._in_use().send([tensor], peer, tag), peer, timeout_s)

    def recv(self, tensor: Tensor, peer: int, tag: int, timeout_s: float) -> None:
        self._finish(self._in_use().recv([tensor], peer, tag), peer, timeout_s)

    def _in_use(self) -> Any:
        group = self._group
        if group is None:
            raise RuntimeError("the link is closed")
        return group

    def _finish(self, work: Any, peer: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not work.is_completed():
            self._in_use()
            if time.monotonic() > deadline:
                raise RuntimeError(f"stage {peer} did not answer within {timeout_s:g} s")
            time.sleep(POLL_S)
        work.wait()  # raises what it ended in

    def close(self) -> None:
        """Ends pending moves on the GPU too. On a thread: an abort may itself wait for NCCL."""
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=group.abort, name="link-abort", daemon=True).start()


Move = Callable[[Tensor, int, int, float], None]


def edges(stage: int, stages: int, send: Move, recv: Move) -> list[tuple[Move, int]]:
    """(move, neighbour) of `stage`, in an order in which every second edge meets at once and no stage waits in a
    circle: even stages send first, odd ones receive first."""
    ahead = [(send, stage + 1)] if stage < stages - 1 else []
    behind = [(recv, stage - 1)] if stage > 0 else []
    return ahead + behind if stage % 2 == 0 else behind + ahead
