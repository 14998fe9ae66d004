"""Builds an executor out of a user's arguments. Collective: every rank must come along.

Owns the order of the start-up: model, cache (capacity agreed on by all), warm-up, executor, and
`start_worker` as the very last step.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..._fake import knobs
from ..._fake.stream import CpuStream
from ...llmapi.llm_args import TorchLlmArgs
from ..distributed.communicator import Distributed
from .model_engine import PyTorchModelEngine
from .py_executor import PyExecutor
from .resource_manager import ResourceManager, ResourceManagerType, SeqSlotManager

_MANAGER = ".kv_cache_manager_v2" if knobs.is_rc26() else ".kv_cache.kv_cache_manager_v2"
KVCacheManagerV2: Any = importlib.import_module(_MANAGER, __package__).KVCacheManagerV2


def create_py_executor(
    llm_args: TorchLlmArgs,
    checkpoint_dir: str | None = None,
    tokenizer: Any = None,
    profiling_stage_data: dict[str, Any] | None = None,
    resource_governor_queue: Any = None,
) -> PyExecutor:
    _refuse_what_must_be_off(llm_args)
    if knobs.strikes("FAIL_LOAD"):
        raise RuntimeError("injected: create_py_executor")
    mapping = llm_args.parallel_config.to_mapping()
    distributed = Distributed.get(mapping)
    distributed.barrier()
    stream = CpuStream()
    engine = PyTorchModelEngine(model_path=checkpoint_dir or llm_args.model, llm_args=llm_args, mapping=mapping,
                                dist=distributed)  # fmt: skip
    config = llm_args.kv_cache_config
    model = engine.model
    manager = KVCacheManagerV2(
        config,
        num_layers=int(model.config.num_hidden_layers),
        num_kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        # Some attention kernels fix the size of a block, whatever was asked for.
        tokens_per_block=knobs.number("FORCE_TOKENS_PER_BLOCK") or config.tokens_per_block,
        max_seq_len=engine.max_seq_len,
        max_batch_size=llm_args.max_batch_size,
        mapping=mapping,
        max_num_tokens=llm_args.max_num_tokens,
        execution_stream=stream,
    )
    resources = ResourceManager(
        {
            ResourceManagerType.SEQ_SLOT_MANAGER: SeqSlotManager(llm_args.max_batch_size * mapping.pp_size),
            ResourceManagerType.KV_CACHE_MANAGER: manager,
        }
    )
    executor = PyExecutor(resources, None, engine, dist=distributed, start_worker=False, execution_stream=stream)
    executor.start_worker()
    return executor


def _refuse_what_must_be_off(llm_args: TorchLlmArgs) -> None:
    """What the stand-in cannot do, and what the original would do wrongly when it is driven from outside."""
    if llm_args.kv_cache_config.use_kv_cache_manager_v2 is not True:
        raise NotImplementedError("this stand-in has the second cache manager only: use_kv_cache_manager_v2=True")
    if not llm_args.enable_chunked_prefill or not llm_args.disable_overlap_scheduler:
        raise NotImplementedError("chunked prefill must be on, the overlap scheduler off")
    if llm_args.cuda_graph_config is not None or llm_args.torch_compile_config is not None:
        raise NotImplementedError("cuda_graph_config and torch_compile_config must be None")
    if llm_args.max_beam_width != 1 or llm_args.speculative_config is not None:
        raise NotImplementedError("one beam, no speculation")
