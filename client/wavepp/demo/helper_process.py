"""Runs one module of the demo as a process of its own and hears its progress.

Owns that the child dies with us, with a cancelled task and with its time limit, and that its complaint
reaches the person. Called for the two parts that need torch: the conversion and the unsplit model.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from wavepp_proto.errors import EngineFault
from wavepp_proto.runtime.child import child_argv, module_argv

LOG_TAIL_CHARS = 1500


async def run_module(
    module: str, arguments: Sequence[str], log: Path, say: Callable[[str], None], timeout_s: float
) -> None:
    """`python -m module arguments`; `say` gets every line of its output, `log` its errors.

    Raises EngineFault with the end of the log if it fails or takes longer than `timeout_s`."""
    argv = child_argv(module_argv(module, arguments))
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            # Ctrl-C in a terminal goes to us alone
            start_new_session=True,
            # A thread that spins while it waits for the others doubles the time on a machine that is shared.
            env={"OMP_WAIT_POLICY": "passive", **os.environ},
        )
    try:
        async with asyncio.timeout(timeout_s):
            await _hear(process, say)
            status = await process.wait()
    except TimeoutError:
        raise EngineFault(f"{module} took longer than {timeout_s:g} s", field="timeout_s", limit=timeout_s) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if status:
        raise EngineFault(f"{module} ended with status {status}: {_tail(log)}", value=status)


async def _hear(process: asyncio.subprocess.Process, say: Callable[[str], None]) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        say(line.decode(errors="replace").rstrip())


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:].strip()
