"""What bare gRPC carries from four senders to one reader: the anchor of the digest ingest figure.

Each sender is a process of its own with one server-streaming call of raw bytes (no protobuf), always the
same message; the reader is this process and only counts. Used by `ingest.py`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio

from wavepp_proto.runtime.channels import bind_server, new_server, open_channel

METHOD = "/bench.Flood/Stream"
MODULE = "tests.bench.digest_floor"


class _Flood(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        async def flood(message: bytes, context: Any) -> AsyncIterator[bytes]:
            while True:
                yield message

        return grpc.unary_stream_rpc_method_handler(flood)


async def _serve() -> None:
    server = new_server()
    server.add_generic_rpc_handlers((_Flood(),))
    sys.stdout.write(f"{bind_server(server, '127.0.0.1:0')}\n")
    sys.stdout.flush()
    await server.start()
    await server.wait_for_termination()


@asynccontextmanager
async def _sender() -> AsyncIterator[int]:
    """The port of one sender process."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", MODULE, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield int(await process.stdout.readline())
    finally:
        process.terminate()
        await process.wait()


async def messages_per_s(senders: int, message_bytes: int, seconds: float) -> float:
    """Messages of all senders together that the reader takes in a second."""
    counts = [0] * senders

    async def read(call: Any, at: int) -> None:
        async for _ in call:
            counts[at] += 1

    async with AsyncExitStack() as stack:
        ports = await asyncio.gather(*(stack.enter_async_context(_sender()) for _ in range(senders)))
        channels = [await stack.enter_async_context(open_channel(f"127.0.0.1:{port}")) for port in ports]
        calls: list[Any] = [channel.unary_stream(METHOD)(bytes(message_bytes)) for channel in channels]  # type: ignore[arg-type]
        readers = [asyncio.create_task(read(call, at)) for at, call in enumerate(calls)]
        await asyncio.sleep(seconds / 5)
        before, began = sum(counts), time.perf_counter()
        await asyncio.sleep(seconds)
        rate = (sum(counts) - before) / (time.perf_counter() - began)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return rate


if __name__ == "__main__":
    asyncio.run(_serve())
