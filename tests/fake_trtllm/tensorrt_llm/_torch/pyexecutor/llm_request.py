"""A request as the Python side sees it: the native one with more names."""

from __future__ import annotations

from typing import Any

from ...bindings import LlmRequest as NativeLlmRequest
from ...bindings import LlmRequestState, SamplingConfig

__all__ = ["LlmRequest", "LlmRequestState", "SamplingConfig"]


class LlmRequest(NativeLlmRequest):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.py_request_id = self.request_id
        self.py_prompt_len = self.prompt_len
        self.py_seq_slot: int | None = None
        self.py_batch_idx: int | None = None
        self.py_ctx_pre_resize_cap: int | None = None
        self.is_dummy_request = False
