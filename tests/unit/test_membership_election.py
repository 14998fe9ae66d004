"""Leadership over the in-process store (wavepp_proto.runtime.election)."""

from __future__ import annotations

import asyncio

from tests.harness.eventually import eventually
from wavepp_proto.errors import MembershipUnavailable
from wavepp_proto.runtime.election import Leader, Leadership, find_leader, leader_address
from wavepp_proto.runtime.memory_store import MemoryStore
from wavepp_proto.runtime.record import leader_key
from wavepp_proto.runtime.store import Claim, LeaseId

A, B = "10.0.0.1:7000", "10.0.0.2:7000"


async def test_second_candidate_waits_when_another_leads_and_follows_with_a_higher_epoch() -> None:
    store = MemoryStore()
    first, second = Leadership(store, "test", A), Leadership(store, "test", B)
    assert await leader_address(store, "test") is None
    held = await first.campaign()
    campaign = asyncio.create_task(second.campaign())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not campaign.done()
    assert await find_leader(store, "test") == Leader(A, held.epoch)
    await first.resign()
    assert held.lost.is_set()
    taken = await asyncio.wait_for(campaign, 30)
    assert taken.epoch > held.epoch
    assert not taken.lost.is_set()
    assert await leader_address(store, "test") == B
    await second.resign()
    assert await leader_address(store, "test") is None


async def test_leadership_survives_when_the_store_is_away_for_longer_than_its_ttl() -> None:
    """Losing the store stops nothing: the key has expired meanwhile and is claimed again."""
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    leadership = Leadership(store, "test", A, ttl_s=1)
    authority = await leadership.campaign()
    store.available = False
    now[0] += 100
    store.available = True
    leader = await eventually(lambda: find_leader(store, "test"))
    assert leader.address == A
    assert leader.epoch > authority.epoch
    assert not authority.lost.is_set()
    await leadership.resign()


async def test_leadership_is_lost_when_another_won_while_the_store_was_away() -> None:
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    first = Leadership(store, "test", A, ttl_s=1)
    held = await first.campaign()
    store.available = False
    now[0] += 100
    store.available = True
    claim = await store.create_if_absent(leader_key("test"), B.encode(), await store.grant(600))
    assert claim.created
    await asyncio.wait_for(held.lost.wait(), 30)
    assert await leader_address(store, "test") == B
    await first.resign()


async def test_leadership_survives_when_the_store_is_away_for_less_than_its_ttl() -> None:
    store = MemoryStore()
    leadership = Leadership(store, "test", A, ttl_s=600)
    authority = await leadership.campaign()
    store.available = False
    for _ in range(20):
        await asyncio.sleep(0)
    store.available = True
    assert not authority.lost.is_set()
    assert await find_leader(store, "test") == Leader(A, authority.epoch)
    await leadership.resign()


async def test_key_is_claimed_again_at_once_when_its_lease_is_revoked() -> None:
    store = MemoryStore()
    leadership = Leadership(store, "test", A, ttl_s=600)
    authority = await leadership.campaign()
    (item,) = (await store.get_prefix(leader_key("test"))).items
    assert item.lease is not None
    await store.revoke(item.lease)
    leader = await eventually(lambda: find_leader(store, "test"))
    assert leader.epoch > authority.epoch
    assert not authority.lost.is_set()
    await leadership.resign()


async def test_campaign_finds_its_own_claim_when_the_first_answer_was_lost() -> None:
    """The claim took effect, its answer did not arrive: the candidate must not wait for itself for ever."""

    class LosesOneAnswer(MemoryStore):
        lost = 0

        async def create_if_absent(self, key: str, value: bytes, lease: LeaseId | None = None) -> Claim:
            claim = await super().create_if_absent(key, value, lease)
            if self.lost == 0:
                self.lost += 1
                raise MembershipUnavailable("the answer was lost")
            return claim

    store = LosesOneAnswer()
    leadership = Leadership(store, "test", A, ttl_s=600)
    authority = await asyncio.wait_for(leadership.campaign(), 30)
    assert await find_leader(store, "test") == Leader(A, authority.epoch)
    await leadership.resign()


async def test_campaign_resigns_first_when_called_while_leading() -> None:
    store = MemoryStore()
    leadership = Leadership(store, "test", A)
    first = await leadership.campaign()
    second = await leadership.campaign()
    assert first.lost.is_set()
    assert second.epoch > first.epoch
    await leadership.resign()
