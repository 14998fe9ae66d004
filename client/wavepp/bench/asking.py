"""One prompt of a workload as one request of the public client.

Owns turning streams into tokens just before they are sent (a cell's prompts together would fill the memory) and an
outcome, good or bad, into a `Sample`. Called by the loops in `load.py` through `Ask`.
"""

from __future__ import annotations

from dataclasses import dataclass

from wavepp import AsyncClient, WaveppError
from wavepp.bench.load import Clock
from wavepp.bench.measure import Sample
from wavepp_proto.workload import Prompt


@dataclass(frozen=True, slots=True)
class Asker:
    client: AsyncClient
    clock: Clock
    pipeline: str
    vocabulary: int
    cache_salt: str
    deadline_s: float
    """Of each request, from when it is sent."""
    request_prefix: str = ""
    """Request `number` is named so and its number; empty leaves names to the client."""

    async def __call__(self, number: int, prompt: Prompt, due_s: float) -> Sample:
        token_ids = prompt.packed(self.vocabulary)
        sent_s = self.clock.now()
        blank = Sample(number, prompt.kind, due_s, sent_s, sent_s, prompt.tokens, prompt.reusable_tokens)
        try:
            result = await self.client.prefill(
                token_ids,
                pipeline=self.pipeline,
                deadline=self.deadline_s,
                cache_salt=self.cache_salt,
                request_id=f"{self.request_prefix}{number}" if self.request_prefix else None,
            )
        except WaveppError as error:
            return blank._replace(ended_s=self.clock.now(), reason=error.reason)
        return blank._replace(
            ended_s=self.clock.now(),
            cached_tokens=result.cached_tokens,
            admission_ms=result.timings.admission_ms,
            waves=result.waves,
            attempt=result.attempt,
        )
