"""A request as the Python side sees it: the native one with more names."""

from __future__ import annotations

from ...bindings import LlmRequest as NativeLlmRequest
from ...bindings import LlmRequestState, SamplingConfig

__all__ = ["LlmRequest", "LlmRequestState", "SamplingConfig"]


class LlmRequest(NativeLlmRequest):
    def __init__(
        self,
        *,
        request_id: int,
        max_new_tokens: int,
        input_tokens: list[int],
        sampling_config: SamplingConfig,
        is_streaming: bool = False,
        cache_salt: str | None = None,
        lora_task_id: int | None = None,
    ) -> None:
        super().__init__(
            request_id, max_new_tokens, input_tokens, sampling_config, is_streaming, cache_salt, lora_task_id
        )
        self.py_request_id = self.request_id
        self.py_prompt_len = self.prompt_len
        self.py_seq_slot: int | None = None
        self.py_batch_idx: int | None = None
        self.py_ctx_pre_resize_cap: int | None = None
        self.is_dummy_request = False
