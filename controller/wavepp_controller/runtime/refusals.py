"""Tells a registered daemon why no pipeline can use it, so that its own log and metrics say so.

Owns what each daemon was told last and the calls that tell it: a few tries each, within seconds; a daemon that cannot
be reached is shown by the controller's status alone. Judges nobody (`core/members.py` does). Called by `controller`
whenever membership or leadership has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import grpc
import grpc.aio

from wavepp_controller.core.status import RefusedMember
from wavepp_proto import convert, limits
from wavepp_proto.errors import WaveppError
from wavepp_proto.runtime.backoff import Backoff
from wavepp_proto.runtime.channels import ClientSecurity, open_channel
from wavepp_proto.runtime.closers import end_tasks
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.terms import DaemonKey, Epoch, ErrorInfo, Fence, Formation, Incarnation, MemberRecord
from wavepp_proto.v1 import control_pb2_grpc

log = get_log(__name__)

TRIES: Final = 6
MOST_CALLS: Final = 16
"""At the same time: records come from peers, and so does their number."""
PASSING: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
Identity = tuple[DaemonKey, Incarnation]


class Refusals:
    """One per controller, on its event loop."""

    def __init__(self, security: ClientSecurity) -> None:
        self._security = security
        self._told: dict[Identity, ErrorInfo] = {}
        self._calls: dict[DaemonKey, asyncio.Task[None]] = {}
        self._gate = asyncio.Semaphore(MOST_CALLS)

    def tell(self, epoch: Epoch | None, refused: Iterable[RefusedMember], members: Iterable[MemberRecord]) -> None:
        """Whatever is news to a daemon: its refusal, or that one is over. `epoch` is None where another leads."""
        if epoch is None:
            self.forget()
            return
        wanted = {(one.key, one.incarnation): one for one in refused}
        over = {identity for identity in self._told if identity not in wanted}
        for identity, one in wanted.items():
            if self._told.get(identity) != one.error:
                self._told[identity] = one.error
                self._start(identity, one.address, epoch, one.error)
        for record in members:
            if (record.key, record.incarnation) in over:
                self._start((record.key, record.incarnation), record.address, epoch, None)
        for identity in over:
            del self._told[identity]

    def forget(self) -> None:
        """Nothing more is told; whoever leads next begins anew."""
        self._told.clear()
        for task in self._calls.values():
            task.cancel()

    async def close(self) -> None:
        """Idempotent."""
        self.forget()
        await end_tasks(*self._calls.values())

    def _start(self, identity: Identity, address: str, epoch: Epoch, error: ErrorInfo | None) -> None:
        key, incarnation = identity
        if (before := self._calls.get(key)) is not None:
            before.cancel()
        fence = Fence(epoch, Formation(0), incarnation)
        task = asyncio.create_task(self._call(key, address, fence, error), name=f"refuse-{key}")
        self._calls[key] = task
        task.add_done_callback(lambda done: self._calls.pop(key) if self._calls.get(key) is done else None)

    async def _call(self, key: DaemonKey, address: str, fence: Fence, error: ErrorInfo | None) -> None:
        backoff, request = Backoff(), convert.refuse_to_pb(fence, error)
        async with self._gate:
            for left in reversed(range(TRIES)):
                try:
                    async with open_channel(address, self._security) as channel:
                        stub = control_pb2_grpc.StageControlStub(channel)
                        await stub.Refuse(request, timeout=limits.CONNECT_TIMEOUT_MS / 1000)
                    return
                except grpc.aio.AioRpcError as failure:
                    code = failure.code()
                    if code not in PASSING or not left:
                        log.info("refusal not told", stage=key.stage, rank=key.rank, address=address, code=code.name)
                        return
                except WaveppError as failure:  # no address
                    log.info("refusal not told", stage=key.stage, rank=key.rank, address=address, error=failure.message)
                    return
                await asyncio.sleep(backoff.next_s())
