"""The gRPC link between two stages: what ends it is told with the peer, whoever ended the call."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from wavepp_proto import convert
from wavepp_proto.errors import LinkFault, StaleMessage, WaveppError
from wavepp_proto.runtime.channels import ClientSecurity
from wavepp_proto.terms import Incarnation, LinkKind
from wavepp_stage.engine.base import LinkPlan, Payload, WaveHeader
from wavepp_stage.runtime.grpc_link import GrpcLink, LinkHub

PLAN = LinkPlan(LinkKind.GRPC, 1, 1, 0, 2, "", "host1:1", 7, "host0", 1.0, 1.0)


class Listener:
    def __init__(self) -> None:
        self.lost: list[str | LinkFault] = []

    def on_activation(self, header: WaveHeader, payload: Payload) -> None: ...

    def on_link_lost(self, reason: str | LinkFault) -> None:
        self.lost.append(reason)


def ended(code: grpc.StatusCode, text: str, *trailers: tuple[str, str | bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), text)


def refused(error: WaveppError) -> grpc.aio.AioRpcError:
    code, text, trailers = convert.to_status(error)
    return ended(code, text, *trailers)


async def told(monkeypatch: pytest.MonkeyPatch, error: grpc.aio.AioRpcError) -> str | LinkFault:
    """What the listener hears of a link whose call ends so."""
    listener = Listener()
    hub, loop = LinkHub(Incarnation(1)), asyncio.get_running_loop()
    link = GrpcLink(PLAN, listener, lambda _: b"", lambda *_: b"", hub, ClientSecurity(), loop)

    async def carry() -> None:
        raise error

    monkeypatch.setattr(link, "_carry", carry)
    await link._send_all()
    (reason,) = listener.lost
    return reason


@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
async def test_peer_is_named_when_its_server_ends_the_call_without_a_reason(
    monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode
) -> None:
    """A server that stops says `Cancelling all calls`: that is no controller which cannot be reached."""
    reason = await told(monkeypatch, ended(code, "Cancelling all calls"))
    assert reason == "stage 1 at host1:1 ended the link: Cancelling all calls"  # the listener makes it a LINK_FAULT


async def test_peer_is_named_when_it_refuses_for_another_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = await told(monkeypatch, refused(StaleMessage("formation 1 is over", field="formation")))
    assert reason == "stage 1 at host1:1 ended the link: formation 1 is over"


async def test_refusal_of_a_payload_keeps_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = await told(monkeypatch, refused(LinkFault("wave 2 was expected", stage=1, refused_stage=0)))
    assert isinstance(reason, LinkFault)
    assert reason.fields == {"stage": "1", "refused_stage": "0"}
