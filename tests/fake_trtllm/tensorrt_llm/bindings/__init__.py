"""Stand-ins for classes that are native in the original."""

from __future__ import annotations

import enum


class SamplingConfig:
    def __init__(self, beam_width: int = 1) -> None:
        self.beam_width = beam_width


class LlmRequestState(enum.Enum):
    CONTEXT_INIT = 10
    GENERATION_IN_PROGRESS = 13
    GENERATION_COMPLETE = 20


class LlmRequest:
    """A prompt and the cursors over it: position, chunk size, length of the prefix that was reused."""

    def __init__(
        self,
        request_id: int,
        max_new_tokens: int,
        input_tokens: list[int],
        sampling_config: SamplingConfig,
        is_streaming: bool,
        cache_salt: str | None = None,
        lora_task_id: int | None = None,
    ) -> None:
        if type(input_tokens) is not list or any(type(token) is not int for token in input_tokens):
            raise TypeError("input_tokens: a list of Python integers")
        if type(request_id) is not int or not 0 <= request_id < 1 << 64:
            raise TypeError("request_id: an unsigned 64-bit integer")
        if not input_tokens:
            raise ValueError("input_tokens: empty")
        self.request_id = request_id
        self.max_new_tokens = max_new_tokens
        self.sampling_config = sampling_config
        self.is_streaming = is_streaming
        self.cache_salt = cache_salt
        self.lora_task_id = lora_task_id
        self._tokens = input_tokens
        self._state = LlmRequestState.CONTEXT_INIT
        self._prepopulated = self._position = 0
        self._chunk = len(input_tokens)

    @property
    def prompt_len(self) -> int:
        return len(self._tokens)

    @property
    def state(self) -> LlmRequestState:
        return self._state

    @state.setter
    def state(self, state: LlmRequestState) -> None:
        self._state = state

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self._tokens)

    @property
    def prepopulated_prompt_len(self) -> int:
        return self._prepopulated

    @property
    def context_current_position(self) -> int:
        return self._position

    @context_current_position.setter
    def context_current_position(self, position: int) -> None:
        self._need_context()
        self._position = position

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self._position

    @property
    def context_chunk_size(self) -> int:
        return self._chunk

    @context_chunk_size.setter
    def context_chunk_size(self, size: int) -> None:
        self._need_context()
        if size < 0:
            raise RuntimeError("context chunk size must not be negative")
        self._chunk = min(size, self.context_remaining_length)

    @property
    def is_first_context_chunk(self) -> bool:
        return self._position == self._prepopulated

    @property
    def is_last_context_chunk(self) -> bool:
        return self._position + self._chunk == self.prompt_len

    def set_prepopulated_prompt_len(self, prepopulated_prompt_len: int, kv_tokens_per_block: int) -> None:
        """The first chunk begins here. A pending chunk that is not the last keeps its size, shifted, and is cut so
        that it ends on a block boundary; the last one shrinks."""
        if prepopulated_prompt_len >= self.prompt_len:
            raise RuntimeError("at least one token must be computed")
        self._prepopulated = prepopulated_prompt_len
        if prepopulated_prompt_len == 0:
            return
        end = prepopulated_prompt_len + self._chunk
        if end < self.prompt_len:
            end -= end % kv_tokens_per_block
        self._position = prepopulated_prompt_len
        self._chunk = min(end, self.prompt_len) - prepopulated_prompt_len

    def move_to_next_context_chunk(self) -> None:
        self._need_context()
        self._position += self._chunk
        self._chunk = 0

    def _need_context(self) -> None:
        if self._state is not LlmRequestState.CONTEXT_INIT:
            raise RuntimeError(f"the request is {self._state.name}, not in its context phase")
