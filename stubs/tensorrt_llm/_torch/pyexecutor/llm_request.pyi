from collections.abc import Sequence
from enum import Enum

from tensorrt_llm.bindings import SamplingConfig

class LlmRequestState(Enum):
    CONTEXT_INIT = ...

class LlmRequest:
    state: LlmRequestState
    context_current_position: int
    context_chunk_size: int
    py_request_id: int
    def __init__(
        self,
        *,
        request_id: int,
        max_new_tokens: int,
        input_tokens: Sequence[int],
        sampling_config: SamplingConfig,
        is_streaming: bool,
        cache_salt: str | None = ...,
    ) -> None: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def context_remaining_length(self) -> int: ...
    def set_prepopulated_prompt_len(self, prepopulated_prompt_len: int, kv_tokens_per_block: int) -> None: ...
    def move_to_next_context_chunk(self) -> None: ...
