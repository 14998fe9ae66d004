"""What a bare gRPC stream fan-out costs on this machine: the anchor of the admission figures.

P echo servers, each a process of its own, one bidirectional stream to each, raw bytes (no protobuf):
write one message to every stream, read one from every stream. Used by `admission.py`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc.aio

from wavepp_proto.runtime.channels import bind_server, new_server, open_channel

METHOD = "/bench.Echo/Stream"


class _Echo(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        async def echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for message in messages:
                yield message

        return grpc.stream_stream_rpc_method_handler(echo)


async def _serve() -> None:
    server = new_server()
    server.add_generic_rpc_handlers((_Echo(),))
    port = bind_server(server, "127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


class FanOut:
    """P echo servers and a stream to each; `async with`, then `turn` or `turns`."""

    def __init__(self, stages: int, message_bytes: int) -> None:
        self._stages = stages
        self._message = bytes(message_bytes)
        self._servers: list[asyncio.subprocess.Process] = []
        self._channels: list[grpc.aio.Channel] = []
        self._calls: list[Any] = []

    async def __aenter__(self) -> Self:
        argv = [sys.executable, "-m", "tests.bench.grpc_floor"]
        for _ in range(self._stages):
            self._servers.append(await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE))
        ports = [int(await server.stdout.readline()) for server in self._servers if server.stdout is not None]
        self._channels = [open_channel(f"127.0.0.1:{port}") for port in ports]
        self._calls = [channel.stream_stream(METHOD)() for channel in self._channels]
        await self.turns(20)
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close(0)
        for server in self._servers:
            server.terminate()
            await server.wait()

    async def turn(self) -> float:
        """Seconds until every server has echoed one message."""
        started = time.perf_counter()
        await asyncio.gather(*(self._echo(call) for call in self._calls))
        return time.perf_counter() - started

    async def turns(self, count: int) -> list[float]:
        """One after another, with nothing in between: caches are warm."""
        return [await self.turn() for _ in range(count)]

    async def _echo(self, call: Any) -> None:
        await call.write(self._message)
        await call.read()


if __name__ == "__main__":
    asyncio.run(_serve())
