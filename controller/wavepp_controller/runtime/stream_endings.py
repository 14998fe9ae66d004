"""What the end of a stream to a stage daemon means: is there anything to resume?

Owns that judgement, from typed errors and the operating system's answer to a connection attempt; never
from the text of another program's message. Called by `daemon_link`.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Final

import grpc.aio

from wavepp_proto import convert
from wavepp_proto.errors import Cancelled, FormationEnded, StageLost, StaleMessage, WaveppError
from wavepp_proto.runtime.channels import parse_address
from wavepp_proto.terms import DaemonKey, ErrorInfo

PROBE_S: Final = 1.0
"""Longest wait for the answer to a connection attempt."""


@dataclass(frozen=True, slots=True)
class StreamEnding:
    error: ErrorInfo
    resumable: bool
    """The daemon may be alive, in the same formation, under the same incarnation."""


def judge(key: DaemonKey, cause: grpc.aio.AioRpcError | WaveppError | None) -> StreamEnding:
    """The meaning of a stream's end; `cause` None says that the daemon closed it in order."""
    if cause is None:
        error: WaveppError = FormationEnded(f"{key.place} closed a stream", stage=key.stage, rank=key.rank)
        return StreamEnding(error.info(), resumable=False)
    if isinstance(cause, grpc.aio.AioRpcError):
        error = convert.error_from_rpc(cause, StageLost)
        if isinstance(error, StageLost | Cancelled):
            # gRPC's own words, no daemon's: the connection broke, or a server that stops dropped the call.
            lost = StageLost(f"{key.place} is unreachable: {error.message}", stage=key.stage, rank=key.rank)
            return StreamEnding(lost.info(), resumable=True)
    else:
        error = cause
    missed = isinstance(error, StaleMessage) and error.fields.get("field") == "ordinal"
    return StreamEnding(error.info(), resumable=missed)


async def is_refused(address: str) -> bool:
    """Whether nobody listens at `address` (host:port): that process is gone. False when it cannot be told."""
    target = parse_address(address)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(PROBE_S):
            found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            return all([await _refuses(family, place) for family, _, _, _, place in found])
    except OSError:  # a time-out too: an unreachable host says nothing about the process on it
        return False


async def _refuses(family: int, place: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(tried, place)
        except ConnectionRefusedError:
            return True
    return False
