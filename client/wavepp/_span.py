"""What the client's span of a request says.

Owns the attributes and the reason of a failure; `_stream.py` decides when a span is recorded.
"""

from __future__ import annotations

import asyncio
from typing import Final

from wavepp_proto.errors import Cancelled, WaveppError
from wavepp_proto.runtime import span_names as names
from wavepp_proto.runtime.channels import Address
from wavepp_proto.runtime.tracing import Attribute
from wavepp_proto.terms import Admitted, Finished, PrefillRequest

SUBMIT: Final = "wavepp.v1.Prefill/Submit"
RUN: Final = "wavepp.v1.Prefill/Run"
RUN_MANY: Final = "wavepp.v1.Prefill/RunMany"


def outcome_facts(
    request: PrefillRequest,
    pipeline: str,
    admitted: Admitted | None,
    finished: Finished | None,
    method: str,
    server: Address,
) -> tuple[Attribute, ...]:
    """Attributes of the root span of `request`, whatever became of it."""
    return (
        (names.REQUEST_ID, request.request_id),
        (names.PIPELINE, pipeline),
        (names.ENDPOINT, admitted.endpoint if admitted else None),
        (names.LIMITING_STAGE, admitted.limiting_stage if admitted else None),
        (names.PROMPT_TOKENS, finished.prompt_tokens if finished else None),
        (names.GEN_AI_OPERATION_NAME, names.GEN_AI_OPERATION_TEXT_COMPLETION),
        (names.GEN_AI_PROVIDER_NAME, names.GEN_AI_PROVIDER_WAVEPP),
        (names.GEN_AI_REQUEST_TEMPERATURE, request.sampling.temperature),
        (names.GEN_AI_USAGE_INPUT_TOKENS, finished.prompt_tokens if finished else None),
        (names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, finished.cached_tokens if finished else None),
        (names.GEN_AI_USAGE_OUTPUT_TOKENS, 1 if finished else None),
        (names.RPC_SYSTEM_NAME, names.RPC_SYSTEM_GRPC),
        (names.RPC_METHOD, method),
        (names.SERVER_ADDRESS, server.host),
        (names.SERVER_PORT, server.port),
    )


def reason_of(error: BaseException) -> str:
    """What a span says of the error: a stable reason, or the type of what is no answer of ours."""
    if isinstance(error, asyncio.CancelledError):
        return Cancelled.reason
    return error.reason if isinstance(error, WaveppError) else type(error).__name__
