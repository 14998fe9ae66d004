"""Ranks of the TensorRT-LLM stand-in as real processes over one torch.distributed group.

Owns the script that each of them runs (`python -m tests.harness.fake_ranks`) and how they are started:
all load together, prefill one prompt, and at the end rank 0 loads again alone. Each prints what it saw.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [3 + (7 * position) % 500 for position in range(70)]
CHUNKS = [32, 32, 6]


def run_ranks(folder: Path, port: int, *, tp: int, partition: list[int], blocks: list[int]) -> list[dict[str, Any]]:
    """What every rank saw, in order; `blocks` is each one's own pool. Raises CalledProcessError with its output."""
    settings = {"TLLM_DISABLE_MPI": "1", "OMP_NUM_THREADS": "1", "FAKE_TRTLLM_TIMEOUT_S": "30"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.harness.fake_ranks", str(rank), str(tp), json.dumps(partition), str(port),
             str(folder)],
            cwd=ROOT, env={**os.environ, **settings, "FAKE_TRTLLM_POOL_BLOCKS": str(own)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank, own in enumerate(blocks)
    ]  # fmt: skip
    seen: list[dict[str, Any]] = []
    try:
        # Rank 0 last: the others' store lives in its process, which ends once its input does.
        for process in reversed(processes):
            out, err = process.communicate(timeout=120)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args, out, err)
            seen.insert(0, json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return seen


def _main(rank: int, tp: int, partition: list[int], port: int, folder: Path) -> dict[str, Any]:
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore  # where torch keeps its type

    from tests.fake_trtllm.tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
    from tests.fake_trtllm.tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor
    from tests.harness.fake_executor import Rank, make_args

    ranks = tp * len(partition)
    store = TCPStore("127.0.0.1", port, ranks, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    PyExecutor.start_worker = lambda self: None  # type: ignore[method-assign]
    args = make_args(folder)
    args.tensor_parallel_size, args.pipeline_parallel_size, args.pp_partition = tp, len(partition), partition
    own = Rank(create_py_executor(args, checkpoint_dir=str(folder)))
    manager = own.manager
    logits = own.prefill(PROMPT, CHUNKS)
    manager.flush_iteration_events()
    seen = {
        "layers": manager.pp_layers,
        "blocks": manager.get_kv_cache_stats().max_num_blocks,
        "bytes_per_token": manager.get_cache_bytes_per_token(),
        "events": len(manager.get_latest_events(0)),
        "logits": logits.tolist() if manager.mapping.is_last_pp_rank() else None,
        "alone": "",
    }
    own.close()
    if rank:
        store.wait(["rank 0 is done"], timedelta(seconds=60))
        return seen
    os.environ["FAKE_TRTLLM_TIMEOUT_S"] = "1"
    try:
        create_py_executor(args, checkpoint_dir=str(folder))
    except RuntimeError as error:
        seen["alone"] = str(error)
    store.set("rank 0 is done", "yes")
    return seen


if __name__ == "__main__":
    print(json.dumps(_main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4]),
                           Path(sys.argv[5]))), flush=True)  # fmt: skip
    if sys.argv[1] == "0":
        sys.stdin.read()
    # A group whose collective failed cannot be taken down in order.
    os._exit(0)
