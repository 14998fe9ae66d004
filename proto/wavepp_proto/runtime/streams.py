"""Both directions of a long-lived gRPC stream, ended together.

Owns the task that writes. A message iterator handed to a grpc.aio call is consumed by a task that
grpc leaves pending when the call breaks: it is destroyed later with an error in the log, and what it
would have taken from a queue is lost. Used by whoever holds a stream: controller and stage links.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

import grpc.aio

Request = TypeVar("Request")
Response = TypeVar("Response")


async def converse(
    call: grpc.aio.StreamStreamCall[Request, Response], messages: AsyncIterator[Request]
) -> AsyncGenerator[Response, None]:
    """What the peer answers while `messages` are written; raises AioRpcError when the call breaks."""
    writer = asyncio.create_task(write_all(call, messages), name="stream-writer")
    try:
        async for response in call:
            yield response
    finally:
        writer.cancel()
        call.cancel()


async def write_all(call: Any, messages: AsyncIterator[Any]) -> None:
    """Write until `messages` or the call ends; how the call ended is for its reader to say."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async for message in messages:
            await call.write(message)
