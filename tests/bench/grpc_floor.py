"""What a bare gRPC stream fan-out costs on this machine: the anchor of the admission figures.

P echo servers, each a process of its own, one bidirectional stream to each, raw bytes (no protobuf):
write one message to every stream, read one from every stream. Printed as JSON by `admission.py`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

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


async def fan_out(stages: int, message_bytes: int, rounds: int) -> list[float]:
    """Seconds of each of `rounds` fan-outs to `stages` echo servers."""
    argv = [sys.executable, "-m", "tests.bench.grpc_floor"]
    servers = [await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE) for _ in range(stages)]
    try:
        ports = [int(await server.stdout.readline()) for server in servers if server.stdout is not None]
        channels = [open_channel(f"127.0.0.1:{port}") for port in ports]
        calls: list[Any] = [channel.stream_stream(METHOD)() for channel in channels]
        message = bytes(message_bytes)

        async def turn(call: Any) -> None:
            await call.write(message)
            await call.read()

        taken = []
        for index in range(rounds + 20):
            started = time.perf_counter()
            await asyncio.gather(*(turn(call) for call in calls))
            if index >= 20:
                taken.append(time.perf_counter() - started)
        for channel in channels:
            await channel.close(0)
        return taken
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            await server.wait()


if __name__ == "__main__":
    asyncio.run(_serve())
