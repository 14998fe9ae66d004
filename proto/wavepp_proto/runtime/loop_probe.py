"""How late an event loop runs, sampled ten times a second.

Owns the sampling; what becomes of a sample is its caller's. Called by the controller (metrics) and the
stage daemon (metrics and heartbeat). A sample costs one timer: a loop that is never late pays nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

PERIOD_S: Final = 0.1


async def probe_loop(note: Callable[[float], None]) -> None:
    """Tell `note` by how many seconds the loop missed each sample, until cancelled."""
    while True:
        due = time.monotonic() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        note(max(0.0, time.monotonic() - due))
