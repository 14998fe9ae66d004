"""The stages of a `Cluster` as processes, for engines of which one process can hold only one.

Owns an etcd, where the test's controller and the processes meet, and the processes. Their logs lie in a
temporary folder until the end, and are shown beside a failure.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc.aio

from tests.harness.audit import is_quiet
from tests.harness.eventually import eventually
from tests.harness.variant import Chosen, environment
from wavepp.local_cluster import LocalCluster, LocalPlan
from wavepp_proto.runtime.channels import open_channel
from wavepp_proto.runtime.etcd_server import EtcdServer
from wavepp_proto.runtime.etcd_store import EtcdStore
from wavepp_proto.v1 import admin_pb2, admin_pb2_grpc
from wavepp_stage.runtime.settings import StageSettings

SHOWN_LINES = 60
"""The end of each stage's log, beside the failure of a test."""


class StageProcesses:
    """`async with StageProcesses(settings, chosen) as stages`, then `start`; `stages.store` is the membership."""

    def __init__(self, settings: Sequence[StageSettings], chosen: Chosen) -> None:
        self._settings = settings
        self._chosen = chosen
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="wavepp-test-")))
        self._stack.enter_context(environment(self._chosen))
        etcd = await EtcdServer.start()
        self._stack.push_async_callback(etcd.close)
        self.store = EtcdStore(etcd.options)
        self._stack.push_async_callback(self.store.close)
        self.local = LocalCluster(self._plan(etcd.endpoint), folder)
        self._stack.push_async_callback(self.local.close)
        return self

    def _plan(self, endpoint: str) -> LocalPlan:
        first = self._settings[0]
        bands = [one.layers for one in self._settings if one.layers is not None]
        return LocalPlan(
            model=first.model, engine=first.engine, stages=first.stages, device=first.device, threads=1,
            pool_blocks=[one.pool_blocks for one in self._settings],
            host_pool_blocks=[one.host_pool_blocks for one in self._settings],
            layers=[f"{start}:{end}" for start, end in bands],
            block_tokens=first.block_tokens, wave_tokens=first.wave_tokens, etcd=endpoint,
        )  # fmt: skip

    async def start(self) -> None:
        for one in self._settings:
            await self.local.start_stage(one.stage, one.listen, one.advertise)

    def alive(self) -> bool:
        """Raises AssertionError with its log when a stage has ended."""
        for child in self.local.children.values():
            assert child.alive, child.tail()
        return True

    async def nothing_held(self, controller: str) -> None:
        """Until the audit of the controller at this address finds nothing held."""
        async with open_channel(controller) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)

            async def quiet() -> bool:
                try:
                    audit = await admin.Audit(admin_pb2.AuditRequest(pipeline="default"), timeout=5)
                except grpc.aio.AioRpcError:
                    return False
                return is_quiet(audit, len(self._settings))

            await eventually(quiet, about="every hold to be released")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.local.children.values() if error is not None else ():
            print(f"--- {child.name}", *child.log.read_text(errors="replace").splitlines()[-SHOWN_LINES:], sep="\n")
        await self._stack.aclose()
