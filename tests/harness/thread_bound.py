"""A cache that is asked on its executor's thread alone, as an engine's own manager must be.

Owns the list of what may touch such a manager: the methods from `lease` to `release` and `executor_stopped`
(core/cache_manager.py). Clusters of `--engine engine-thread` use it, so every conformance test checks the rule.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from wavepp_stage.core import machine
from wavepp_stage.core.block_cache import BlockCache

BOUND: Final = (
    "lease", "escrow", "commit", "revise", "materialise", "table", "plan_state", "publish", "discard", "release",
    "executor_stopped",
)  # fmt: skip


def _bound(name: str) -> Any:
    method = getattr(BlockCache, name)

    @functools.wraps(method)
    def guarded(self: BlockCache, *args: Any, **given: Any) -> Any:
        thread = threading.current_thread().name
        assert thread.startswith("executor-"), f"{name} came on thread {thread}"
        return method(self, *args, **given)

    return guarded


ThreadBoundCache: Final = type("ThreadBoundCache", (BlockCache,), {name: _bound(name) for name in BOUND})


@contextmanager
def thread_bound() -> Iterator[None]:
    """Daemons that join meanwhile make their caches of this kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "BlockCache", ThreadBoundCache)
        yield
