"""Registration, watching and election over a real etcd that is killed, frozen, compacted or late.

Reference: field bugs 50 (etcd away), 52 (compaction), 54 (expiry without a new record), 62 (order of
starts). Short leases; etcd's own shortest is 2 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.harness.etcd import RealEtcd
from tests.harness.eventually import eventually
from tests.harness.members import make_record
from tests.harness.watching import watching
from wavepp_proto.runtime.channels import parse_address
from wavepp_proto.runtime.election import Leader, Leadership, find_leader
from wavepp_proto.runtime.etcd_store import EtcdStore
from wavepp_proto.runtime.membership import MemberUp
from wavepp_proto.runtime.record import encode_record, leader_key, member_key
from wavepp_proto.runtime.registrar import Registrar
from wavepp_proto.runtime.store import LeaseGone, LeaseId, MembershipStore

TTL_S = 2
SHORT_CALL_S = 0.5
PATIENT_CALL_S = 20.0
"""For what the test itself asks, so that a slow machine does not fail it."""


@pytest.fixture(scope="module")
def etcd() -> Iterator[RealEtcd]:
    server = RealEtcd()
    yield server
    server.close()


@pytest.fixture
async def daemon_store(etcd: RealEtcd) -> AsyncIterator[EtcdStore]:
    store = etcd.open_store(SHORT_CALL_S)
    yield store
    await store.close()


@pytest.fixture
async def controller_store(etcd: RealEtcd) -> AsyncIterator[EtcdStore]:
    store = etcd.open_store(SHORT_CALL_S)
    yield store
    await store.close()


@pytest.fixture
async def outside(etcd: RealEtcd) -> AsyncIterator[EtcdStore]:
    """The test's own eyes and hands."""
    store = etcd.open_store(PATIENT_CALL_S)
    yield store
    await store.close()


async def lease_of(store: MembershipStore, key: str) -> LeaseId | None:
    items = (await store.get_prefix(key)).items
    return items[0].lease if items else None


async def test_record_gets_a_new_lease_when_the_old_one_is_revoked_under_a_live_daemon(
    daemon_store: EtcdStore, controller_store: EtcdStore, outside: EtcdStore
) -> None:
    record = make_record("revoked")
    key = member_key("revoked", record.key)
    registrar = Registrar(daemon_store, record, ttl_s=TTL_S)
    async with watching(controller_store, "revoked", relist_s=600) as seen:
        registrar.start()
        await eventually(lambda: seen.story == ["up 0/1"])
        revoked = await lease_of(outside, key)
        assert revoked is not None
        await outside.revoke(revoked)
        await eventually(lambda: seen.story == ["up 0/1", "gone 0/1", "up 0/1"])
        assert await lease_of(outside, key) not in (None, revoked)
        await registrar.close()
        await eventually(lambda: seen.story[3:] == ["gone 0/1"])


async def test_record_outlives_its_ttl_when_it_is_kept_alive(daemon_store: EtcdStore, outside: EtcdStore) -> None:
    record = make_record("kept")
    registrar = Registrar(daemon_store, record, ttl_s=TTL_S)
    registrar.start()
    await asyncio.wait_for(registrar.registered.wait(), 30)
    first = (await outside.get_prefix(member_key("kept", record.key))).items
    loop = asyncio.get_running_loop()
    later = loop.time() + 2.5 * TTL_S
    await eventually(lambda: loop.time() > later)
    assert (await outside.get_prefix(member_key("kept", record.key))).items == first
    await registrar.close()


async def test_record_disappears_when_its_daemon_stops_refreshing(
    daemon_store: EtcdStore, controller_store: EtcdStore
) -> None:
    registrar = Registrar(daemon_store, make_record("silent"), ttl_s=TTL_S)
    async with watching(controller_store, "silent", relist_s=600) as seen:
        registrar.start()
        await eventually(lambda: seen.story == ["up 0/1"])
        await daemon_store.close()
        await eventually(lambda: seen.story == ["up 0/1", "gone 0/1"])
    await registrar.close()


async def test_nobody_is_gone_while_etcd_is_frozen_and_all_are_back_when_it_thaws(
    etcd: RealEtcd, daemon_store: EtcdStore, controller_store: EtcdStore, outside: EtcdStore
) -> None:
    """Frozen for longer than the lease; after the thaw it may have expired, then the record must come back."""
    registrar = Registrar(daemon_store, make_record("frozen"), ttl_s=TTL_S)
    async with watching(controller_store, "frozen") as seen:
        registrar.start()
        await eventually(lambda: seen.story == ["up 0/1"])
        etcd.pause()
        try:
            await eventually(lambda: seen.watch.frozen)
            loop = asyncio.get_running_loop()
            thaw_at = loop.time() + 2 * TTL_S
            await eventually(lambda: loop.time() > thaw_at)
            assert seen.story == ["up 0/1"]
            assert [record.key.stage for record in seen.watch.members] == [0]
        finally:
            etcd.resume()
        await eventually(lambda: not seen.watch.frozen)
        await eventually(lambda: _refreshed(outside, "frozen"))
        await eventually(lambda: bool(seen.watch.members))
        assert seen.story in (["up 0/1"], ["up 0/1", "gone 0/1", "up 0/1"])
    await registrar.close()


async def _refreshed(store: EtcdStore, cluster: str) -> bool:
    """The record stands under a lease that lives."""
    lease = await lease_of(store, f"/wavepp/{cluster}/members/")
    if lease is None:
        return False
    try:
        await store.keep_alive(lease)
    except LeaseGone:
        return False
    return True


async def test_watch_lists_again_when_history_was_compacted_while_it_was_disconnected(
    etcd: RealEtcd, controller_store: EtcdStore, outside: EtcdStore
) -> None:
    """The watch stops while records change and the history is compacted; nothing may be missed."""

    class Disconnects:
        """Starts each watch before the compacted revision, as a client that was away would."""

        def __init__(self, store: EtcdStore) -> None:
            self._store = store
            self.watches = 0

        def __getattr__(self, name: str) -> object:
            return getattr(self._store, name)

        def watch(self, prefix: str, from_revision: int) -> object:
            self.watches += 1
            return self._store.watch(prefix, 1 if self.watches == 1 else from_revision)

    first, second = make_record("compacted", stage=0), make_record("compacted", stage=1)
    await outside.put(member_key("compacted", first.key), encode_record(first))
    etcd.compact()
    away = Disconnects(controller_store)
    async with watching(away, "compacted", relist_s=600) as seen:  # type: ignore[arg-type]
        await eventually(lambda: away.watches == 2)
        await outside.put(member_key("compacted", second.key), encode_record(second))
        await eventually(lambda: len(seen.changes) == 2)
    assert seen.changes == [MemberUp(first), MemberUp(second)]
    assert away.watches == 2


async def test_daemon_registers_when_etcd_starts_after_it() -> None:
    """Also the other way round: etcd is replaced by an empty one on the same port."""
    etcd = RealEtcd()
    port = parse_address(etcd.server.endpoint).port
    store = etcd.open_store(SHORT_CALL_S)
    etcd.close()
    registrar = Registrar(store, make_record("late"), ttl_s=TTL_S)
    registrar.start()
    async with watching(store, "late") as seen:
        for _ in range(2):
            server = await asyncio.to_thread(RealEtcd, client_port=port)
            await eventually(lambda: not seen.watch.frozen and bool(seen.watch.members))
            await asyncio.to_thread(server.close)
            await eventually(lambda: seen.watch.frozen)
            assert seen.watch.members
    await registrar.close()
    await store.close()


async def test_leader_is_one_and_the_epoch_grows_when_leadership_moves(
    daemon_store: EtcdStore, controller_store: EtcdStore, outside: EtcdStore
) -> None:
    first = Leadership(daemon_store, "led", "a:1", ttl_s=TTL_S)
    second = Leadership(controller_store, "led", "b:1", ttl_s=TTL_S)
    held = await asyncio.wait_for(first.campaign(), 30)
    campaign = asyncio.create_task(second.campaign())
    loop = asyncio.get_running_loop()
    later = loop.time() + 2 * TTL_S
    await eventually(lambda: loop.time() > later)
    assert not campaign.done()
    assert not held.lost.is_set()
    await first.resign()
    taken = await asyncio.wait_for(campaign, 30)
    assert taken.epoch > held.epoch
    assert await find_leader(outside, "led") == Leader("b:1", taken.epoch)
    await outside.revoke(_present(await lease_of(outside, leader_key("led"))))

    async def claimed_again() -> bool:
        leader = await find_leader(outside, "led")
        return leader is not None and leader.epoch > taken.epoch

    await eventually(claimed_again)
    assert not taken.lost.is_set()
    await second.resign()
    again = await asyncio.wait_for(first.campaign(), 30)
    assert again.epoch > taken.epoch
    await first.resign()


async def test_second_takes_over_when_the_leader_dies_without_a_word(
    daemon_store: EtcdStore, controller_store: EtcdStore
) -> None:
    first = Leadership(daemon_store, "died", "a:1", ttl_s=TTL_S)
    held = await asyncio.wait_for(first.campaign(), 30)
    await daemon_store.close()
    second = Leadership(controller_store, "died", "b:1", ttl_s=TTL_S)
    taken = await asyncio.wait_for(second.campaign(), 30)
    assert taken.epoch > held.epoch
    await second.resign()
    await first.resign()


async def test_leadership_survives_when_etcd_is_frozen_for_longer_than_its_ttl(
    etcd: RealEtcd, controller_store: EtcdStore, outside: EtcdStore
) -> None:
    leadership = Leadership(controller_store, "thawed", "a:1", ttl_s=TTL_S)
    held = await asyncio.wait_for(leadership.campaign(), 30)
    loop = asyncio.get_running_loop()
    etcd.pause()
    try:
        thaw_at = loop.time() + 3 * TTL_S
        await eventually(lambda: loop.time() > thaw_at)
        assert not held.lost.is_set()
    finally:
        etcd.resume()
    leader = await eventually(lambda: find_leader(outside, "thawed"), within=60)
    assert leader.address == "a:1"
    assert not held.lost.is_set()
    await leadership.resign()


def _present(lease: LeaseId | None) -> LeaseId:
    assert lease is not None
    return lease
