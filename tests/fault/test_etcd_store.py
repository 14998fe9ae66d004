"""MembershipStore over a real etcd: the semantics that registration, watching and election stand on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.harness.certs import make_certificates
from tests.harness.etcd import RealEtcd
from tests.harness.proxy import Proxy
from wavepp_proto.errors import InvalidRequest, MembershipUnavailable, Unauthenticated
from wavepp_proto.runtime.channels import ServerSecurity
from wavepp_proto.runtime.etcd_client import EtcdOptions
from wavepp_proto.runtime.etcd_store import EtcdStore
from wavepp_proto.runtime.memory_store import MemoryStore
from wavepp_proto.runtime.options import etcd_store
from wavepp_proto.runtime.store import LeaseGone, LeaseId, MembershipStore, RevisionCompacted, StoreEvent


@pytest.fixture(scope="module")
def etcd() -> Iterator[RealEtcd]:
    server = RealEtcd()
    yield server
    server.close()


@pytest.fixture(params=["etcd", "memory"])
async def store(request: pytest.FixtureRequest, etcd: RealEtcd) -> AsyncIterator[MembershipStore]:
    """Both stores: the one for tests must behave as the real one does."""
    store: MembershipStore = etcd.open_store(20.0) if request.param == "etcd" else MemoryStore()
    yield store
    await store.close()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"/wavepp-test/{request.node.name}/"


async def test_listing_holds_what_was_put_when_keys_share_the_prefix(store: MembershipStore, prefix: str) -> None:
    await store.put(f"{prefix}b", b"2")
    await store.put(f"{prefix}a", b"1")
    await store.put(f"{prefix[:-1]}0/other", b"x")
    before = await store.get_prefix(prefix)
    await store.put(f"{prefix}a", b"3")
    after = await store.get_prefix(prefix)
    assert [(item.key, item.value) for item in before.items] == [(f"{prefix}a", b"1"), (f"{prefix}b", b"2")]
    assert [item.value for item in after.items] == [b"3", b"2"]
    assert after.items[0].create_revision == before.items[0].create_revision
    assert after.items[0].mod_revision == after.revision == before.revision + 1


async def test_claim_is_granted_once_when_two_want_the_key(store: MembershipStore, prefix: str) -> None:
    key = f"{prefix}leader"
    first_lease, second_lease = await store.grant(60), await store.grant(60)
    first = await store.create_if_absent(key, b"one", first_lease)
    second = await store.create_if_absent(key, b"two", second_lease)
    assert (first.created, second.created) == (True, False)
    assert second.item == first.item
    assert (first.item.value, first.item.lease) == (b"one", first_lease)
    await store.revoke(first_lease)
    third = await store.create_if_absent(key, b"two", second_lease)
    assert third.created
    assert third.item.create_revision > first.item.create_revision
    await store.revoke(second_lease)


async def test_revoke_deletes_the_keys_when_they_are_under_the_lease(store: MembershipStore, prefix: str) -> None:
    lease = await store.grant(60)
    await store.put(f"{prefix}leased", b"1", lease)
    await store.put(f"{prefix}plain", b"2")
    await store.keep_alive(lease)
    await store.revoke(lease)
    await store.revoke(lease)
    assert [item.key for item in (await store.get_prefix(prefix)).items] == [f"{prefix}plain"]


async def test_key_survives_when_it_was_put_again_under_another_lease(store: MembershipStore, prefix: str) -> None:
    old, new = await store.grant(60), await store.grant(60)
    await store.put(f"{prefix}a", b"1", old)
    await store.put(f"{prefix}a", b"2", new)
    await store.revoke(old)
    assert [item.value for item in (await store.get_prefix(prefix)).items] == [b"2"]
    await store.revoke(new)


async def test_lease_gone_is_raised_when_the_lease_is_dead(store: MembershipStore, prefix: str) -> None:
    lease = await store.grant(60)
    await store.revoke(lease)
    with pytest.raises(LeaseGone):
        await store.keep_alive(lease)
    with pytest.raises(LeaseGone):
        await store.put(f"{prefix}a", b"1", lease)
    with pytest.raises(LeaseGone):
        await store.create_if_absent(f"{prefix}a", b"1", lease)


async def test_watch_replays_then_follows_when_started_at_an_old_revision(store: MembershipStore, prefix: str) -> None:
    start = (await store.get_prefix(prefix)).revision + 1
    lease = await store.grant(60)
    await store.put(f"{prefix}a", b"1")
    await store.put("/wavepp-test-elsewhere", b"x")
    watch = store.watch(prefix, start)
    await store.put(f"{prefix}b", b"2", lease)
    await store.revoke(lease)
    events = [await asyncio.wait_for(watch.next(), 30) for _ in range(3)]
    assert events == [
        StoreEvent(f"{prefix}a", b"1", start),
        StoreEvent(f"{prefix}b", b"2", start + 2),
        StoreEvent(f"{prefix}b", None, start + 3),
    ]
    watch.cancel()
    with pytest.raises(MembershipUnavailable):
        await asyncio.wait_for(watch.next(), 30)


async def test_watch_fails_typed_when_its_revision_is_compacted(
    store: MembershipStore, prefix: str, etcd: RealEtcd
) -> None:
    """Field bug 52: restarting at the compact revision would lose updates."""
    await store.put(f"{prefix}a", b"1")
    old = (await store.get_prefix(prefix)).revision
    await store.put(f"{prefix}a", b"2")
    if isinstance(store, MemoryStore):
        store.compact()
    else:
        etcd.compact()
    watch = store.watch(prefix, old)
    for _ in range(2):
        with pytest.raises(RevisionCompacted):
            await asyncio.wait_for(watch.next(), 30)


async def test_call_fails_typed_when_the_store_is_closed(store: MembershipStore, prefix: str) -> None:
    watch = store.watch(prefix, 1_000_000)
    await store.close()
    await store.close()
    with pytest.raises(MembershipUnavailable):
        await store.get_prefix(prefix)
    with pytest.raises(MembershipUnavailable):
        await asyncio.wait_for(watch.next(), 30)


async def test_call_moves_to_the_next_endpoint_when_one_is_down(etcd: RealEtcd, prefix: str) -> None:
    store = EtcdStore(EtcdOptions(endpoints=("127.0.0.1:1", *etcd.options.endpoints)))
    with pytest.raises(MembershipUnavailable) as caught:
        await store.put(f"{prefix}a", b"1")
    assert caught.value.fields == {"endpoint": "127.0.0.1:1"}
    await store.put(f"{prefix}a", b"1")
    await store.close()


async def test_call_fails_typed_within_its_deadline_when_etcd_hangs(etcd: RealEtcd, prefix: str) -> None:
    store = etcd.open_store(timeout_s=0.2)
    await store.put(f"{prefix}a", b"1")
    etcd.pause()
    try:
        outcomes = await asyncio.gather(*(store.get_prefix(prefix) for _ in range(20)), return_exceptions=True)
    finally:
        etcd.resume()
    assert {type(outcome) for outcome in outcomes} == {MembershipUnavailable}
    await store.close()


async def test_calls_and_watches_work_when_etcd_demands_certificates(tmp_path: Path, prefix: str) -> None:
    made = make_certificates(tmp_path)
    etcd = RealEtcd(ServerSecurity(ca=made.ca, cert=made.server_cert, key=made.server_key))
    endpoint = f"https://{etcd.options.endpoints[0]}"
    good = EtcdStore(EtcdOptions((endpoint,), ca=made.ca, cert=made.client_cert, key=made.client_key))
    bare = EtcdStore(EtcdOptions((endpoint,), ca=made.ca, timeout_s=0.5))
    try:
        watch = good.watch(prefix, 1)
        await good.put(f"{prefix}a", b"1")
        assert (await asyncio.wait_for(watch.next(), 30)).value == b"1"
        with pytest.raises(MembershipUnavailable):
            await bare.put(f"{prefix}a", b"2")
    finally:
        await good.close()
        await bare.close()
        etcd.close()


async def test_calls_work_again_when_the_server_forgot_the_token() -> None:
    """A token dies with the server that issued it; the store logs in again by itself."""
    etcd = RealEtcd()
    try:
        _enable_auth(etcd)
        store = EtcdStore(EtcdOptions(etcd.options.endpoints, user="root", password="r00t"))
        wrong = EtcdStore(EtcdOptions(etcd.options.endpoints, user="root", password="guess"))
        nobody = etcd.open_store()
        await store.put("/wavepp-test/a", b"1")
        for refused in (wrong, nobody):
            with pytest.raises(Unauthenticated):
                await refused.put("/wavepp-test/a", b"2")
            await refused.close()
        next(iter(store._connection._clients.values())).metadata = (("token", "forgotten.1"),)
        await store.put("/wavepp-test/a", b"3")
        assert (await store.get_prefix("/wavepp-test/a")).items[0].value == b"3"
        await store.close()
    finally:
        etcd.close()


def _enable_auth(etcd: RealEtcd) -> None:
    from wavepp_proto.runtime.etcd_import import load_etcd3

    rpc = load_etcd3().etcdrpc

    def operation(client: object) -> None:
        stub = rpc.AuthStub(client.channel)  # type: ignore[attr-defined]
        stub.UserAdd(rpc.AuthUserAddRequest(name="root", password="r00t"), 10)
        stub.RoleAdd(rpc.AuthRoleAddRequest(name="root"), 10)
        stub.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"), 10)
        stub.AuthEnable(rpc.AuthEnableRequest(), 10)

    etcd.perform(operation)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (EtcdOptions(()), "etcd"),
        (EtcdOptions(("host",)), "etcd"),
        (EtcdOptions(("ftp://host:1",)), "etcd"),
        (EtcdOptions(("https://host:1",)), "etcd_ca"),
        (EtcdOptions(("host:1",), cert=Path("c")), "etcd_cert"),
        (EtcdOptions(("host:1",), user="u"), "etcd_user"),
        (EtcdOptions(("host:1",), user="\udcff", password="p"), "etcd_user"),
    ],
)
def test_options_are_refused_by_name_when_they_do_not_go_together(options: EtcdOptions, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        EtcdStore(options)
    assert caught.value.fields["field"] == field


def test_password_file_is_refused_without_its_text_when_it_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_bytes(b"hunter2\xff")
    with pytest.raises(InvalidRequest) as caught:
        etcd_store("host:1", "u", path, None, None, None)
    assert caught.value.message == f"cannot read {path}: not UTF-8"
    assert caught.value.fields == {"field": "etcd_password_file", "value": str(path)}
    assert caught.value.__cause__ is None


def test_password_is_not_shown_when_options_are_printed() -> None:
    assert "hunter2" not in repr(EtcdOptions(("host:1",), user="u", password="hunter2"))


async def test_lease_expires_when_the_clock_passes_its_time() -> None:
    now = 0.0
    store = MemoryStore(clock=lambda: now)
    lease = await store.grant(10)
    await store.put("/a", b"1", lease)
    now = 9.0
    await store.keep_alive(lease)
    now = 18.9
    assert len((await store.get_prefix("/")).items) == 1
    now = 19.0
    assert (await store.get_prefix("/")).items == ()
    with pytest.raises(LeaseGone):
        await store.keep_alive(LeaseId(lease))


async def test_connection_is_replaced_when_it_is_half_open(etcd: RealEtcd, prefix: str) -> None:
    """A connection that swallows everything is dialled again after one silent call; its watch ends."""
    (endpoint,) = etcd.options.addresses()
    async with Proxy(str(endpoint)) as proxy:
        store = EtcdStore(EtcdOptions(endpoints=(proxy.address,), timeout_s=1.0))
        try:
            watch = store.watch(prefix, (await store.get_prefix(prefix)).revision + 1)
            await store.get_prefix(prefix)
            proxy.swallow()
            with pytest.raises(MembershipUnavailable):
                await store.get_prefix(prefix)
            with pytest.raises(MembershipUnavailable):
                await asyncio.wait_for(watch.next(), 30)
            assert (await store.get_prefix(prefix)).items == ()
            assert proxy.accepted == 2
        finally:
            await store.close()


async def test_proxy_of_the_environment_is_ignored_when_etcd_is_dialled(
    etcd: RealEtcd, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    store = etcd.open_store(20.0)
    try:
        assert (await store.get_prefix(prefix)).items == ()
    finally:
        await store.close()
