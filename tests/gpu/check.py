"""The check of a GPU host, behind scripts/gpu-check: a line per item, a JSON file, an exit status.

Status 0: nothing failed; 1: something did; 3: no GPU here, so that nothing was checked. With `--device cpu` the
items that need no GPU run on the CPU: a test of the check itself, which says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch

from tests.gpu import cluster_items, engine_items, link_items
from tests.gpu.items import Check, Host, Verdict, judge

NO_GPU: Final = 3

ITEMS: Final[Mapping[str, Check]] = {
    "device": engine_items.device,
    "one stage, float32": engine_items.float32,
    "one stage, bfloat16": engine_items.bfloat16,
    "two stages on one device": partial(engine_items.split, family="llama", stages=2),
    "four stages on one device": partial(engine_items.split, family="qwen3_moe", stages=4),
    "recurrent layers": partial(engine_items.split, family="qwen3_next", stages=2),
    "host tier": engine_items.host_tier,
    "copies beside waves": engine_items.overlap,
    "compute time": engine_items.wave_time,
    "memory": engine_items.memory,
    "throughput": engine_items.throughput,
    "link through host memory": link_items.through_host_memory,
    "link nccl": link_items.nccl,
    "link nccl on one device": link_items.nccl_on_one_device,
    "cluster": cluster_items.torch_cluster,
    "killed stage": cluster_items.killed_stage,
    "trtllm: names": cluster_items.doctor,
    "trtllm: one stage": cluster_items.trtllm_stage,
    "trtllm: uneven stages": cluster_items.trtllm_uneven,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu to test the check itself")
    parser.add_argument("--json", type=Path, help="write the verdicts and figures here as well")
    parser.add_argument("--only", action="append", help="an item by name; may be repeated")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.only or ()) - ITEMS.keys():
        parser.error(f"no such item: {', '.join(sorted(unknown))}; there are: {', '.join(ITEMS)}")
    if chosen.device != "cpu" and not torch.cuda.is_available():
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "CUDA finds no device"
        print(f"no GPU: {reason} (torch {torch.__version__}); nothing was checked", flush=True)
        _write(chosen.json, {"device": chosen.device, "status": NO_GPU, "reason": reason, "items": []})
        return NO_GPU
    with tempfile.TemporaryDirectory(prefix="wavepp-gpu-check-") as folder:
        host = Host(torch.device(chosen.device), Path(folder))
        verdicts = _run(host, chosen.only or list(ITEMS))
    counts = {kind: sum(one.verdict == kind for one in verdicts) for kind in ("pass", "fail", "skipped")}
    status = 1 if counts["fail"] else 0
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), f"on {chosen.device}", flush=True)
    _write(chosen.json, {
        "device": chosen.device, "torch": torch.__version__, "cuda": torch.version.cuda, "status": status,
        "counts": counts, "figures": host.figures, "items": [one.as_json() for one in verdicts],
    })  # fmt: skip
    return status


def _run(host: Host, names: list[str]) -> list[Verdict]:
    verdicts = []
    began = time.monotonic()
    for name in names:
        verdicts.append(judge(name, ITEMS[name], host))
        one = verdicts[-1]
        print(f"{one.verdict:8}{name:28}{one.seconds:7.1f} s  {one.detail}", flush=True)
    print(f"{time.monotonic() - began:.0f} s in all", flush=True)
    return verdicts


def _write(file: Path | None, document: dict[str, object]) -> None:
    if file is not None:
        file.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
