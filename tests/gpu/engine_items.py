"""Items about the torch engine alone, in this process: exactness, tiers, memory, time."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from tests.gpu.items import Host
from tests.gpu.unsplit import FLOAT32_TOLERANCE, Unsplit, distance, prompt
from tests.harness.tiny_models import layers_of, save_random
from tests.harness.torch_pipeline import Chunk, Pipeline
from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.base import CopyDirection
from wavepp_stage.engine.torch.engine import TorchEngine

B = 16


def pipeline(host: Host, family: str, stages: int, dtype: str = "float32", **more: Any) -> Pipeline:
    layers = layers_of(family)
    bounds = [layers * stage // stages for stage in range(stages + 1)]
    slots = 8 if family == "qwen3_next" else 0
    return Pipeline(host.model(family), bounds, block_tokens=B, pool_blocks=192, wave_tokens=512, state_slots=slots,
                    device=str(host.device), dtype=dtype, **more)  # fmt: skip


def float32(host: Host) -> str:
    """One stage: whole prompts and chunks, over runs and over scattered blocks."""
    worst, plain = 0.0, Unsplit(host.model(), host.device)
    made = pipeline(host, "llama", 1)
    for seed, (tokens, chunk) in enumerate([(1, 512), (300, 512), (517, 130), (129, 1 + 2 * B)]):
        token_ids = prompt(tokens, seed)
        result = made.prefill(made.sequence(str(seed), token_ids), chunk)
        expected = plain.logits(token_ids)
        worst = max(worst, distance(result.logits, expected))
        assert worst <= FLOAT32_TOLERANCE, f"{tokens} tokens in chunks of {chunk}: {worst:.2e}"
        assert result.token_id == int(expected.argmax()), f"first token of prompt {seed}"
    return f"largest difference of a logit {worst:.1e}"


def bfloat16(host: Host) -> str:
    """Judged by what the unsplit model itself loses between float32 and bfloat16."""
    exact, plain = Unsplit(host.model(), host.device), Unsplit(host.model(), host.device, torch.bfloat16)
    made = pipeline(host, "llama", 1, "bfloat16")
    ours = theirs = 0.0
    for seed, tokens in enumerate([40, 300, 500]):
        token_ids = prompt(tokens, seed)
        expected = exact.logits(token_ids)
        ours = max(ours, distance(made.prefill(made.sequence(str(seed), token_ids), 128).logits, expected))
        theirs = max(theirs, distance(plain.logits(token_ids).tobytes(), expected))
    assert ours <= 2 * theirs + 0.05, f"{ours:.3f} from float32, the unsplit model in bfloat16 is {theirs:.3f}"
    return f"{ours:.3f} from float32; the unsplit model in bfloat16 {theirs:.3f}"


def split(host: Host, family: str, stages: int) -> str:
    """Several stages on one device: batches with void rows, a reused prefix (and its snapshot, on a hybrid)."""
    made, plain = pipeline(host, family, stages), Unsplit(host.model(family), host.device)
    shared = prompt(10 * B)
    first, other = made.sequence("first", shared + prompt(45, 1)), made.sequence("other", prompt(200, 2))
    snapshot = made.free_slots.pop() if made.free_slots else None
    keep = () if snapshot is None else ((10 * B, snapshot),)
    results = {"first": made.run(Chunk(first, first.rest, snapshots=keep), Chunk(other, 50, void=True))[0]}
    results["other"] = made.prefill(other, 60)
    again = made.sequence("again", shared + prompt(77, 3), reuse=first, reused_blocks=10, restore=snapshot)
    results["again"] = made.prefill(again)
    worst = max(distance(results[one.name].logits, plain.logits(one.token_ids)) for one in (first, other, again))
    assert worst <= FLOAT32_TOLERANCE, f"largest difference of a logit {worst:.2e}"
    return f"{family}, {stages} stages, reuse of {10 * B} tokens: largest difference {worst:.1e}"


def host_tier(host: Host) -> str:
    """A prefix leaves and comes back elsewhere while other blocks move on the copy thread and waves run."""
    made, plain = pipeline(host, "llama", 2, host_pool_blocks=128), Unsplit(host.model(), host.device)
    shared = prompt(12 * B, 9)
    donor = made.sequence("donor", [*shared, 5])
    made.prefill(donor)
    moving = [made.free.pop() for _ in range(40)]
    for engine in made.engines:
        for pool in engine.cache.pools:
            pool[moving] = torch.randn_like(pool[moving])
    before = [[pool[moving].clone() for pool in engine.cache.pools] for engine in made.engines]
    ended, rounds, errors = threading.Event(), 0, []

    def press() -> None:
        nonlocal rounds
        try:
            while not ended.is_set():
                made.copy(CopyDirection.OFFLOAD, moving, list(range(80, 120)))
                made.copy(CopyDirection.ONBOARD, moving, list(range(80, 120)))
                rounds += 1
        except Exception as error:  # told by the item
            errors.append(error)

    worst, mover = 0.0, threading.Thread(target=press)
    mover.start()
    try:
        for seed in range(6):
            free = list(made.free)
            one = made.sequence(str(seed), prompt(300, seed))
            worst = max(worst, distance(made.prefill(one, 64).logits, plain.logits(one.token_ids)))
            made.free = free
    finally:
        ended.set()
        mover.join()
    assert not errors, errors
    for engine, pools in zip(made.engines, before, strict=True):
        assert all(torch.equal(now[moving], then) for now, then in zip(engine.cache.pools, pools, strict=True))
    hosts = [3, 4, 5, 20, 19, 18, 40, 41, 60, 0, 1, 2]
    made.copy(CopyDirection.OFFLOAD, donor.blocks[:12], hosts)
    for engine in made.engines:
        for pool in engine.cache.pools:
            pool[donor.blocks[:12]] = torch.nan
    donor.blocks[:12] = places = [made.free.pop() for _ in hosts]
    made.copy(CopyDirection.ONBOARD, places, hosts)
    token_ids = shared + prompt(60, 4)
    result = made.prefill(made.sequence("again", token_ids, reuse=donor, reused_blocks=12))
    worst = max(worst, distance(result.logits, plain.logits(token_ids)))
    assert worst <= FLOAT32_TOLERANCE, f"largest difference of a logit {worst:.2e}"
    assert rounds, "no copy ended beside the waves"
    pinned = "pinned, " if host.cuda else ""
    return f"{pinned}{rounds} round trips of {len(moving)} blocks beside waves, bit for bit; answers within {worst:.1e}"


def bigger(host: Host, **more: Any) -> Pipeline:
    """One stage of a model that gives a GPU something to do; on a CPU of one that does not keep it long."""
    hidden, layers, tokens = (2048, 8, 4096) if host.cuda else (128, 2, 256)
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, intermediate_size=3 * hidden, num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256), vocab_size=2048, max_position_embeddings=4 * tokens,
    )  # fmt: skip
    folder = save_random(config, host.folder / f"llama-{layers}x{hidden}")
    return Pipeline(folder, (0, layers), block_tokens=64, pool_blocks=8 * tokens // 64, wave_tokens=tokens,
                    device=str(host.device), dtype="bfloat16" if host.cuda else "float32", **more)  # fmt: skip


def one_wave(made: Pipeline, seed: int) -> float:
    """Seconds of one whole wave, by the host's clock."""
    free = list(made.free)
    one = made.sequence(str(seed), prompt(made.plans[0].wave_tokens, seed))
    began = time.perf_counter()
    made.run(Chunk(one, one.rest))
    seconds = time.perf_counter() - began
    made.free = free
    return seconds


def overlap(host: Host) -> str:
    """Copies and waves side by side take less than one after the other."""
    host.need_cuda()
    made = bigger(host, host_pool_blocks=400)
    blocks = [made.free.pop() for _ in range(400)]

    def waves(times: int) -> float:
        return sum(one_wave(made, seed) for seed in range(times))

    def copies(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            made.copy(CopyDirection.OFFLOAD, blocks, list(range(400)))
        return time.perf_counter() - began

    waves(3), copies(2)
    compute = waves(20)
    lots = max(1, round(compute / (copies(4) / 4)))
    copy = copies(lots)
    mover = threading.Thread(target=copies, args=(lots,))
    began = time.perf_counter()
    mover.start()
    waves(20)
    mover.join()
    both = time.perf_counter() - began
    host.figures["overlap"] = {"waves_s": compute, "copies_s": copy, "both_s": both}
    assert both < 0.9 * (compute + copy), f"waves {compute:.3f} s, copies {copy:.3f} s, together {both:.3f} s"
    return f"waves {compute:.3f} s, copies {copy:.3f} s, together {both:.3f} s"


def wave_time(host: Host) -> str:
    """What a report calls compute time covers the kernels, not their launch alone."""
    host.need_cuda()
    made = bigger(host)
    one_wave(made, 0)
    alone_ms = 1000 * one_wave(made, 1)
    square = torch.randn(4096, 4096, device=host.device)
    cuda: Any = torch.cuda  # its classes carry no types
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(100):
        square @ square
    end.record()
    # Launched behind work that is known to take long: whoever measures launches would not see it.
    behind_ms = 1000 * one_wave(made, 2)
    before_ms = start.elapsed_time(end)
    assert behind_ms > 0.7 * before_ms, f"{behind_ms:.1f} ms reported behind {before_ms:.1f} ms of other work"
    return f"a wave of {alone_ms:.1f} ms, and of {behind_ms:.1f} ms behind {before_ms:.1f} ms of other work"


def memory(host: Host) -> str:
    """A pool that does not fit is refused by name, and everything is given back at the end."""
    host.need_cuda()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(host.device)
    plan = pipeline(host, "llama", 1).plans[0]
    engine = TorchEngine(device=str(host.device))
    refused = None
    try:
        engine.load(replace(plan, pool_blocks=2**40), lambda done, total: None)
    except EngineFault as fault:
        refused = fault
    assert refused is not None, "a pool of 2^40 blocks was loaded"
    assert "exceed" in refused.message, refused.message
    limit = refused.fields["limit"]
    engine.load(plan, lambda done, total: None)
    held = torch.cuda.memory_allocated(host.device) - before
    engine.close()
    after = torch.cuda.memory_allocated(host.device) - before
    assert after < held / 10, f"{held} bytes held, {after} after close"
    return f"2^40 blocks refused ({limit} would fit), {held >> 10} KiB given back"


def throughput(host: Host) -> str:
    made = bigger(host)
    one_wave(made, 0)
    seconds = float(np.median([one_wave(made, seed) for seed in range(5)]))
    rate = round(made.plans[0].wave_tokens / seconds)
    host.figures["prefill_tokens_per_s"] = rate
    return f"{rate} tokens/s of one stage, waves of {made.plans[0].wave_tokens} tokens (a small random model)"
