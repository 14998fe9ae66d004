"""Tasks that are ended: waited for, within bounds, and whatever they raise."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import pytest

from wavepp_proto import limits
from wavepp_proto.runtime.closers import end_tasks


async def test_cancelled_tasks_are_waited_for_whatever_they_raise() -> None:
    ended: list[str] = []

    async def work(name: str, fails: bool) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)
            if fails:
                raise ValueError(name)

    tasks = [asyncio.create_task(work(name, fails)) for name, fails in (("a", False), ("b", True))]
    await asyncio.sleep(0)
    await end_tasks(*tasks)
    assert sorted(ended) == ["a", "b"]
    await end_tasks()


async def test_task_that_does_not_end_is_left_behind_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "CLOSE_S", 0.01)
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    task = asyncio.create_task(stubborn(), name="stubborn")
    await asyncio.sleep(0)
    with caplog.at_level(logging.ERROR):
        await end_tasks(task)
    assert [record.message for record in caplog.records] == ["tasks did not end when they were cancelled"]
    release.set()
    await task
