"""Many runs on one stream against the real controller: answers, garbage, storms, cancels at every step."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from tests.conformance.test_serving import oracle, prompt
from tests.harness.cluster import Cluster
from tests.harness.eventually import eventually
from wavepp import errors
from wavepp_proto import convert, limits
from wavepp_proto.runtime.channels import open_channel
from wavepp_proto.terms import PrefillRequest, RequestId
from wavepp_proto.v1 import prefill_pb2 as pb

SLOW = "emulated:layers=8,vocabulary=1000,window=65536,token_us=50"


def part(number: int, tokens: list[int], name: str = "") -> bytes:
    packed = np.asarray(tokens, dtype="<i4").tobytes()
    return convert.run_part(number, PrefillRequest(RequestId(name or f"r{number}"), packed, deadline_ms=60_000))


def run(tokens: int, packed: bytes, request_id: str = "x", **more: Any) -> pb.RunRequest:
    header = pb.PrefillHeader(request_id=request_id, prompt_tokens=tokens, **more)
    return pb.RunRequest(header=header, token_ids=packed)


@asynccontextmanager
async def stream(cluster: Cluster) -> AsyncIterator[Any]:
    """One RunMany call that takes bytes as they are."""
    async with open_channel(cluster.controller.address) as channel:
        open_: Any = channel.stream_stream(convert.RUN_MANY_METHOD, response_deserializer=pb.RunManyResponse.FromString)
        call = open_()
        yield call
        call.cancel()


async def answers(call: Any, count: int) -> dict[int, pb.RunAnswer]:
    found: dict[int, pb.RunAnswer] = {}
    while len(found) < count:
        response = await asyncio.wait_for(call.read(), 60)
        assert isinstance(response, pb.RunManyResponse), (await call.code(), len(found))
        found |= {answer.number: answer for answer in response.answers}
    return found


def live(cluster: Cluster) -> int:
    return cluster.controller.machine.live_requests


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(bytes(range(1, 200)), id="noise"),
        pytest.param(b"\x0a\xff\xff\xff\x7f", id="a length that is a lie"),
        pytest.param(part(0, [1]), id="number 0"),
        pytest.param(part(5, [1], "a") + part(5, [1], "b"), id="a number twice"),
        pytest.param(part(9, [1], "a") + part(8, [1], "b"), id="numbers backwards"),
        pytest.param(convert.cancels_part(range(100_000)), id="a hundred thousand cancels"),
        pytest.param(b"".join(part(n, [1]) for n in range(1, 100)), id="too many runs"),
        pytest.param(bytes(limits.MAX_MESSAGE_BYTES + 1), id="a message beyond the limit"),
    ],
)
async def test_stream_ends_typed_and_others_are_served_when_a_stranger_talks_nonsense(garbage: bytes) -> None:
    async with Cluster(stages=2, model=SLOW) as cluster, stream(cluster) as honest, stream(cluster) as stranger:
        await honest.write(part(1, prompt(300, 1), "honest"))
        await stranger.initial_metadata()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stranger.write(garbage)
            while await asyncio.wait_for(stranger.read(), 60) is not grpc.aio.EOF:
                continue
        assert await stranger.code() is not grpc.StatusCode.OK
        answer = (await answers(honest, 1))[1]
        assert answer.response.finished.first_token == oracle(prompt(300, 1))
        assert (await cluster.client.prefill(prompt(20))).first_token == oracle(prompt(20))
        await eventually(lambda: not live(cluster))


async def test_run_is_refused_alone_when_it_breaks_a_rule_of_its_own() -> None:
    one = bytes(4)
    bad = {
        1: (pb.RunRequest(), "INVALID_REQUEST"),
        2: (run(2, one), "INVALID_REQUEST"),
        3: (run(0, b""), "EMPTY_PROMPT"),
        4: (run(1, one, request_id="i" * 129), "INVALID_REQUEST"),
        5: (run(1, b"\xff\xff\xff\x7f"), "TOKEN_OUT_OF_RANGE"),
        6: (run(20_000, bytes(80_000)), "MESSAGE_TOO_LARGE"),
        7: (run(1, one, pipeline="no"), "UNKNOWN_PIPELINE"),
    }
    async with Cluster(stages=2, model=SLOW) as cluster, stream(cluster) as call:
        message = pb.RunManyRequest(runs=[pb.NumberedRun(number=n, run=asked) for n, (asked, _) in bad.items()])
        await call.write(message.SerializeToString() + part(8, prompt(50), "good") + part(9, prompt(50), "good"))
        found = await answers(call, 9)
        assert {number: answer.refused.reason for number, answer in found.items()} == {
            **{number: reason for number, (_, reason) in bad.items()},
            8: "",
            9: "DUPLICATE_REQUEST",
        }
        assert found[8].response.finished.first_token == oracle(prompt(50))
        assert cluster.controller.machine.status().counters["rejected"] == 8


async def test_everything_is_answered_once_when_ten_thousand_runs_come_on_one_stream() -> None:
    """They come without waiting for answers: what is not accepted is refused typed, nothing is lost or said twice."""
    total, step = 10_000, limits.MAX_MESSAGE_RUNS
    tokens = prompt(20)
    async with Cluster(stages=1) as cluster, stream(cluster) as call:

        async def write() -> None:
            for first in range(1, total + 1, step):
                last = min(first + step, total + 1)
                await call.write(b"".join(part(number, tokens) for number in range(first, last)))
            await call.done_writing()

        writing = asyncio.create_task(write())
        kinds: Counter[str] = Counter()
        seen: set[int] = set()
        async for response in call:
            for answer in response.answers:
                assert answer.number not in seen
                seen.add(answer.number)
                kinds[answer.refused.reason or str(answer.response.finished.first_token)] += 1
        await writing
        assert len(seen) == total
        assert set(kinds) <= {str(oracle(tokens)), errors.QueueFull.reason}
        assert kinds[str(oracle(tokens))] >= 1000
        assert await call.code() is grpc.StatusCode.OK


async def test_memory_of_answers_is_bounded_when_nobody_reads_them() -> None:
    async with Cluster(stages=2) as cluster, stream(cluster) as call:

        async def write() -> None:
            for first in range(1, 400_000, limits.MAX_MESSAGE_RUNS):
                numbers = range(first, first + limits.MAX_MESSAGE_RUNS)
                runs = [pb.NumberedRun(number=number, run=pb.RunRequest()) for number in numbers]
                await call.write(pb.RunManyRequest(runs=runs).SerializeToString())

        await call.initial_metadata()
        writing = asyncio.create_task(write())
        (held,) = cluster.controller._prefill._streams
        await eventually(lambda: len(held._answers) >= limits.MAX_STREAM_RUNS)
        assert len(held._answers) < limits.MAX_STREAM_RUNS + limits.MAX_MESSAGE_RUNS
        writing.cancel()
        await asyncio.wait([writing])
        assert (await cluster.client.prefill(prompt(20))).first_token == oracle(prompt(20))


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_held_when_runs_are_cancelled_at_every_step(seed: int) -> None:
    rng = random.Random(seed)
    async with Cluster(stages=3, model=SLOW, pool_blocks=(120, 60, 90)) as cluster:

        async def one(index: int) -> str:
            tokens = prompt(rng.randrange(1, 500), index)
            run = asyncio.create_task(cluster.client.prefill(tokens, request_id=f"r{index}"))
            # Turns of the event loop, not time: from before it is sent to after it has ended.
            for _ in range(rng.choice([0, 1, 2, 5, 20, 100, 400, 2000])):
                if run.done():
                    break
                await asyncio.sleep(0)
            run.cancel()
            await asyncio.wait([run])
            if run.cancelled():
                return "cancelled"
            assert run.result().first_token == oracle(tokens)
            return "finished"

        ended = await asyncio.gather(*(one(index) for index in range(40)))
        assert set(ended) <= {"cancelled", "finished"}
        await eventually(lambda: not live(cluster))
        tokens = prompt(100, 99)
        assert (await cluster.client.prefill(tokens)).first_token == oracle(tokens)


async def test_everything_live_is_cancelled_when_the_client_vanishes() -> None:
    async with Cluster(stages=2, model=SLOW) as cluster:
        async with stream(cluster) as call:
            await call.write(b"".join(part(number, prompt(400, number)) for number in range(1, 31)))
            await eventually(lambda: live(cluster) == 30)
        await eventually(lambda: not live(cluster))
        counters = cluster.controller.machine.status().counters
        assert counters["cancelled"] > 0


async def test_deadline_ends_one_run_when_others_on_its_stream_go_on() -> None:
    async with Cluster(stages=2, model=SLOW) as cluster:
        long = asyncio.create_task(cluster.client.prefill(prompt(3000, 1)))
        await eventually(lambda: live(cluster) == 1)
        with pytest.raises((errors.DeadlineExpired, errors.TooLate)):
            await cluster.client.prefill(prompt(3000, 2), deadline=0.02)
        assert (await long).first_token == oracle(prompt(3000, 1))


async def test_controller_stops_at_once_when_only_idle_streams_are_open() -> None:
    async with Cluster(stages=2) as cluster:
        await cluster.client.prefill(prompt(20))
        assert cluster.client._wire is not None
        idle = cluster.client._wire._runs._stream
        assert idle is not None
        await cluster.controller.close()
        await eventually(lambda: idle.ended)
        with pytest.raises(errors.ControllerUnavailable):
            await cluster.client.prefill(prompt(20), deadline=0.2)
