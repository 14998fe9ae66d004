"""CUDA as far as a CPU can play it: tensors that claim to be on `cuda:0`, and streams that write down their use.

The tensors are torch's own fake ones: shapes, types and devices without contents, and every operation that
mixes devices is an error as on a real GPU. The streams replace `torch.cuda` in the modules that own one.
Contents are never computed: exactness on a GPU is for scripts/gpu-check.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import PretrainedConfig

from wavepp_stage.engine.base import EnginePlan
from wavepp_stage.engine.torch import engine as engine_module
from wavepp_stage.engine.torch import host_tier, side_stream, weights
from wavepp_stage.engine.torch.facts import read_header
from wavepp_stage.engine.torch.model import Band, build_band

CUDA = torch.device("cuda", 0)
COMPUTE = "compute"


@dataclass
class FakeCuda:
    """`log` holds "stream: operation" for every operation on the device, "stream: done" when a thread has waited for
    an event there, and whatever else a test notes."""

    log: list[str] = field(default_factory=list)
    stream_name: str = COMPUTE
    streams: int = 0

    def Stream(self, device: torch.device) -> str:
        self.streams += 1
        return f"side{self.streams}"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.stream_name = self.stream_name, stream
        try:
            yield
        finally:
            self.stream_name = before

    def Event(self, blocking: bool) -> Any:
        assert blocking, "a wait must leave the interpreter to others"
        recorded: list[str] = []
        return SimpleNamespace(record=recorded.append, synchronize=lambda: self.note(f"{recorded[-1]}: done"))

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        assert device == CUDA
        yield

    def current_stream(self, device: torch.device) -> Any:
        assert device == CUDA
        return SimpleNamespace(synchronize=lambda: self.note(f"{self.stream_name}: done"))

    def note(self, what: str) -> None:
        self.log.append(what)

    def on(self, stream: str) -> list[str]:
        """What was noted of one stream, in order."""
        return [entry.removeprefix(f"{stream}: ") for entry in self.log if entry.startswith(f"{stream}: ")]


_Mode: Any = TorchDispatchMode  # its methods carry no types


class _Recorder(_Mode):  # type: ignore[misc]
    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten":  # a question about a tensor
            return func(*args, **(kwargs or {}))
        with self:
            # What inference mode does not take apart on its way here, and could not below.
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in (*args, out) if isinstance(one, Tensor)]
        if any(one.device == CUDA for one in tensors):
            self._cuda.note(f"{self._cuda.stream_name}: {func.overloadpacket.__name__}")
        return out


def _view(tensor: Tensor, index: Any) -> Tensor:
    """tensor[index] out of operations: torch's own indexing, and the methods below, ask a CUDA
    that is not there for its current device."""
    view, dim = tensor, 0
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (tensor.dim() - sum(part is not None for part in parts) + 1)
    for part in parts:
        if isinstance(part, slice):
            view = torch.ops.aten.slice(view, dim, part.start, part.stop, part.step or 1)
            dim += 1
        elif part is None:
            view = view.unsqueeze(dim)
            dim += 1
        elif isinstance(part, Tensor):
            assert len(parts) == 1
            view = torch.ops.aten.index(view, [part])
        else:
            view = view.select(dim, part)
    return view


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return torch.ops.aten.copy_(target, source, non_blocking)  # type: ignore[no-any-return]


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ops.aten._to_copy(tensor, dtype=dtype)  # type: ignore[no-any-return]


_METHODS: dict[str, Any] = {
    # What the engine asks of contents: whether a sum is finite.
    "__bool__": lambda tensor: True,
    "__getitem__": _view,
    "__setitem__": lambda tensor, index, value: _copy(_view(tensor, index), value),
    "copy_": _copy,
    "contiguous": lambda tensor: (
        tensor if tensor.is_contiguous() else torch.clone(tensor, memory_format=torch.contiguous_format)
    ),
    "float": lambda tensor: _to(tensor, torch.float32),
    "cpu": lambda tensor: torch.ops.aten._to_copy(tensor, device=torch.device("cpu")),
}


def _build_band(config: PretrainedConfig, plan: EnginePlan, dtype: torch.dtype) -> Band:
    """Outside: modules on the meta device do not mix with fake tensors until they have weights."""
    with _disable_current_modes():
        return build_band(config, plan, dtype)


class _Weights:
    """In place of an open safetensors file: tensors of the right shapes."""

    def __init__(self, file: Path, framework: str, device: str) -> None:
        assert (framework, device) == ("pt", "cpu")
        self._shapes = {tensor.name: tensor.shape for tensor in read_header(file)}

    def __enter__(self) -> _Weights:
        return self

    def __exit__(self, *_: object) -> None: ...

    def get_tensor(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name])


@contextmanager
def fake_cuda(patch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Within it, tensors are fake, and the torch engine's streams are those of the FakeCuda."""
    cuda = FakeCuda()
    patch.setattr(side_stream, "_CUDA", cuda)
    patch.setattr(host_tier.HostTier, "_pin", lambda tier: None)
    patch.setattr(torch.cuda, "current_stream", cuda.current_stream)
    for name, method in _METHODS.items():
        patch.setattr(FakeTensor, name, method, raising=False)
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    patch.setattr(weights, "safe_open", _Weights)
    patch.setattr(engine_module, "build_band", _build_band)
    patch.setattr(engine_module, "device_of", lambda name: CUDA)
    patch.setattr(engine_module, "claim", lambda device: None)
    patch.setattr(engine_module, "check_fit", lambda plan, band, device: None)
    patch.setattr(side_stream.SideStream, "landing", lambda side, like: torch.empty(like.shape, dtype=like.dtype))
    with FakeTensorMode(allow_non_fake_inputs=True), _Recorder(cuda):
        yield cuda
