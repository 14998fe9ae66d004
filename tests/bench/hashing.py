"""Block hashes of 131,072 tokens against the bare hashlib loop in the same run (DESIGN.md, Bars).

Prints one JSON object: medians and minima in ms of interleaved runs, their ratio and the bar. Run it as
`python -m tests.bench.hashing [--tokens N] [--block-tokens B] [--repeat R]`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import struct
import time
from collections.abc import Callable

from wavepp_proto.hashing import TOKEN_BYTES, HashScope, hash_blocks, hash_slices

BAR = 1.3
SLICE_BLOCKS = 256
"""Blocks per slice as an event loop would take them: about 0.1 ms at B = 64."""
SCOPE = HashScope("model", "layout", "salt", "adapter")


def bare_loop(token_ids: bytes, block_tokens: int) -> list[bytes]:
    """What hashlib itself costs for the same digests: no scope, no joining, no slices."""
    running = hashlib.sha256()
    view = memoryview(token_ids)
    step = block_tokens * TOKEN_BYTES
    digests = []
    for start in range(0, len(view), step):
        running.update(view[start : start + step])
        digests.append(running.copy().digest())
    return digests


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e3


def measure(tokens: int, block_tokens: int, repeat: int) -> dict[str, object]:
    """Interleaved, so that a slow spell of the machine falls on every variant."""
    draw = random.Random(1)
    token_ids = struct.pack(f"<{tokens}i", *(draw.randrange(128_000) for _ in range(tokens)))
    variants: dict[str, Callable[[], object]] = {
        "bare_loop": lambda: bare_loop(token_ids, block_tokens),
        "hash_blocks": lambda: hash_blocks(SCOPE, token_ids, block_tokens),
        "hash_slices": lambda: list(hash_slices(SCOPE, token_ids, block_tokens, SLICE_BLOCKS)),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeat):
        for name, call in variants.items():
            times[name].append(timed(call))
    medians = {name: statistics.median(runs) for name, runs in times.items()}
    ratios = {name: medians[name] / medians["bare_loop"] for name in ("hash_blocks", "hash_slices")}
    return {
        "what": "block hashes",
        "tokens": tokens,
        "block_tokens": block_tokens,
        "repeat": repeat,
        "median_ms": {name: round(value, 4) for name, value in medians.items()},
        "min_ms": {name: round(min(runs), 4) for name, runs in times.items()},
        "ratio_to_bare_loop": {name: round(value, 3) for name, value in ratios.items()},
        "bar_ratio": BAR,
        "met": max(ratios.values()) <= BAR,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=51)
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.tokens, chosen.block_tokens, chosen.repeat), indent=2))


if __name__ == "__main__":
    main()
