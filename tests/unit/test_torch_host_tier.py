"""The torch engine's host tier: blocks leave the device and come back as they were, wherever they land.

Exactness over drawn round trips is in tests/property/test_torch_exact.py; here are its edges by name.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as Rows
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from tests.harness import tiny_models
from tests.harness.torch_pipeline import Chunk, Pipeline
from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import RowResult
from wavepp_stage.engine.base import CopyDirection, CopyLot
from wavepp_stage.engine.torch import host_tier
from wavepp_stage.engine.torch.engine import TorchEngine

B = 16
DEVICE_BLOCKS, HOST_BLOCKS = 64, 40
OFFLOAD, ONBOARD = CopyDirection.OFFLOAD, CopyDirection.ONBOARD


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def pipeline(root: Path) -> Pipeline:
    return tiered(root)


def tiered(root: Path, family: str = "llama", bounds: Rows[int] = (0, 2, 5), state_slots: int = 0) -> Pipeline:
    return Pipeline(tiny_models.build(family, root), bounds, block_tokens=B, pool_blocks=DEVICE_BLOCKS,
                    host_pool_blocks=HOST_BLOCKS, state_slots=state_slots)  # fmt: skip


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, tiny_models.VOCABULARY, length)]


def assert_exact(pipeline: Pipeline, token_ids: list[int], result: RowResult) -> None:
    expected = tiny_models.unsplit_logits(pipeline.model, token_ids).numpy()
    assert np.abs(np.frombuffer(result.logits, "<f4") - expected).max() <= 1e-4
    assert result.token_id == int(expected.argmax())


def fill(pipeline: Pipeline) -> list[list[torch.Tensor]]:
    """Random contents in every device block; returns copies of all pools, per stage."""
    for engine in pipeline.engines:
        for pool in engine.cache.pools:
            pool.normal_()
    return [[pool.clone() for pool in engine.cache.pools] for engine in pipeline.engines]


def lot(direction: CopyDirection, device: Rows[int], host: Rows[int]) -> CopyLot:
    return CopyLot(1, direction, np.array(device, np.int32), np.array(host, np.int32))


@pytest.mark.parametrize("staging", [1, 3 * 10_240, host_tier.STAGING_BYTES])
def test_blocks_come_back_bit_for_bit_when_copied_out_of_order(
    root: Path, staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged one block at a time, a few at a time (with a rest), and all at once."""
    monkeypatch.setattr(host_tier, "STAGING_BYTES", staging)
    pipeline = tiered(root)
    before = fill(pipeline)
    rng = np.random.default_rng(5)
    device, host = rng.permutation(DEVICE_BLOCKS)[:HOST_BLOCKS], rng.permutation(HOST_BLOCKS)
    pipeline.copy(OFFLOAD, device.tolist(), host.tolist())
    fill(pipeline)
    order = rng.permutation(HOST_BLOCKS)
    places = rng.permutation(DEVICE_BLOCKS)[:HOST_BLOCKS]
    pipeline.copy(ONBOARD, places.tolist(), host[order].tolist())
    for engine, pools in zip(pipeline.engines, before, strict=True):
        for now, then in zip(engine.cache.pools, pools, strict=True):
            assert torch.equal(now[places], then[device[order]])


def test_only_named_blocks_change_when_onboarding(pipeline: Pipeline) -> None:
    origin = fill(pipeline)
    pipeline.copy(OFFLOAD, [3, 4, 60], [7, 8, 0])
    before = fill(pipeline)
    pipeline.copy(ONBOARD, [9, 2], [0, 8])
    for engine, pools, first in zip(pipeline.engines, before, origin, strict=True):
        for now, then, old in zip(engine.cache.pools, pools, first, strict=True):
            assert torch.equal(now[[9, 2]], old[[60, 4]])
            assert (now != then).flatten(1).any(1).nonzero().flatten().tolist() == [2, 9]


def test_off_loading_leaves_the_device_readable(pipeline: Pipeline) -> None:
    token_ids = prompt(100)
    donor = pipeline.sequence("a", token_ids)
    pipeline.prefill(donor)
    pipeline.copy(OFFLOAD, donor.blocks, list(range(len(donor.blocks))))
    again = pipeline.sequence("b", token_ids, reuse=donor, reused_blocks=6)
    assert_exact(pipeline, token_ids, pipeline.prefill(again))


@pytest.mark.parametrize(
    ("family", "bounds", "slots"),
    [("qwen3_moe", (0, 2, 5), 0), ("qwen3_next", (0, 3, 4, 8), 4)],
    ids=["attention", "hybrid"],
)
def test_answer_is_exact_when_the_prefix_was_away(root: Path, family: str, bounds: tuple[int, ...], slots: int) -> None:
    pipeline = tiered(root, family, bounds, slots)
    token_ids, hosts = prompt(200), [30, 31, 5, 6, 39, 0]
    donor = pipeline.sequence("a", token_ids)
    # A hybrid restores its state beside the blocks: snapshots stay on the device.
    snapshot = pipeline.free_slots.pop() if slots else None
    pipeline.run(Chunk(donor, 6 * B, snapshots=() if snapshot is None else ((6 * B, snapshot),)))
    pipeline.copy(OFFLOAD, donor.blocks[:6], hosts)
    fill(pipeline)
    places = [pipeline.free.pop() for _ in hosts]
    pipeline.copy(ONBOARD, places, hosts)
    donor.blocks[:6] = places
    again = pipeline.sequence("b", token_ids, reuse=donor, reused_blocks=6, restore=snapshot)
    assert_exact(pipeline, token_ids, pipeline.prefill(again))


def test_answers_are_exact_when_blocks_move_beside_running_waves(pipeline: Pipeline) -> None:
    """The blocks of a lot are in no running wave, and everything else is."""
    moving = [pipeline.free.pop() for _ in range(20)]
    before = fill(pipeline)
    hosts = list(range(20))
    ended = threading.Event()
    rounds = 0

    def move() -> None:
        nonlocal rounds
        while not ended.is_set():
            pipeline.copy(OFFLOAD, moving, hosts)
            pipeline.copy(ONBOARD, moving[::-1], hosts[::-1])
            rounds += 1

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for seed in range(5):
            free = list(pipeline.free)
            sequence = pipeline.sequence(str(seed), prompt(300, seed))
            assert_exact(pipeline, sequence.token_ids, pipeline.prefill(sequence, chunk=50))
            pipeline.free = free
    finally:
        ended.set()
        mover.join()
    assert rounds > 1
    for engine, pools in zip(pipeline.engines, before, strict=True):
        for now, then in zip(engine.cache.pools, pools, strict=True):
            assert torch.equal(now[moving], then[moving])


def test_pool_is_pinned_in_full_for_as_long_as_it_lives_when_cuda_asks(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a CUDA runtime that only writes down what it is asked for."""
    calls: list[tuple[str, int]] = []

    def register(address: int, size: int, flags: int) -> int:
        calls.append(("register", size))
        return flags

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: calls.append(("unregister", address))
    )
    cuda = SimpleNamespace(cudart=lambda: runtime, check_error=lambda status: None, device=nullcontext)
    monkeypatch.setattr(host_tier, "_CUDA", cuda)
    tier = host_tier.HostTier(pipeline.engines[0].cache, HOST_BLOCKS, torch.device("cpu"))
    assert calls == []
    tier._pin()
    address = tier._host.data_ptr()
    assert calls == [("register", HOST_BLOCKS * pipeline.facts[0].bytes_per_block)]
    del tier
    assert calls[1:] == [("unregister", address)]


def test_memory_stays_flat_over_many_lots(pipeline: Pipeline) -> None:
    process = psutil.Process()
    blocks, hosts = list(range(30)), list(range(30))[::-1]

    def move_often(times: int) -> None:
        for _ in range(times):
            pipeline.copy(OFFLOAD, blocks, hosts)
            pipeline.copy(ONBOARD, blocks, hosts)

    move_often(20)
    before = process.memory_info().rss
    move_often(400)
    # 800 lots of 30 blocks; one leaked lot in a hundred would be 8 x 300 KiB.
    assert process.memory_info().rss - before < 2 * 1024 * 1024


@pytest.mark.parametrize(
    ("device", "host", "field", "value"),
    [
        ([0, DEVICE_BLOCKS], [0, 1], "lot.device", DEVICE_BLOCKS),
        ([-1], [0], "lot.device", -1),
        ([0, 1], [0, HOST_BLOCKS], "lot.host", HOST_BLOCKS),
        ([0], [-2], "lot.host", -2),
        ([0, 1], [0], "lot.host", 1),
        ([4, 4], [0, 1], "lot.device", 4),
        ([0, 1], [9, 9], "lot.host", 9),
    ],
)
@pytest.mark.parametrize("direction", [OFFLOAD, ONBOARD])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_lot_is_refused_by_field_when_an_id_is_wrong(
    root: Path, family: str, direction: CopyDirection, device: list[int], host: list[int], field: str, value: int
) -> None:
    """On a stage without attention layers too, where blocks are numbers alone."""
    bounds, slots = ((0, 2, 5), 0) if family == "llama" else ((0, 3, 8), 1)
    engine = tiered(root, family, bounds, slots).engines[0]
    with pytest.raises(EngineFault) as caught:
        engine.copy(lot(direction, device, host))
    assert (caught.value.fields["field"], caught.value.fields["value"]) == (field, str(value))


def test_stage_without_attention_layers_copies_nothing_and_says_done(root: Path) -> None:
    engine = tiered(root, "qwen3_next", (0, 3, 8), 1).engines[0]
    assert engine.cache.pools == []
    engine.copy(lot(OFFLOAD, [1, 2], [3, 4]))
    engine.copy(lot(ONBOARD, [], []))


def test_copy_is_refused_when_there_is_no_host_tier(root: Path) -> None:
    engine = TorchEngine(threads=1)
    with pytest.raises(EngineFault, match="not loaded"):
        engine.copy(lot(OFFLOAD, [0], [0]))
    engine.load(Pipeline(tiny_models.build("llama", root), (0, 5)).plans[0], lambda done, total: None)
    with pytest.raises(EngineFault) as caught:
        engine.copy(lot(OFFLOAD, [0], [0]))
    assert caught.value.fields["field"] == "host_pool_blocks"


def test_host_tier_is_refused_by_field_when_memory_is_short(pipeline: Pipeline) -> None:
    with pytest.raises(EngineFault) as caught:
        pipeline.engines[0].load(replace(pipeline.plans[0], host_pool_blocks=2**44), lambda done, total: None)
    assert caught.value.fields["field"] == "host_pool_blocks"
