"""The environment variables that steer the stand-in, each read when it matters.

Owns their names, defaults and counters. Faults count calls over the life of the process, so that a
fault met once does not meet the reloaded engine again.
"""

from __future__ import annotations

import os
import time

import torch.distributed as dist

_counts: dict[str, int] = {}


def _setting(name: str) -> str:
    """What this rank's variable says, or every rank's."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    everywhere = os.environ.get(f"FAKE_TRTLLM_{name}", "")
    return os.environ.get(f"FAKE_TRTLLM_{name}_RANK_{rank}", everywhere)


def is_rc26() -> bool:
    """The older of the two versions; which modules exist is settled at import."""
    vintage = os.environ.get("FAKE_TRTLLM_VINTAGE", "newer")
    if vintage not in ("rc26", "newer"):
        raise ValueError(f"FAKE_TRTLLM_VINTAGE={vintage}: rc26 or newer")
    return vintage == "rc26"


def number(name: str) -> int | None:
    value = _setting(name)
    return int(value) if value else None


def timeout_s() -> float:
    """How long a receive or a collective waits before it fails instead of hanging."""
    return float(os.environ.get("FAKE_TRTLLM_TIMEOUT_S", "60"))


def reset_counts() -> None:
    _counts.clear()


def strikes(name: str) -> bool:
    """Whether this call of `name` is one that shall fail: FAKE_TRTLLM_<name> is `all`, or numbers of calls from 1."""
    wanted = _setting(name)
    _counts[name] = _counts.get(name, 0) + 1
    return wanted == "all" or str(_counts[name]) in wanted.split(",")


def slow_down() -> None:
    """FAKE_TRTLLM_FORWARD_MS: a forward takes this much longer."""
    if delay := number("FORWARD_MS"):
        time.sleep(delay / 1000)
