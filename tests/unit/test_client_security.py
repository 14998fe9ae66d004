"""Why no call came through: a look at the address tells what gRPC says alike of all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.certs import Certificates, make_certificates
from tests.harness.command import wavepp
from tests.harness.ports import free_port
from wavepp import ClientSecurity
from wavepp._security import why_unreachable
from wavepp_proto.runtime.channels import PLAIN_SERVER, ServerSecurity, bind_server, new_server


@dataclass(frozen=True)
class Servers:
    plain: str
    tls: str
    own: Certificates
    other: Certificates


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Certificates, Certificates]:
    return make_certificates(tmp_path_factory.mktemp("own")), make_certificates(tmp_path_factory.mktemp("other"))


@pytest.fixture
async def servers(folders: tuple[Certificates, Certificates]) -> AsyncIterator[Servers]:
    own, other = folders
    plain, tls = new_server(), new_server()
    ports = [
        bind_server(plain, "127.0.0.1:0", PLAIN_SERVER),
        bind_server(tls, "127.0.0.1:0", ServerSecurity(own.ca, own.server_cert, own.server_key)),
    ]
    await plain.start()
    await tls.start()
    yield Servers(f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", own, other)
    await plain.stop(None)
    await tls.stop(None)


async def look(address: str, security: ClientSecurity) -> str | None:
    return await asyncio.to_thread(why_unreachable, address, security)


async def test_look_names_what_is_wrong(servers: Servers) -> None:
    own, other = servers.own, servers.other
    full = ClientSecurity(own.ca, own.client_cert, own.client_key)
    assert await look(servers.tls, full) is None
    assert await look(servers.plain, ClientSecurity()) is None
    assert await look(servers.tls, ClientSecurity()) == f"{servers.tls} speaks TLS: give tls.ca"
    assert await look(servers.plain, full) == f"{servers.plain} does not speak TLS: leave tls.ca out"
    wrong = await look(servers.tls, ClientSecurity(other.ca, own.client_cert, own.client_key))
    assert wrong is not None
    assert wrong.startswith(f"the certificate of {servers.tls} is not accepted (")
    assert "\n" not in wrong
    none = await look(servers.tls, ClientSecurity(own.ca))
    assert none == f"{servers.tls} wants a client certificate: give tls.cert and tls.key that its CA signed"
    foreign = await look(servers.tls, ClientSecurity(own.ca, other.client_cert, other.client_key))
    assert foreign == f"{servers.tls} refuses this client certificate: give tls.cert and tls.key that its CA signed"


async def test_look_says_that_nothing_answers_when_nothing_listens() -> None:
    address = f"127.0.0.1:{free_port()}"
    assert await look(address, ClientSecurity()) == f"nothing answers at {address} (Connection refused)"


async def test_look_is_bounded_when_the_address_accepts_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert await look(address, ClientSecurity()) is None


async def test_command_says_one_line_when_the_ca_is_wrong(servers: Servers, tmp_path: Path) -> None:
    tls = ("--tls-ca", str(servers.other.ca), "--tls-cert", str(servers.own.client_cert))
    asked = ("status", "--controller", servers.tls, *tls, "--tls-key", str(servers.own.client_key))
    done = await asyncio.to_thread(wavepp, tmp_path, *asked)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "CONTROLLER_UNAVAILABLE" in line
    assert f"the certificate of {servers.tls} is not accepted" in line
    assert "--tls-ca must be of the authority" in line
