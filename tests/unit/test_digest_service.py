"""A reader of the digest that does not read: nothing waits for it, and nothing piles up."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from tests.harness.stage_core import StageDriver, join_plan
from wavepp_proto import convert
from wavepp_proto.terms import DigestKind
from wavepp_stage.runtime.admission_service import DigestService
from wavepp_stage.runtime.core_shell import CoreShell

PLAN = join_plan(pool_blocks=64)


async def test_stalled_reader_gets_the_net_change_and_work_goes_on_meanwhile() -> None:
    """Field bug 48: digests are made when they are asked for, so a subscriber cannot hold the stage up."""
    driver = StageDriver.joined(PLAN)
    service = DigestService(CoreShell(driver.machine, lambda: service.notify()))
    watch = service.Watch(convert.watch_digest_to_pb(PLAN.fence, 0), cast(Any, None))
    first = convert.digest_from_pb(await anext(watch))
    assert first.kind is DigestKind.SNAPSHOT
    for number in range(400):  # far more than the pool: each evicts what came before
        driver.prefill(f"r{number}", [number] * 17)
        service.notify()
    (group,) = convert.digest_from_pb(await anext(watch)).groups
    assert len(group.added) + len(group.removed) <= 8 * PLAN.pool_blocks, "the net change, however long it took"
    assert group.count == driver.machine.inventory().cached_blocks
    more = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    assert not more.done(), "that was all of it"
    more.cancel()
    await asyncio.gather(more, return_exceptions=True)
