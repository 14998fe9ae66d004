"""A gap or a repetition on the link between two stages ends its formation at once; both sides say who refused what."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.test_observability_logs import stream as stream
from tests.harness import tiny_models
from tests.harness.cluster import EMULATED, Cluster
from tests.harness.eventually import eventually
from wavepp import errors
from wavepp_proto.terms import LinkKind
from wavepp_stage.engine.base import Payload, WaveHeader

pytestmark = pytest.mark.engines("emulated", why="it speaks for a stage on its link from inside")
M = 128
FAR_S = 120.0
"""Deadline of the requests, far beyond the test's own."""
Send = Callable[[WaveHeader, Payload], None]


def repeats(send: Send, header: WaveHeader, payload: Payload) -> None:
    send(header, payload)
    send(header, payload)


def skips(send: Send, header: WaveHeader, payload: Payload) -> None:
    if header.ordinal != 1:
        send(header, payload)


def misnumbers(send: Send, header: WaveHeader, payload: Payload) -> None:
    send(replace(header, ordinal=header.ordinal + 6), payload)


def other_rows(send: Send, header: WaveHeader, payload: Payload) -> None:
    send(replace(header, chunks=bytes(16)), payload)


def other_formation(send: Send, header: WaveHeader, payload: Payload) -> None:
    send(replace(header, formation=9), payload)


def spoil_link(cluster: Cluster, spoil: Callable[[Send, WaveHeader, Payload], None]) -> None:
    """What stage 0 sends in the present formation goes through `spoil`."""
    formation = cluster.daemons[0].executor._formation
    assert formation is not None
    link: Any = formation.link
    send = link.send
    link.send = lambda header, payload: spoil(send, header, payload)


CASES = [
    (repeats, "stage 1 refused wave 1 of stage 0: wave 2 was expected"),
    (skips, "stage 1 refused wave 2 of stage 0: wave 1 was expected"),
    (misnumbers, "stage 1 refused wave 7 of stage 0: wave 1 was expected"),
    (other_rows, "stage 1 refused wave 1 of stage 0: chunks "),
    (other_formation, "stage 1 refused wave 1 of stage 0: formation 1, not 9, was expected"),
]


@pytest.mark.parametrize(("spoil", "why"), CASES, ids=[case[0].__name__ for case in CASES])
async def test_requests_fail_at_once_and_both_sides_tell_when_a_grpc_link_breaks_its_order(
    stream: Any, spoil: Callable[[Send, WaveHeader, Payload], None], why: str
) -> None:
    await refuse_and_serve_again(stream, spoil, why, model=EMULATED)


@pytest.mark.parametrize(("spoil", "why"), CASES[1:3], ids=[case[0].__name__ for case in CASES[1:3]])
async def test_requests_fail_at_once_and_both_sides_tell_when_a_gloo_link_breaks_its_order(
    stream: Any, tmp_path: Path, spoil: Callable[[Send, WaveHeader, Payload], None], why: str
) -> None:
    model = str(tiny_models.build("llama", tmp_path))
    await refuse_and_serve_again(stream, spoil, why, engine="torch", model=model, link=LinkKind.GLOO)


async def refuse_and_serve_again(
    stream: Any, spoil: Callable[[Send, WaveHeader, Payload], None], why: str, **cluster_is: Any
) -> None:
    async with Cluster(stages=2, wave_tokens=M, **cluster_is) as cluster:
        spoil_link(cluster, spoil)
        tokens = [1 + number % 400 for number in range(3 * M)]
        with pytest.raises(errors.FormationEnded, match=why):
            await cluster.client.prefill(tokens, deadline=FAR_S)
        await cluster.serving(2)
        assert (await asyncio.wait_for(cluster.client.prefill(tokens), 30)).prompt_tokens == 3 * M

        def told() -> bool:
            """Stage 1 refused it; stage 0 heard of it, by the link itself or as the reason why its formation ended."""
            ended = [line for line in lines_of(stream) if line["event"] == "formation ended" and why in line["cause"]]
            failed = [line for line in lines_of(stream) if line["event"] == "formation failed" and why in line["error"]]
            return len(ended) == 2 and any(line["stage"] == 1 or line["stage"] == "1" for line in failed)

        await eventually(told, about="both daemons to say who refused what")


def lines_of(stream: Any) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if line["log"].startswith("wavepp.stage")]
