"""Channels and servers: addresses, binding, TLS and the keepalive pair (wavepp_proto.runtime.channels)."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.harness.certs import Certificates, make_certificates
from tests.harness.eventually import eventually
from tests.harness.proxy import Proxy
from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime import channels, options
from wavepp_proto.runtime.channels import Address, ClientSecurity, ServerSecurity


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certs"))


class Servers:
    """Starts health servers and stops them after the test."""

    def __init__(self) -> None:
        self._started: list[grpc.aio.Server] = []

    async def start(self, security: ServerSecurity = channels.PLAIN_SERVER, listen: str = "127.0.0.1:0") -> int:
        server = channels.new_server()
        self.servicer = servicer = health.aio.HealthServicer()
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = channels.bind_server(server, listen, security)
        await server.start()
        self._started.append(server)
        return port

    async def stop(self) -> None:
        for server in self._started:
            await server.stop(None)


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    group = Servers()
    yield group
    await group.stop()


async def check(port: int, security: ClientSecurity) -> int:
    async with channels.open_channel(f"127.0.0.1:{port}", security) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        return int(reply.status)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:80", Address("127.0.0.1", 80)),
        ("host:0", Address("host", 0)),
        (":7000", Address("", 7000)),
        ("[::1]:65535", Address("::1", 65535)),
    ],
)
def test_address_is_parsed_when_well_formed(text: str, expected: Address) -> None:
    assert channels.parse_address(text) == expected


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:x", "host:65536", "host:-1", "::1:80", "host:٣", "host:" + "9" * 5000]
)
def test_address_is_refused_by_name_when_malformed(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        channels.parse_address(text, field="listen")
    assert caught.value.fields["field"] == "listen"


def test_address_prints_brackets_when_ipv6() -> None:
    assert str(Address("::1", 80)) == "[::1]:80"


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        ("127.0.0.1:0", None, "127.0.0.1:7"),
        ("0.0.0.0:0", "10.0.0.4", "10.0.0.4:7"),
        ("0.0.0.0:0", "10.0.0.4:0", "10.0.0.4:7"),
        (":7", "stage-1.example:9000", "stage-1.example:9000"),
        ("[::]:7", "fd00::4", "[fd00::4]:7"),
        ("[::]:7", "[fd00::4]:9", "[fd00::4]:9"),
        ("[::1]:0", None, "[::1]:7"),
    ],
)
def test_advertise_fills_the_bound_port_when_it_names_none(listen: str, advertise: str | None, expected: str) -> None:
    assert channels.advertise_address(listen, advertise, 7) == expected


@pytest.mark.parametrize("listen", ["0.0.0.0:7", ":7", "[::]:7"])
def test_advertise_is_demanded_when_listen_is_a_wildcard(listen: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        channels.advertise_address(listen, None, 7)
    assert caught.value.fields["field"] == "advertise"


def test_advertise_is_refused_when_it_is_a_wildcard_itself() -> None:
    with pytest.raises(InvalidRequest):
        channels.advertise_address("0.0.0.0:7", "0.0.0.0", 7)


async def test_bind_names_the_holder_when_the_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest) as caught:
            channels.bind_server(channels.new_server(), f"127.0.0.1:{port}")
    assert caught.value.fields["value"] == f"127.0.0.1:{port}"
    assert "(pid " in caught.value.fields["holder"]
    assert str(port) in caught.value.message


@pytest.mark.parametrize("host", ["10.99.99.99", "nosuch.invalid"])
async def test_bind_blames_no_process_that_is_not_in_the_way(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        listen = f"{host}:{elsewhere.getsockname()[1]}"
        with pytest.raises(InvalidRequest) as caught:
            channels.bind_server(channels.new_server(), listen)
    assert "holder" not in caught.value.fields
    assert "held by" not in caught.value.message


def test_holder_is_the_one_of_this_address_and_no_other() -> None:
    """psutil lists every listener on the port: the one on another address of this machine is in nobody's way."""
    code = (
        "import socket, sys; held = socket.create_server((sys.argv[1], int(sys.argv[2])))\n"
        "print(held.getsockname()[1], flush=True); sys.stdin.read()"
    )
    holders: list[subprocess.Popen[str]] = []
    port = "0"
    with contextlib.ExitStack() as stack:
        for host in ("127.0.0.2", "127.0.0.1"):
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", code, host, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            holders.append(process)
        for host, holder in zip(("127.0.0.2", "127.0.0.1"), holders, strict=True):
            assert f"(pid {holder.pid})" in str(channels._port_holder(Address(host, int(port))))


@pytest.mark.parametrize("listen", ["256.1.1.1:7", "10.99.99.99:0", "nosuch.invalid:0", "[2001:db8::1]:0"])
async def test_bind_refuses_an_address_of_another_machine(listen: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        channels.bind_server(channels.new_server(), listen)
    assert (caught.value.fields["field"], caught.value.fields["value"]) == ("listen", listen)
    assert capfd.readouterr().err == "", "the library has written lines of its own"


async def test_bind_refuses_a_second_server_when_both_use_our_options(servers: Servers) -> None:
    port = await servers.start()
    with pytest.raises(InvalidRequest):
        channels.bind_server(channels.new_server(), f"127.0.0.1:{port}")


async def test_call_succeeds_when_plain(servers: Servers) -> None:
    assert await check(await servers.start(), channels.PLAIN_CLIENT) == health_pb2.HealthCheckResponse.SERVING


async def test_call_succeeds_when_the_environment_names_a_proxy(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    assert await check(await servers.start(), channels.PLAIN_CLIENT) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    "proxy", ["", "proxy:80", "https://proxy:80", "http://proxy", "http://:80", "http://proxy:80/path"]
)
def test_proxy_is_refused_by_name_when_malformed(proxy: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        channels.check_proxy(proxy)
    assert caught.value.fields["field"] == "proxy"


async def test_call_succeeds_when_both_ends_show_certificates(servers: Servers, certificates: Certificates) -> None:
    port = await servers.start(
        ServerSecurity(ca=certificates.ca, cert=certificates.server_cert, key=certificates.server_key)
    )
    mutual = ClientSecurity(ca=certificates.ca, cert=certificates.client_cert, key=certificates.client_key)
    assert await check(port, mutual) == health_pb2.HealthCheckResponse.SERVING


async def test_call_succeeds_when_the_server_name_is_overridden(servers: Servers, tmp_path: Path) -> None:
    made = make_certificates(tmp_path, hosts=["stage.internal"])
    port = await servers.start(ServerSecurity(cert=made.server_cert, key=made.server_key))
    named = ClientSecurity(ca=made.ca, server_name="stage.internal")
    assert await check(port, named) == health_pb2.HealthCheckResponse.SERVING


async def test_call_is_refused_when_the_client_shows_no_certificate(
    servers: Servers, certificates: Certificates
) -> None:
    port = await servers.start(
        ServerSecurity(ca=certificates.ca, cert=certificates.server_cert, key=certificates.server_key)
    )
    for security in (ClientSecurity(ca=certificates.ca), channels.PLAIN_CLIENT):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(port, security)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("security", "field"),
    [
        (ServerSecurity(cert=Path("c")), "tls_key"),
        (ServerSecurity(key=Path("k")), "tls_cert"),
        (ServerSecurity(ca=Path("a")), "tls_cert"),
        (ServerSecurity(cert=Path("absent"), key=Path("absent")), "tls_key"),
        (ClientSecurity(ca=Path("absent")), "tls_ca"),
        (ClientSecurity(ca=Path("\ud800")), "tls_ca"),
        (ClientSecurity(ca=Path("a"), server_name="a\udcff"), "tls_server_name"),
        (ClientSecurity(ca=Path("a"), cert=Path("c")), "tls_key"),
    ],
)
def test_tls_is_refused_by_name_when_half_configured(security: ServerSecurity | ClientSecurity, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        security.credentials()
    assert caught.value.fields["field"] == field


def hurried(options: channels.Options) -> tuple[tuple[str, str | int], ...]:
    """The same, with pings and answers due within 0.2 s each."""
    names = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    assert set(names) <= dict(options).keys()
    return tuple((dict(options) | dict.fromkeys(names, 200)).items())


@pytest.mark.parametrize("side", ["server", "client"])
async def test_stream_ends_when_the_other_end_is_gone_without_a_word(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """A health watch, which no deadline and no event would end."""
    if side == "server":
        monkeypatch.setattr(limits, "SERVER_OPTIONS", hurried(limits.SERVER_OPTIONS))
    port = await servers.start()
    if side == "client":
        monkeypatch.setattr(limits, "CHANNEL_OPTIONS", hurried(limits.CHANNEL_OPTIONS))
    async with Proxy(f"127.0.0.1:{port}") as proxy, channels.open_channel(proxy.address) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        watched = servers.servicer._watcher_count_by_service
        assert watched == {"": 1}
        proxy.swallow()
        # well before the other end, which pings at the usual pace, would notice
        await eventually(lambda: watching.done() if side == "client" else watched == {}, within=8)
        watching.cancel()


@pytest.mark.parametrize("options", [limits.CHANNEL_OPTIONS, limits.SERVER_OPTIONS, channels.ETCD_CHANNEL_OPTIONS])
def test_unanswered_ping_ends_a_connection_in_time(options: channels.Options) -> None:
    """gRPC's core closes it by a timeout of its own, 60 s unless named, and not by that of keepalive."""
    named = dict(options)
    assert named["grpc.http2.ping_timeout_ms"] == named["grpc.keepalive_timeout_ms"]
    assert int(named["grpc.keepalive_time_ms"]) + int(named["grpc.http2.ping_timeout_ms"]) <= 15_000


def test_keepalive_passes_when_the_options_are_ours() -> None:
    channels.check_keepalive(limits.CHANNEL_OPTIONS, limits.SERVER_OPTIONS)


@pytest.mark.parametrize(
    ("client", "server", "field"),
    [
        ([("grpc.keepalive_time_ms", 10_000)], [], "grpc.keepalive_time_ms"),
        (
            [("grpc.keepalive_time_ms", 10_000)],
            [("grpc.http2.min_ping_interval_without_data_ms", 10_000)],
            "grpc.keepalive_time_ms",
        ),
        ([("grpc.keepalive_permit_without_calls", 1)], [], "grpc.keepalive_permit_without_calls"),
    ],
)
def test_keepalive_is_refused_when_the_server_would_answer_too_many_pings(
    client: channels.Options, server: channels.Options, field: str
) -> None:
    """Field bug 55: a client that pings more often than its server allows is sent away."""
    with pytest.raises(InvalidRequest) as caught:
        channels.check_keepalive(client, server)
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"cert": Path("c"), "key": Path("k")}, "tls_cert"),
        ({"ca": Path("a")}, "tls_ca"),
    ],
)
def test_half_of_tls_is_refused_when_a_server_is_asked_for_it(given: dict[str, Path], field: str) -> None:
    with pytest.raises(InvalidRequest, match="plain text") as refused:
        options.server_security(given.get("ca"), given.get("cert"), given.get("key"))
    assert refused.value.fields["field"] == field
