"""The torch engine as it would run on CUDA: nothing of the host among the device's tensors, and who waits for whom.

On fake tensors (tests/harness/fake_cuda.py): what is computed there is compared on GPU hosts by scripts/gpu-check.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness import tiny_models
from tests.harness.fake_cuda import COMPUTE, CUDA, FakeCuda, fake_cuda
from tests.harness.torch_pipeline import Chunk, Pipeline
from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import LinkKind, RowResult, Sampling, WaveOrdinal
from wavepp_stage.engine.base import CopyDirection, LinkPlan, WaveHeader
from wavepp_stage.engine.torch import device as device_module
from wavepp_stage.engine.torch import engine as engine_module
from wavepp_stage.engine.torch import memory
from wavepp_stage.engine.torch.attention import CausalMask
from wavepp_stage.engine.torch.facts import load_config
from wavepp_stage.engine.torch.gloo_link import TorchLink
from wavepp_stage.engine.torch.model import build_band
from wavepp_stage.engine.torch.side_stream import SideStream

B = 16
BOUNDS = {"llama": (0, 2, 3, 5), "qwen3_moe": (0, 2, 3, 5), "qwen3_next": (0, 3, 4, 8)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Logits that reached the sampler, which would need their contents."""
    seen: list[torch.Tensor] = []

    def sample(logits: torch.Tensor, rows: Any) -> tuple[RowResult, ...]:
        seen.append(logits)
        return ()

    monkeypatch.setattr(engine_module, "sample_rows", sample)
    return seen


@pytest.fixture
def folders(root: Path) -> dict[str, Path]:
    """Made before tensors become fake."""
    return {family: tiny_models.build(family, root) for family in BOUNDS}


@pytest.fixture
def cuda(folders: dict[str, Path], drawn: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch) as made:
        yield made


def pipeline_of(folders: dict[str, Path], family: str, **more: Any) -> Pipeline:
    slots = 6 if family == "qwen3_next" else 0
    return Pipeline(folders[family], BOUNDS[family], block_tokens=B, pool_blocks=64, wave_tokens=256,
                    state_slots=slots, **more)  # fmt: skip


@pytest.mark.parametrize("family", sorted(BOUNDS))
def test_every_tensor_is_on_the_device_when_stages_run_there(
    cuda: FakeCuda, folders: dict[str, Path], drawn: list[torch.Tensor], family: str
) -> None:
    """Whole prompts, chunks over scattered blocks and over runs of them, reuse, void rows; on all stages."""
    # torch says of grouped products, as experts use them, that they take nothing but bfloat16 when nothing is computed.
    pipeline = pipeline_of(folders, family, dtype="float32" if family == "llama" else "bfloat16")
    drawn.clear()
    for engine in pipeline.engines:
        tensors = [*engine.band.model.parameters(), *engine.band.model.buffers(), *engine.cache.pools]
        assert {tensor.device for tensor in tensors} == {CUDA}
    first = pipeline.sequence("first", list(range(100)))
    second = pipeline.sequence("second", list(range(70)))
    second.blocks.sort()
    pipeline.run(Chunk(first, 64), Chunk(second, 32, void=True))
    pipeline.run(Chunk(first, 36), Chunk(second, 70))
    third = pipeline.sequence("third", list(range(90)), reuse=first, reused_blocks=2)
    if family == "qwen3_next":
        third.restore = pipeline.free_slots.pop()
    outcomes = pipeline.outcomes([Chunk(third, 58)])
    payloads: list[Any] = [one.payload for one in outcomes[:-1]]
    assert [payload.device for payload in payloads] == [CUDA, CUDA]
    assert [(logits.device, logits.dtype, len(logits)) for logits in drawn] == [
        (CUDA, torch.float32, 2),
        (CUDA, torch.float32, 1),
    ]


@pytest.mark.parametrize("voids", [False, True])
def test_wave_has_left_the_device_when_run_returns(cuda: FakeCuda, folders: dict[str, Path], voids: bool) -> None:
    pipeline = pipeline_of(folders, "llama")
    sequence = pipeline.sequence("one", list(range(40)))
    cuda.log.clear()
    pipeline.engines[0].run(pipeline.work(0, [Chunk(sequence, 40, void=voids)]), None)
    assert cuda.on(COMPUTE)[-1] == "done"
    assert cuda.on(COMPUTE).count("done") == 1


def test_wave_has_left_the_device_when_run_raises(
    cuda: FakeCuda, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels write blocks that quarantine is about to give back."""
    pipeline = pipeline_of(folders, "llama")
    sequence = pipeline.sequence("one", list(range(40)))
    second = pipeline.engines[0].band.layers[1]
    monkeypatch.setattr(second, "forward", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("out of memory")))
    cuda.log.clear()
    with pytest.raises(RuntimeError, match="out of memory"):
        pipeline.engines[0].run(pipeline.work(0, [Chunk(sequence, 40)]), None)
    assert "index_copy_" in cuda.on(COMPUTE)
    assert cuda.on(COMPUTE)[-1] == "done"


def test_engine_refuses_every_load_when_the_device_is_lost(
    cuda: FakeCuda, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_of(folders, "llama")
    engine, sequence = pipeline.engines[0], pipeline.sequence("one", list(range(40)))

    def synchronize() -> None:
        raise RuntimeError("an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=synchronize))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.run(pipeline.work(0, [Chunk(sequence, 40)]), None)
    with pytest.raises(EngineFault, match=r"start it again: an illegal memory access was encountered$") as caught:
        engine.load(pipeline.plans[0], lambda done, total: None)
    assert caught.value.fields["field"] == "device"


@pytest.mark.parametrize("direction", list(CopyDirection))
def test_copies_touch_no_other_stream_and_are_done_when_copy_returns(
    cuda: FakeCuda, folders: dict[str, Path], direction: CopyDirection
) -> None:
    pipeline = pipeline_of(folders, "llama", host_pool_blocks=32)
    engine = pipeline.engines[0]
    cuda.log.clear()
    pipeline.engines = [engine]
    pipeline.copy(direction, [3, 9, 4], [7, 8, 20])
    (stream,) = {entry.split(":")[0] for entry in cuda.log}
    assert stream.startswith("side")
    assert cuda.on(stream)[-1] == "done"
    assert cuda.on(stream).count("done") == 1
    # One copy per run of host blocks, and one gather or scatter per pool.
    moves = [name for name in cuda.on(stream) if name in ("index_select", "index_copy_")]
    assert len(moves) == len(engine.cache.pools)


# --- payloads ------------------------------------------------------------------------------------


class Wire:
    """A transport through host memory that notes when it is used."""

    device = torch.device("cpu")

    def __init__(self, cuda: FakeCuda, header: bytes = b"") -> None:
        self._cuda, self._header = cuda, header

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout_s: float) -> None:
        assert (tensor.device.type, tensor.is_contiguous()) == ("cpu", True)
        self._cuda.note(f"sent {tensor.nbytes}")

    def recv(self, tensor: torch.Tensor, peer: int, tag: int, timeout_s: float) -> None:
        assert tensor.device.type == "cpu"
        self._cuda.note(f"received {tensor.nbytes}")

    def close(self) -> None: ...


def link_of(cuda: FakeCuda, engine: Any, stage: int) -> TorchLink:
    plan = LinkPlan(LinkKind.GLOO, 1, 2, stage, 3, "", "", 0, "127.0.0.1", 1.0, 1.0)
    listener = SimpleNamespace(
        on_activation=lambda header, payload: cuda.note(f"arrived on {payload.device}"), on_link_lost=pytest.fail
    )
    link = TorchLink(plan, engine, listener)
    link._transport = Wire(cuda)
    return link


def test_payload_leaves_on_a_stream_of_its_own_when_it_goes_through_host_memory(
    cuda: FakeCuda, folders: dict[str, Path]
) -> None:
    """On the compute stream it would wait for the whole next wave."""
    engine = pipeline_of(folders, "llama").engines[0]
    payload, side = engine.receive_buffer(5), SideStream(CUDA)
    cuda.log.clear()
    header = WaveHeader(2, 0, bytes(16), 5, 64, payload.nbytes, 0)
    link_of(cuda, engine, 0)._send(side, (header, payload))
    assert cuda.on(COMPUTE) == []
    assert cuda.log.index(f"sent {payload.nbytes}") == cuda.log.index(f"{side._stream}: done") + 1


def test_payload_lands_in_memory_of_a_stream_of_its_own_and_is_complete_when_it_arrives(
    cuda: FakeCuda, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the compute stream may still be read by the wave that runs."""
    engine = pipeline_of(folders, "llama").engines[1]
    side, size = SideStream(CUDA), engine.receive_buffer(5).nbytes
    header = WaveHeader(2, 0, bytes(16), 5, 64, size, 0)
    monkeypatch.setattr(WaveHeader, "unpack", classmethod(lambda cls, data: header))
    monkeypatch.setattr(torch.Tensor, "numpy", lambda tensor: np.zeros(tensor.shape, np.uint8))
    cuda.log.clear()
    link_of(cuda, engine, 1)._receive(side, (WaveOrdinal(0), 5))
    assert cuda.on(COMPUTE) == []
    assert cuda.on(str(side._stream))[0] == "empty"
    assert cuda.log[-2:] == [f"{side._stream}: done", "arrived on cuda:0"]


def test_grpc_payloads_wait_for_no_wave(cuda: FakeCuda, folders: dict[str, Path]) -> None:
    engine = pipeline_of(folders, "llama").engines[0]
    cuda.log.clear()
    payload = engine.decode(bytes(5 * 64 * 4), 5)
    assert payload.device == CUDA
    assert cuda.on(COMPUTE) == []
    assert cuda.log[-1].endswith(": done")


# --- memory --------------------------------------------------------------------------------------


def test_pool_is_refused_with_the_number_that_fits_when_the_device_is_too_full(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline(tiny_models.build("llama", root), (0, 2, 5), block_tokens=B, pool_blocks=64)
    (plan, _), engine = pipeline.plans, pipeline.engines[0]
    weights, block = memory.weight_bytes(engine.band), memory.block_bytes(plan, engine.band)
    assert block == engine.cache.bytes_per_block
    assert weights == sum(tensor.nbytes for tensor in engine.band.model.parameters())
    band = build_band(load_config(plan.model), plan, torch.float32)
    monkeypatch.setattr(memory, "free_bytes", lambda device: weights + 64 * block)
    memory.check_fit(plan, band, CUDA)
    monkeypatch.setattr(memory, "free_bytes", lambda device: weights + 64 * block - 1)
    with pytest.raises(EngineFault) as caught:
        memory.check_fit(plan, band, CUDA)
    assert [caught.value.fields[name] for name in ("field", "value", "limit")] == ["pool_blocks", "64", "63"]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_answers_stay_exact_when_the_load_ended_in_a_rehearsal(root: Path, family: str) -> None:
    pipeline = pipeline_of({family: tiny_models.build(family, root)}, family)
    for engine in pipeline.engines:
        engine.rehearse()
    token_ids = np.random.default_rng(1).integers(0, tiny_models.VOCABULARY, 150).tolist()
    result = pipeline.prefill(pipeline.sequence("one", token_ids, sampling=Sampling(full_logits=True)), chunk=64)
    expected = tiny_models.unsplit_logits(pipeline.model, token_ids).numpy()
    assert np.abs(np.frombuffer(result.logits, "<f4") - expected).max() <= 1e-4


def test_load_fails_by_field_when_a_wave_finds_no_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipeline_of({"llama": tiny_models.build("llama", root)}, "llama")
    engine, waves = pipeline.engines[1], []

    def run(wave: Any, payload: Any) -> Any:
        waves.append((wave.tokens, wave.rows[0].start, len(wave.rows[0].blocks), tuple(payload.shape)))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(engine, "run", run)
    with pytest.raises(EngineFault, match=r"no memory for a wave: CUDA out of memory\.") as caught:
        engine.rehearse()
    assert (caught.value.fields["field"], caught.value.fields["value"]) == ("wave_tokens", "256")
    # The last full wave of a sequence that fills the pool.
    assert waves == [(256, 64 * B - 256, 64, (256, 64))]
    with pytest.raises(EngineFault, match="not loaded"):
        engine.cache  # noqa: B018


# --- the device ----------------------------------------------------------------------------------


def test_device_is_numbered_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineFault, match="cannot use the device"):
        device_module.device_of("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_module.device_of(name) for name in ("cpu", "cuda", "cuda:1")] == [
        torch.device("cpu"),
        CUDA,
        torch.device("cuda", 1),
    ]
    with pytest.raises(EngineFault) as caught:
        device_module.device_of("cuda:2")
    assert (caught.value.fields["value"], caught.value.fields["limit"]) == ("cuda:2", "cuda:1")


def test_float32_is_not_rounded_when_the_device_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", claimed.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    device_module.claim(CUDA)
    assert (claimed, torch.backends.cudnn.allow_tf32) == ([CUDA], False)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("cuda")
def test_masks_begin_at_their_own_memory_when_on_cuda() -> None:
    """A view into the buffer begins anywhere, and CUDA kernels read several entries at once."""
    mask = CausalMask(torch.float32, CUDA).view(3, 37)
    assert (tuple(mask.shape), mask.storage_offset(), mask.is_contiguous()) == ((3, 37), 0, True)
