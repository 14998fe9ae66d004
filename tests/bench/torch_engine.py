"""Speed of the torch engine: two stages of one thread each against one plain transformers process of two.

Both compute the same random Llama's first tokens of the same prompts with the same chunk size, in
turns within one run, so that a noisy machine disturbs both alike. Prints one JSON object: tokens per
second of each, their ratio, and where the stages' time goes. No control plane: waves are packed here,
first come first served, with the product's ring of 2 P waves.

    python -m tests.bench.torch_engine [--only-check] [--rounds 3] [--dtype float32] [--concurrency 4 16]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaConfig

from tests.bench.torch_workers import Split, run_plain, run_stage
from tests.harness.tiny_models import save_random
from tests.harness.torch_pipeline import Chunk, Pipeline
from wavepp_proto.terms import Attempt, HoldKey, RequestId, Sampling, WaveOrdinal
from wavepp_stage.engine.base import EnginePlan, RowWork
from wavepp_stage.engine.torch.finiteness import Finiteness

VOCABULARY, LAYERS = 8192, 8
PROMPT, CHUNK, B = 2048, 512, 16
SHARED = PROMPT * 9 // 10 // B * B
"""Tokens of the reused prefix: 90 % of the prompt, down to a block boundary."""
STAGES = 2
RING = 2 * STAGES
POOL = 18 * PROMPT // B
NO_HASHES = np.zeros(0, np.uint64)


def bench_model(root: Path) -> Path:
    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=512, intermediate_size=1536, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=PROMPT,
    )  # fmt: skip
    return save_random(config, root / "llama-8x512")


@dataclass
class Prompt:
    token_ids: list[int]
    shared: list[int] = field(default_factory=list)
    """Blocks of the reused prefix."""
    own: list[int] = field(default_factory=list)
    planned: int = 0
    """Tokens reused or already in a wave."""
    first_token: int | None = None


class Stages:
    """The driver's end of the stage processes: packs waves, keeps the ring full, collects first tokens."""

    def __init__(self, model: Path, dtype: str, *, profile: bool = False) -> None:
        self._free = list(range(POOL))[::-1]
        self._ordinal = 0
        self.splits: list[list[Split]] = [[] for _ in range(STAGES)]
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        for stage in range(STAGES):
            band = (LAYERS * stage // STAGES, LAYERS * (stage + 1) // STAGES)
            plan = EnginePlan(str(model), stage, STAGES, *band, B, POOL, CHUNK, 128)
            self._connections.append(start(self._processes, run_stage, plan, dtype, profile))
        addresses = [connection.recv() for connection in self._connections]
        for connection in self._connections:
            connection.send(addresses[0])

    def prefill(self, prompts: list[Prompt], concurrency: int) -> None:
        """All prompts, at most `concurrency` unfinished at a time, RING waves in flight."""
        waiting, active = deque(prompts), deque[Prompt]()
        flying: dict[int, list[Prompt]] = {}
        while any(prompt.first_token is None for prompt in prompts):
            started = len(prompts) - len(waiting)
            finished = sum(prompt.first_token is not None for prompt in prompts)
            for _ in range(min(concurrency - (started - finished), len(waiting))):
                prompt = waiting.popleft()
                blocks = -(-len(prompt.token_ids) // B) - len(prompt.shared)
                prompt.own = [self._free.pop() for _ in range(blocks)]
                prompt.planned = len(prompt.shared) * B
                active.append(prompt)
            while active and len(flying) < RING:
                self._launch(active, flying)
            self._collect(flying)

    def _launch(self, active: deque[Prompt], flying: dict[int, list[Prompt]]) -> None:
        """One wave of up to CHUNK tokens, first come first served."""
        room, chunks = CHUNK, []
        while active and room:
            prompt = active[0]
            length = min(room, len(prompt.token_ids) - prompt.planned)
            chunks.append((prompt, prompt.planned, length))
            prompt.planned += length
            room -= length
            if prompt.planned == len(prompt.token_ids):
                active.popleft()
        for stage, connection in enumerate(self._connections):
            connection.send((WaveOrdinal(self._ordinal), tuple(_row(stage, *chunk) for chunk in chunks)))
        flying[self._ordinal] = [prompt for prompt, _, _ in chunks]
        self._ordinal += 1

    def _collect(self, flying: dict[int, list[Prompt]]) -> None:
        for ready in wait(self._connections):
            stage = self._connections.index(ready)  # type: ignore[arg-type]
            ordinal, tokens, split = self._connections[stage].recv()
            self.splits[stage].append(split)
            if stage == STAGES - 1:
                rows = flying.pop(ordinal)
                for row, token in tokens.items():
                    rows[row].first_token = token

    def give_back(self, prompts: list[Prompt]) -> None:
        for prompt in prompts:
            self._free.extend(prompt.own)

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.send(None)
            process.join()


def _row(stage: int, prompt: Prompt, first: int, length: int) -> RowWork:
    end = first + length
    return RowWork(
        key=HoldKey(RequestId("bench"), Attempt(0)),
        start=first,
        length=length,
        blocks=np.array((prompt.shared + prompt.own)[: -(-end // B)], np.int32),
        prefix_hashes=NO_HASHES,
        token_ids=np.array(prompt.token_ids[first:end], np.int32) if stage == 0 else None,
        sampling=Sampling() if stage == STAGES - 1 and end == len(prompt.token_ids) else None,
    )


def start(processes: list[Any], target: Any, *arguments: Any) -> Connection:
    """A process running target(connection, *arguments), in a fresh interpreter."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    processes.append(process)
    return ours


@dataclass(frozen=True)
class Case:
    shared: bool
    concurrency: int

    @property
    def prompts(self) -> int:
        """Several times the concurrency: filling and draining the pipeline happens once per closed loop."""
        return max(16, 2 * self.concurrency) if self.shared else max(8, self.concurrency)

    @property
    def computed(self) -> int:
        return self.prompts * (PROMPT - SHARED if self.shared else PROMPT)


def run_case(case: Case, stages: Stages, plain: Connection, rounds: int, exact: bool) -> dict[str, Any]:
    """Medians over rounds of (stages, plain) in turns; in float32 the first tokens must agree."""
    same = 0
    times: dict[str, list[float]] = {"stages": [], "plain": []}
    rng = np.random.default_rng(case.concurrency)
    for _ in range(rounds):
        prefix = rng.integers(0, VOCABULARY, SHARED).tolist() if case.shared else []
        suffixes = [rng.integers(0, VOCABULARY, PROMPT - len(prefix)).tolist() for _ in range(case.prompts)]
        plain.send((prefix, suffixes))
        seconds, expected = plain.recv()
        times["plain"].append(seconds)
        seconds, found = time_stages(case, stages, prefix, suffixes)
        times["stages"].append(seconds)
        same += sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
    assert same == rounds * case.prompts or not exact, "the pipeline and the plain model disagree on a first token"
    rates = {name: [case.computed / seconds for seconds in spent] for name, spent in times.items()}
    ratios = [ours / theirs for ours, theirs in zip(rates["stages"], rates["plain"], strict=True)]
    return {
        "case": "90% shared" if case.shared else "cold",
        "concurrency": case.concurrency,
        "prompts": case.prompts,
        "equal_first_tokens": f"{same}/{rounds * case.prompts}",
        "stages_tokens_per_s": round(statistics.median(rates["stages"])),
        "plain_tokens_per_s": round(statistics.median(rates["plain"])),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_of_each_round": [round(ratio, 3) for ratio in ratios],
    }


def time_stages(
    case: Case, stages: Stages, prefix: list[int], suffixes: list[list[int]]
) -> tuple[float, list[int | None]]:
    donor = Prompt([*prefix, 0])
    if prefix:
        stages.prefill([donor], 1)
    shared = donor.own[: len(prefix) // B]
    prompts = [Prompt(prefix + suffix, shared) for suffix in suffixes]
    for splits in stages.splits:
        splits.clear()
    began = time.perf_counter()
    stages.prefill(prompts, case.concurrency)
    seconds = time.perf_counter() - began
    stages.give_back([*prompts, donor])
    return seconds, [prompt.first_token for prompt in prompts]


def breakdown(case: Case, stages: Stages) -> dict[str, Any]:
    """Shares of the wall time per stage, from one profiled round."""
    rng = np.random.default_rng(1)
    prefix = rng.integers(0, VOCABULARY, SHARED).tolist() if case.shared else []
    suffixes = [rng.integers(0, VOCABULARY, PROMPT - len(prefix)).tolist() for _ in range(case.prompts)]
    wall, _ = time_stages(case, stages, prefix, suffixes)
    shares = []
    for splits in stages.splits:
        total = {name: sum(getattr(split, name) for split in splits) for name in Split.__dataclass_fields__}
        total["linear_and_rest_of_run"] = total["run"] - total["write"] - total["read"] - total["attend"]
        total["outside_run_and_wait"] = wall - total["run"] - total["wait"]
        shares.append({name: round(seconds / wall, 3) for name, seconds in total.items()})
    return {"case": "90% shared" if case.shared else "cold", "concurrency": case.concurrency, "stages": shares}


def cost_of_check(model: Path, dtype: str, waves: int = 30) -> dict[str, Any]:
    """What looking for NaN and infinity costs a wave of CHUNK new tokens behind PROMPT - CHUNK others: one stage that
    has the whole model, one thread, with and without the check in turns; medians of CPU time, which other work on the
    machine disturbs least."""
    pipeline = Pipeline(model, (0, LAYERS), block_tokens=B, pool_blocks=POOL, wave_tokens=CHUNK, dtype=dtype)
    sequence = pipeline.sequence("bench", np.random.default_rng(1).integers(0, VOCABULARY, PROMPT).tolist())
    while sequence.rest > CHUNK:
        pipeline.run(Chunk(sequence, CHUNK))
    wave = pipeline.work(0, [Chunk(sequence, CHUNK)])
    spent: dict[str, list[float]] = {"with": [], "without": []}
    note, doubtful = Finiteness.note, Finiteness.doubtful
    for number in range(2 * waves + 4):
        which = ("with", "without")[number % 2]
        unchecked: Any = Finiteness
        unchecked.note = note if which == "with" else lambda check, *tensors: None
        unchecked.doubtful = doubtful if which == "with" else lambda check: False
        began = time.thread_time()
        pipeline.engines[0].run(wave, None)
        if number >= 4:  # the first ones warm up
            spent[which].append(time.thread_time() - began)
    unchecked.note, unchecked.doubtful = note, doubtful
    medians = {name: statistics.median(seconds) for name, seconds in spent.items()}
    share = statistics.median(ours / theirs - 1 for ours, theirs in zip(*spent.values(), strict=True))
    return {"waves": waves, "wave_ms": round(medians["with"] * 1e3, 2),
            "wave_without_check_ms": round(medians["without"] * 1e3, 2), "check_share": round(share, 4)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--only-check", action="store_true", help="measure the check for NaN alone")
    arguments = parser.parse_args()
    cases = [Case(shared, concurrency) for shared in (False, True) for concurrency in arguments.concurrency]
    exact = arguments.dtype == "float32"
    processes: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        model = bench_model(Path(folder))
        check = cost_of_check(model, arguments.dtype)
        if arguments.only_check:
            print(json.dumps({"dtype": arguments.dtype, "finiteness": check}, indent=2, allow_nan=False))
            return
        plain = start(processes, run_plain, model, arguments.dtype, CHUNK, STAGES)
        plain.recv()
        stages = Stages(model, arguments.dtype)
        run_case(Case(True, 4), stages, plain, 1, exact)  # warm-up
        results = [run_case(case, stages, plain, arguments.rounds, exact) for case in cases]
        stages.close()
        plain.send(None)
        profiled = Stages(model, arguments.dtype, profile=True)
        shares = [breakdown(case, profiled) for case in cases]
        profiled.close()
    report = {"dtype": arguments.dtype, "stages": STAGES, "chunk": CHUNK, "prompt": PROMPT, "reused": SHARED,
              "results": results, "shares_of_wall": shares, "finiteness": check}  # fmt: skip
    print(json.dumps(report, indent=2, allow_nan=False))


if __name__ == "__main__":
    main()
