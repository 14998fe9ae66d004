from typing import Any, Literal

class KvCacheConfig:
    def __init__(
        self,
        *,
        enable_block_reuse: bool = ...,
        enable_partial_reuse: bool = ...,
        max_tokens: int | None = ...,
        max_util_for_resume: float = ...,
        host_cache_size: int | None = ...,
        tokens_per_block: int = ...,
        event_buffer_max_size: int = ...,
        kv_cache_event_hash_algo: str = ...,
        use_kv_cache_manager_v2: bool | Literal["auto"] = ...,
    ) -> None: ...

class TorchLlmArgs:
    kv_cache_config: KvCacheConfig
    def __init__(
        self,
        *,
        model: str,
        skip_tokenizer_init: bool = ...,
        tensor_parallel_size: int = ...,
        pipeline_parallel_size: int = ...,
        pp_partition: list[int] | None = ...,
        dtype: str = ...,
        max_batch_size: int = ...,
        max_num_tokens: int = ...,
        max_seq_len: int | None = ...,
        kv_cache_config: KvCacheConfig = ...,
        enable_chunked_prefill: bool = ...,
        disable_overlap_scheduler: bool = ...,
        cuda_graph_config: Any | None = ...,
    ) -> None: ...
