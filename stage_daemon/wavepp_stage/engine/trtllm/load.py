"""Loading one TensorRT-LLM stage, together with all others, and looking at what came of it.

Owns the order (meet, build and warm up, compare with the plan) and every refusal by name: a manager that differs from
what the controller plans with would corrupt silently, or make endpoints differ between stages. `engine.py` is the
only caller, on the executor's thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.base import EngineFacts, EnginePlan
from wavepp_stage.engine.torch.facts import positive
from wavepp_stage.engine.trtllm import compat
from wavepp_stage.engine.trtllm.contract import check_loaded, preflight
from wavepp_stage.engine.trtllm.desk import Desk
from wavepp_stage.engine.trtllm.facts import AUTO, PARTS, host_block_bytes, told_dtype
from wavepp_stage.engine.trtllm.group import Meeting
from wavepp_stage.engine.trtllm.plain import ExecutorArgs
from wavepp_stage.engine.trtllm.pp_comm import PayloadPort
from wavepp_stage.engine.trtllm.served import served_config

DTYPES = (AUTO, "float16", "bfloat16")
EVENTS_PER_BLOCK = 4
"""Room in the event buffer: one job may store, move and remove every block of the pool, and some."""


@dataclass(slots=True)
class Loaded:
    """What one load made."""

    plan: EnginePlan
    meeting: Meeting
    executor: compat.Executor
    desk: Desk
    port: PayloadPort
    start_up: object
    """TensorRT-LLM's own communicator: what it sent while it warmed up may still be on its way to the next stage."""
    hidden: int
    dtype: torch.dtype
    vocabulary: int

    def close(self) -> None:
        """Free the cache and leave the group; the desk answers nothing any more."""
        self.port.drop()
        try:
            self.desk.close()
            compat.close_executor(self.executor)
        finally:
            self.meeting.leave(compat.forget_group)


def load_stage(plan: EnginePlan, device: torch.device, dtype: str, progress: Callable[[int, int], None]) -> Loaded:
    """Raises EngineFault naming the field; then this process has left the group again."""
    compat.prepare_process()
    version = preflight()
    config = served_config(plan.model, plan.ranks, plan.block_tokens)
    progress(0, 2)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    told = told_dtype(config, dtype)
    terms = {"dtype": told, "tensorrt_llm": version}
    meeting = Meeting(plan, "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo", terms)
    try:
        executor = compat.make_executor(_arguments(plan, dtype, told, config))
        progress(1, 2)
        check_loaded(compat.loaded_objects(executor))
        _compare(plan, executor.kv_cache_manager)
        hidden, payload_dtype = compat.payload_shape(executor)
        port = PayloadPort(hidden)
        start_up = compat.install_port(port) if plan.stages > 1 else None
        desk = Desk(executor, plan.block_tokens)
    except EngineFault:
        meeting.leave(compat.forget_group)
        raise
    except Exception as error:  # a library may raise anything; the daemon hears it typed
        meeting.leave(compat.forget_group)
        raise EngineFault(f"TensorRT-LLM did not load: {type(error).__name__}: {error}", field="model",
                          value=plan.model) from error  # fmt: skip
    progress(2, 2)
    return Loaded(plan, meeting, executor, desk, port, start_up, hidden, payload_dtype, positive(config, "vocab_size"))


def _arguments(plan: EnginePlan, dtype: str, told: str, config: dict[str, object]) -> ExecutorArgs:
    """`told`: what `dtype` comes to."""
    bands = plan.group.bands if plan.group is not None else ((plan.first_layer, plan.last_layer),)
    own = plan.last_layer - plan.first_layer
    block_bytes = host_block_bytes(config, own, plan.ranks, plan.block_tokens, told)
    return ExecutorArgs(
        model=str(Path(plan.model).expanduser()),
        dtype=dtype,
        ranks=plan.ranks,
        layers_per_stage=tuple(last - first for first, last in bands),
        lanes=plan.lanes,
        wave_tokens=plan.wave_tokens,
        window=positive(config, "max_position_embeddings"),
        block_tokens=plan.block_tokens,
        pool_blocks=plan.pool_blocks,
        host_bytes=plan.host_pool_blocks * block_bytes,
        events=EVENTS_PER_BLOCK * (plan.pool_blocks + plan.host_pool_blocks) + 1024,
    )


def _compare(plan: EnginePlan, manager: compat.Manager) -> None:
    """Refuse by name what TensorRT-LLM decided otherwise than planned."""
    band = tuple(range(plan.first_layer, plan.last_layer))
    pairs: tuple[tuple[str, object, object], ...] = (
        ("block_tokens", manager.tokens_per_block, plan.block_tokens),
        ("band", tuple(manager.pp_layers), band),
        ("enable_block_reuse", manager.enable_block_reuse, True),
        ("events", manager.event_manager is not None, True),
        ("cache groups", compat.manager_kind(manager), ""),
        # Room beyond the prompt is in no count of the controller's: what fits exactly would wait for ever.
        ("num_extra_kv_tokens", manager.num_extra_kv_tokens, 0),
    )
    for field, got, want in pairs:
        if got != want:
            raise EngineFault(f"TensorRT-LLM made {field} = {got}", field=field, value=str(got), limit=str(want))


def loaded_facts(loaded: Loaded, device: torch.device) -> EngineFacts:
    manager, plan = loaded.executor.kv_cache_manager, loaded.plan
    return EngineFacts(
        hidden=PARTS * loaded.hidden,
        bytes_per_block=manager.get_cache_bytes_per_token() * plan.block_tokens,
        device=str(device),
        loaded_layers=tuple(manager.pp_layers),
    )


def device_of(name: str) -> torch.device:
    """cuda:0 (`cuda` is the same), or cpu, which a stand-in of the package takes. Raises EngineFault naming the field.
    A stage sees one GPU: TensorRT-LLM takes its own by rank and count."""
    if name == "cpu":
        return torch.device(name)
    if name not in ("cuda", "cuda:0"):
        raise EngineFault(f"the trtllm engine cannot use device {name!r}", field="device", value=name, limit="cuda:0")
    if not torch.cuda.is_available():
        raise EngineFault("this torch sees no GPU", field="device", value=name)
    if torch.cuda.device_count() != 1:
        raise EngineFault(
            "a stage daemon must see one GPU alone: set CUDA_VISIBLE_DEVICES and use cuda:0",
            field="CUDA_VISIBLE_DEVICES",
            value=os.environ.get("CUDA_VISIBLE_DEVICES", "unset"),
            limit=1,
        )
    return torch.device("cuda:0")


def check_dtype(name: str, device: torch.device) -> str:
    """`name`, if weights and activations may be of it; float32 only where answers are compared on a CPU. Raises
    EngineFault naming the field."""
    allowed = (*DTYPES, "float32") if device.type == "cpu" else DTYPES
    if name not in allowed:
        raise EngineFault(f"the trtllm engine cannot use dtype {name!r}", field="dtype", value=name,
                          limit=", ".join(allowed))  # fmt: skip
    return name
