"""The batch of one forward: lists of requests, binned by whether this chunk is the last."""

from __future__ import annotations

from .llm_request import LlmRequest


class ScheduledRequests:
    def __init__(self) -> None:
        self.context_requests_chunking: list[LlmRequest] = []
        self.context_requests_last_chunk: list[LlmRequest] = []
        self.generation_requests: list[LlmRequest] = []

    def append_context_request(self, req: LlmRequest) -> None:
        if req.is_last_context_chunk:
            self.context_requests_last_chunk.append(req)
        else:
            self.context_requests_chunking.append(req)

    @property
    def context_requests(self) -> list[LlmRequest]:
        """In the order in which a forward runs them."""
        return self.context_requests_chunking + self.context_requests_last_chunk

    def all_requests(self) -> list[LlmRequest]:
        return self.context_requests + self.generation_requests
