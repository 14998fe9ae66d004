"""Registration and watching over the in-process store (wavepp_proto.runtime.registrar, membership)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from tests.harness.eventually import eventually
from tests.harness.members import make_record
from tests.harness.watching import watching
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime.backoff import Backoff
from wavepp_proto.runtime.membership import MemberGone, MemberUp
from wavepp_proto.runtime.memory_store import MemoryStore
from wavepp_proto.runtime.record import encode_record, member_key, members_prefix
from wavepp_proto.runtime.registrar import Registrar
from wavepp_proto.runtime.store import StoreEvent
from wavepp_proto.terms import MemberRecord

TTL_S = 1


async def put(store: MemoryStore, record: MemberRecord) -> None:
    await store.put(member_key(record.cluster, record.key), encode_record(record))


async def test_watch_tells_each_change_once_when_listings_repeat_it() -> None:
    store = MemoryStore()
    await put(store, make_record(stage=0))
    async with watching(store, relist_s=0.02) as seen:
        await eventually(lambda: seen.story == ["up 0/1"])
        await put(store, make_record(stage=1))
        await put(store, make_record(stage=1))
        await eventually(lambda: seen.story == ["up 0/1", "up 1/1"])
        await put(store, make_record(stage=2))
        await eventually(lambda: len(seen.story) >= 3)
    assert seen.changes == [MemberUp(make_record(stage=stage)) for stage in range(3)]
    assert [record.key.stage for record in seen.watch.members] == [0, 1, 2]


async def test_watch_tells_the_old_incarnation_gone_when_a_new_one_takes_its_place() -> None:
    store = MemoryStore()
    await put(store, make_record(incarnation=1))
    async with watching(store) as seen:
        await eventually(lambda: seen.changes)
        await put(store, make_record(incarnation=2))
        await eventually(lambda: len(seen.changes) == 3)
    assert seen.changes[1:] == [
        MemberGone(make_record().key, make_record().incarnation),
        MemberUp(make_record(incarnation=2)),
    ]


async def test_watch_tells_up_again_when_only_the_record_changed() -> None:
    store = MemoryStore()
    await put(store, make_record())
    async with watching(store) as seen:
        await eventually(lambda: seen.changes)
        await put(store, make_record(pool_blocks=7))
        await eventually(lambda: len(seen.changes) == 2)
    assert seen.changes[1] == MemberUp(make_record(pool_blocks=7))


async def test_watch_skips_a_registration_when_it_cannot_be_read() -> None:
    store = MemoryStore()
    prefix = members_prefix("test")
    await store.put(f"{prefix}p0/0.0", b"not json")
    await store.put(f"{prefix}p0/3.0", encode_record(make_record(stage=1)))
    async with watching(store) as seen:
        await put(store, make_record(stage=2))
        await eventually(lambda: seen.changes)
        await store.put(f"{prefix}p0/2.0", b"{}")
        await eventually(lambda: len(seen.changes) == 2)
    assert seen.story == ["up 2/1", "gone 2/1"]


async def test_watch_freezes_and_says_nothing_when_the_store_is_away() -> None:
    """Field bug 50: losing the store must not look like losing everybody."""
    now = 0.0
    store = MemoryStore(clock=lambda: now)
    lease = await store.grant(10)
    await store.put(member_key("test", make_record().key), encode_record(make_record()), lease)
    async with watching(store) as seen:
        await eventually(lambda: not seen.watch.frozen and seen.changes)
        store.available = False
        await eventually(lambda: seen.watch.frozen)
        now = 11.0
        store.expire()
        assert seen.story == ["up 0/1"]
        store.available = True
        await eventually(lambda: not seen.watch.frozen)
        await eventually(lambda: len(seen.changes) == 2)
    assert seen.story == ["up 0/1", "gone 0/1"]


async def test_watch_misses_nothing_when_its_history_was_compacted_while_away() -> None:
    store = MemoryStore()
    await put(store, make_record(stage=0))
    async with watching(store) as seen:
        await eventually(lambda: seen.changes)
        store.available = False
        await eventually(lambda: seen.watch.frozen)
        store.available = True
        await put(store, make_record(stage=1))
        store.compact()
        await eventually(lambda: len(seen.changes) == 2)
    assert seen.story == ["up 0/1", "up 1/1"]


async def test_watch_lists_again_when_its_revision_is_compacted_between_listing_and_watching() -> None:
    class CompactsOnce(MemoryStore):
        compactions = 0

        def watch(self, prefix: str, from_revision: int):  # type: ignore[no-untyped-def]
            if self.compactions == 0:
                self.compactions += 1
                self._write(member_key("test", make_record().key), encode_record(make_record()), None)
                self.compact()
            return super().watch(prefix, from_revision)

    store = CompactsOnce()
    async with watching(store, relist_s=600) as seen:
        await eventually(lambda: seen.changes)
    assert seen.story == ["up 0/1"]


async def test_watch_is_left_cancelled_when_the_reader_stops() -> None:
    store = MemoryStore()
    async with watching(store) as seen:
        await eventually(lambda: not seen.watch.frozen)
    assert not store._watches


async def test_record_stays_when_its_lease_is_refreshed_past_its_time() -> None:
    store = MemoryStore()
    registrar = Registrar(store, make_record(), ttl_s=TTL_S)
    loop = asyncio.get_running_loop()
    registrar.start()
    await registrar.registered.wait()
    created = (await store.get_prefix("/")).items[0].create_revision
    ends = loop.time() + 2 * TTL_S
    await eventually(lambda: loop.time() > ends)
    assert [item.create_revision for item in (await store.get_prefix("/")).items] == [created]
    await registrar.close()
    await registrar.close()
    assert (await store.get_prefix("/")).items == ()


async def test_registration_waits_when_the_store_comes_later() -> None:
    """Field bug 62: registering once at start and never again."""
    store = MemoryStore()
    store.available = False
    registrar = Registrar(store, make_record(), ttl_s=TTL_S)
    registrar.start()
    await asyncio.sleep(0)
    assert not registrar.registered.is_set()
    store.available = True
    await asyncio.wait_for(registrar.registered.wait(), 30)
    await registrar.close()


@pytest.mark.parametrize("stage", [0, 1])
async def test_registration_follows_when_the_record_is_updated(stage: int) -> None:
    """In the same place the record is replaced; in another place the old key goes."""
    store = MemoryStore()
    registrar = Registrar(store, make_record(), ttl_s=600)
    registrar.start()
    await registrar.registered.wait()
    changed = make_record(stage=stage, incarnation=2, pool_blocks=7)
    registrar.update(changed)
    assert not registrar.registered.is_set()
    await asyncio.wait_for(registrar.registered.wait(), 30)
    assert [item.value for item in (await store.get_prefix("/")).items] == [encode_record(changed)]
    await registrar.close()


async def test_update_is_refused_when_the_record_breaks_a_rule() -> None:
    registrar = Registrar(MemoryStore(), make_record())
    with pytest.raises(InvalidRequest):
        registrar.update(make_record(block_tokens=0))


async def test_record_is_put_again_when_somebody_deleted_it() -> None:
    store = MemoryStore()
    registrar = Registrar(store, make_record(), ttl_s=TTL_S)
    registrar.start()
    await registrar.registered.wait()
    (item,) = (await store.get_prefix("/")).items
    del store._items[item.key]
    store._tell(StoreEvent(item.key, None, item.mod_revision + 1))

    async def again() -> bool:
        return len((await store.get_prefix("/")).items) == 1

    await eventually(again)
    await registrar.close()


async def test_place_is_left_to_a_successor_and_taken_again_when_it_is_free() -> None:
    """A daemon that froze, and was replaced, comes back as somebody new: it must not push its heir out."""
    store = MemoryStore()
    first, heir = (
        Registrar(store, make_record(), ttl_s=TTL_S),
        Registrar(store, make_record(incarnation=5), ttl_s=TTL_S),
    )
    first.start()
    await first.registered.wait()
    heir.start()  # a new process takes over whatever stands there
    await heir.registered.wait()
    first.update(make_record(incarnation=9))

    async def standing() -> list[bytes]:
        return [item.value for item in (await store.get_prefix("/")).items]

    await eventually(lambda: not first._stale.is_set())
    assert not first.registered.is_set()
    assert await standing() == [encode_record(make_record(incarnation=5))]
    await heir.close()
    await asyncio.wait_for(first.registered.wait(), 30)
    assert await standing() == [encode_record(make_record(incarnation=9))]
    await first.close()


async def test_close_ends_when_the_store_is_away() -> None:
    store = MemoryStore()
    registrar = Registrar(store, make_record())
    registrar.start()
    await registrar.registered.wait()
    store.available = False
    await asyncio.wait_for(registrar.close(), 30)
    assert not registrar.registered.is_set()


def test_backoff_grows_to_its_ceiling_and_stays_jittered() -> None:
    backoff = Backoff(first_s=1.0, most_s=4.0, rng=random.Random(1))
    delays = [backoff.next_s() for _ in range(50)]
    ceilings = [1.0, 2.0, *[4.0] * 48]
    assert all(ceiling / 2 <= delay <= ceiling for delay, ceiling in zip(delays, ceilings, strict=True))
    assert len(set(delays)) == 50
    backoff.reset()
    assert backoff.next_s() <= 1.0


def test_tries_spread_out_when_two_hundred_daemons_wait_for_the_store() -> None:
    """Field bug 54: the store must not meet all its clients at one moment when it comes back."""
    tries: list[float] = []
    for seed in range(200):
        backoff, now = Backoff(rng=random.Random(seed)), 0.0
        while now < 30.0:
            now += backoff.next_s()
            tries.append(now)
    tenths = Counter(int(at * 10) for at in tries if 10.0 <= at < 30.0)
    mean = sum(tenths.values()) / 200
    assert max(tenths.values()) < 2.5 * mean
    assert mean < 20
