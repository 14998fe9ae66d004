"""The only module that names tensorrt_llm: each point that may differ between its versions is one function here.

Owns what must be done to TensorRT-LLM from outside, not when or why (`load.py`, `cache.py`, `engine.py` call it).
Nothing is imported before it is used: the package takes seconds and a GPU, and `TLLM_DISABLE_MPI` must stand in the
environment before. Every name is listed in trtllm_contract.json; `contract.preflight` looks for all of them.
Two vintages are served: 1.3.0rc26, and what came behind it (claims that take a limit, managers in a package of theirs).
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.trtllm.plain import CacheEvent, ExecutorArgs, Room

if TYPE_CHECKING:
    from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
    from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest
    from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
    from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests
    from tensorrt_llm.runtime.kv_cache_manager_v2 import KVCacheEvent, _KVCache

    Batch = ScheduledRequests
    Event = KVCacheEvent
    Executor = PyExecutor
    Manager = KVCacheManagerV2
    Pin = _KVCache
    Request = LlmRequest

EVENT_HASHES = "v2_sha256"
"""Events name blocks by the hex form of the manager's own keys, which `block_keys` computes from tokens."""
_ENVIRONMENT = {
    "TLLM_DISABLE_MPI": "1",  # ranks come from torch.distributed: no mpirun starts a stage daemon
    "TRTLLM_SKIP_KV_CACHE_ESTIMATION": "1",  # the pool is what was asked for, not what a dry run measures
}


# --- loading --------------------------------------------------------------------------------------


def prepare_process() -> None:
    """Set what the package reads when it is imported; an operator's own choice stands."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def make_executor(args: ExecutorArgs) -> Executor:
    """Model engine, cache manager and warm-up of this rank; its loop never starts. All ranks enter together."""
    from tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor
    from tensorrt_llm.llmapi.llm_args import KvCacheConfig, TorchLlmArgs

    stages = len(args.layers_per_stage)
    cache = KvCacheConfig(
        enable_block_reuse=True,
        enable_partial_reuse=False,  # an endpoint is a block boundary, the same on every stage
        max_tokens=args.pool_blocks * args.block_tokens,
        max_util_for_resume=1.0,  # a claim is followed by its whole reservation: nothing resumed needs room to grow
        host_cache_size=args.host_bytes,
        tokens_per_block=args.block_tokens,
        event_buffer_max_size=args.events,
        kv_cache_event_hash_algo=EVENT_HASHES,
        use_kv_cache_manager_v2=True,
    )
    llm_args = TorchLlmArgs(
        model=args.model,
        skip_tokenizer_init=True,
        tensor_parallel_size=args.ranks,
        pipeline_parallel_size=stages,
        pp_partition=list(args.layers_per_stage) if stages > 1 else None,
        dtype=args.dtype,
        max_batch_size=args.lanes,
        max_num_tokens=args.wave_tokens,
        max_seq_len=args.window,
        kv_cache_config=cache,
        enable_chunked_prefill=True,
        disable_overlap_scheduler=True,
        cuda_graph_config=None,
    )
    with _without_loop(), _events_on_every_rank():
        return create_py_executor(llm_args, checkpoint_dir=args.model)


@contextmanager
def _without_loop() -> Iterator[None]:
    """`create_py_executor` starts its scheduling loop before it returns: here waves are driven from outside."""
    from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor

    started = PyExecutor.start_worker
    vars_of: Any = PyExecutor
    vars_of.start_worker = lambda executor: None
    try:
        yield
    finally:
        vars_of.start_worker = started


@contextmanager
def _events_on_every_rank() -> Iterator[None]:
    """A manager reports events on rank 0 alone, which is enough where one rank schedules for all; every stage has a
    digest of its own here. The rank is asked through a name of the manager's module."""
    module: Any = _manager_module()
    asked = module.mpi_rank
    module.mpi_rank = lambda: 0
    try:
        yield
    finally:
        module.mpi_rank = asked


def _manager_module() -> Any:
    try:
        return importlib.import_module("tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2")
    except ModuleNotFoundError:
        return importlib.import_module("tensorrt_llm._torch.pyexecutor.kv_cache_manager_v2")


def forget_group() -> None:
    """Nothing of the process group of an earlier load is used for the next: both are remembered per process."""
    communicator: Any = importlib.import_module("tensorrt_llm._torch.distributed.communicator")
    communicator._pp_comm = None
    try:
        mesh: Any = importlib.import_module("tensorrt_llm._torch.device_mesh")
    except ModuleNotFoundError:
        return
    mesh.DeviceMeshTopologyImpl.device_mesh = None
    mesh.DeviceMeshTopologyImpl.tp_mesh = None


def loaded_objects(executor: Executor) -> dict[str, object]:
    """For contract.check_loaded, by class name; a missing one lacks everything."""
    engine, manager = getattr(executor, "model_engine", None), getattr(executor, "kv_cache_manager", None)
    return {"PyExecutor": executor, "PyTorchModelEngine": engine, "KVCacheManagerV2": manager}


def close_executor(executor: Executor) -> None:
    """Free the cache; weights go with the last reference. Its own shutdown waits for a loop that never ran."""
    executor.kv_cache_manager.shutdown()


def manager_kind(manager: Manager) -> str:
    """Why the manager's reuse is not that of dense attention alone; empty if it is."""
    if any("Mamba" in base.__name__ for base in type(manager).__mro__):
        return "recurrent states, whose reuse stops at snapshots"
    groups = len(manager.impl.layer_grouping)
    return "" if groups == 1 else f"{groups} groups of layers with reuse rules of their own (sliding windows)"


def payload_shape(executor: Executor) -> tuple[int, Any]:
    """(hidden size, torch dtype) of the activations between two stages."""
    import torch

    config = executor.model_engine.model.model_config.pretrained_config
    dtype = getattr(config, "torch_dtype", None) or config.dtype
    return int(config.hidden_size), getattr(torch, dtype) if isinstance(dtype, str) else dtype


# --- the wave -------------------------------------------------------------------------------------


def install_port(port: object) -> object:
    """Make `port` what layers send to and receive from; returns what was there."""
    communicator: Any = importlib.import_module("tensorrt_llm._torch.distributed.communicator")
    before, communicator._pp_comm = communicator._pp_comm, port
    return before


def make_batch(requests: Sequence[Request]) -> Batch:
    """Rows in this order, but for final chunks, which come last."""
    from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests

    batch = ScheduledRequests()
    for request in requests:
        batch.append_context_request(request)
    return batch


def forward(executor: Executor, batch: Batch) -> Any:
    """Run the batch's chunks; logits of each row's last token in the batch's order, of meaning on the last stage."""
    executor.resource_manager.prepare_resources(batch)
    # By position: the first parameter was called scheduled_requests.
    return executor.model_engine.forward(batch, executor.resource_manager)["logits"]


def on_stream(executor: Executor) -> AbstractContextManager[Any]:
    """The stream that the cache manager orders its copies on."""
    import torch

    stream = executor.execution_stream
    return torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else nullcontext()


# --- sequences ------------------------------------------------------------------------------------


def make_request(number: int, tokens: list[int], salt: str | None) -> Request:
    """A prompt that is prefilled chunk by chunk and never generates here."""
    from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest, LlmRequestState
    from tensorrt_llm.bindings import SamplingConfig

    request = LlmRequest(
        request_id=number,
        max_new_tokens=1,
        input_tokens=tokens,
        sampling_config=SamplingConfig(1),
        is_streaming=False,
        cache_salt=salt,
    )
    request.state = LlmRequestState.CONTEXT_INIT
    return request


def takes_limit(manager: Manager) -> bool:
    """Whether its claims can be told where to stop."""
    method = getattr(manager, "prepare_context_cache", None)
    return method is not None and "reuse_limit" in inspect.signature(method).parameters


def claim(manager: Manager, request: Request, limit: int) -> int | None:
    """Give the request a row, and of its prompt's first `limit` tokens what is cached, on the device. Returns the
    tokens claimed; None when there is no row, no page, or the manager is too full to resume."""
    try:
        if takes_limit(manager):
            return manager.prepare_context_cache(request, reuse_limit=limit)
        return _claim_rc26(manager, request, limit)
    except _out_of_memory():
        return None


def _claim_rc26(manager: Manager, request: Request, limit: int) -> int | None:
    """Older claims take the longest match: this one is shown no more tokens than may match."""
    create = manager._create_kv_cache

    def capped(request_id: int, lora: int | None, tokens: Sequence[int] | None, **others: Any) -> Pin | None:
        return create(request_id, lora, None if tokens is None else tokens[:limit], **others)

    shadow = vars(manager)
    shadow["_create_kv_cache"] = capped
    try:
        resumed = manager.prepare_context(request)
    finally:
        del shadow["_create_kv_cache"]
    return manager.kv_cache_map[request.py_request_id].num_committed_tokens if resumed else None


def settle(request: Request, reached: int, block_tokens: int) -> None:
    """Let the first chunk begin behind what was claimed. The position only: a chunk is sized when its wave runs."""
    request.context_current_position = reached
    request.set_prepopulated_prompt_len(reached, block_tokens)


def reserve(manager: Manager, request: Request) -> bool:
    """Take pages for the whole prompt of a claimed request, all or nothing."""
    cache = manager.kv_cache_map[request.py_request_id]
    try:
        return cache.resize(request.prompt_len + manager.num_extra_kv_tokens)
    except _out_of_memory():
        return False


def free(executor: Executor, request: Request) -> None:
    """Give up row, slot and pages; what was committed stays reusable. A request that has none is no error."""
    executor.resource_manager.free_resources(request)


def commit(manager: Manager, request: Request) -> None:
    """Make what is computed of the prompt reusable."""
    manager.update_context_resources(make_batch([request]))


def hold(manager: Manager, tokens: list[int], salt: str | None) -> tuple[Pin, int] | None:
    """Keep the cached prefix of exactly these tokens from being dropped, without a row: (what to close, its length).
    None when the manager has no page for it."""
    from tensorrt_llm.runtime.kv_cache_manager_v2 import ReuseScope

    scope = ReuseScope(lora_id=None, salt=manager._derive_reuse_salt(salt))
    try:
        pin = manager.impl.create_kv_cache(scope, tokens)
    except _out_of_memory():
        return None
    return pin, pin.num_committed_tokens


def probe(manager: Manager, tokens: list[int], salt: str | None) -> int:
    """Tokens of the longest reusable prefix, held by nobody."""
    return manager.probe_prefix_match_length(tokens, cache_salt=salt)


def free_rows(manager: Manager) -> int:
    return manager.index_mapper.num_free_slots()


def room(manager: Manager, level: int) -> Room | None:
    """One tier, 0 the device and 1 the host, in blocks; None if there is no such tier."""
    if level >= len(manager.impl.cache_tier_list):
        return None
    groups = _statistics(manager, level)
    total, available = sum(group.total for group in groups), sum(group.available for group in groups)
    evictable = sum(group.evictable for group in groups)
    return Room(total, available - evictable, evictable)


def _statistics(manager: Manager, level: int) -> Sequence[Any]:
    own = getattr(manager, "_get_storage_statistics", None) or getattr(manager.impl, "get_storage_statistics", None)
    return own(level) if own is not None else manager.impl._storage.get_statistics(level)


# --- events ---------------------------------------------------------------------------------------


def take_events(manager: Manager) -> list[CacheEvent]:
    """What happened since the last call."""
    manager.flush_iteration_events()
    return [_plain(event) for event in manager.get_latest_events(0)]


def _plain(event: Event) -> CacheEvent:
    from tensorrt_llm.runtime.kv_cache_manager_v2 import KVCacheRemovedData, KVCacheStoredData, KVCacheUpdatedData

    data, number = event.data, event.event_id
    if isinstance(data, KVCacheStoredData):
        if event.hash_algo not in (None, EVENT_HASHES):
            raise EngineFault("events name blocks otherwise than asked for", field="kv_cache_event_hash_algo",
                              value=event.hash_algo, limit=EVENT_HASHES)  # fmt: skip
        return CacheEvent(number, stored=tuple((str(block.block_hash), block.cache_level) for block in data.blocks))
    if isinstance(data, KVCacheRemovedData):
        return CacheEvent(number, removed=tuple(map(str, data.block_hashes)))
    if isinstance(data, KVCacheUpdatedData) and data.cache_level is not None:
        return CacheEvent(number, moved=(str(data.block_hash), data.cache_level.new_value))
    return CacheEvent(number)


def block_keys(manager: Manager, tokens: list[int], salt: str | None) -> list[str]:
    """What events will call the full blocks of these tokens."""
    from tensorrt_llm.runtime.kv_cache_manager_v2 import ReuseScope, sequence_to_blockchain_keys

    scope, size = ReuseScope(lora_id=None, salt=manager._derive_reuse_salt(salt)), manager.tokens_per_block
    # The chain begins with the namespace itself, which is no block, and may end with a partial one.
    return [key.hex() for block, key in sequence_to_blockchain_keys(size, scope, tokens) if len(block) == size]


def _out_of_memory() -> type[Exception]:
    from tensorrt_llm.runtime.kv_cache_manager_v2 import OutOfMemoryError

    return OutOfMemoryError
