"""Names of spans and attributes, as constants (DESIGN.md).

Owns the vocabulary of a trace: which spans exist, who makes each one, under which parent, and the
keys of their attributes. Semantic-convention keys are copied as strings, because importing the
convention package costs a second. Does not own recording (`tracing.py`) or drawing (`timeline.py`).

One trace per request; the arrow is "parent of", the right column is the process that records it:

    prefill                      client
      prefill.request            controller   its context is the one announced to every stage
        admission                controller
          queue, hash, hint, announce, capacity_wait, wait_behind, reconcile
          pin_reserve            controller   one per round
            vote                 controller   one per stage
        prepare                  stage        one per round entry
        schedule                 controller
        execute                  stage        one per row of a wave
        finish                   controller
    wave                         stage        a root of its own, LINKED to its rows' requests
    copy                         stage        a root of its own: one lot of blocks between device and host
"""

from __future__ import annotations

from typing import Final

# Spans
PREFILL: Final = "prefill"
REQUEST: Final = "prefill.request"
ADMISSION: Final = "admission"
QUEUE: Final = "queue"
HASH: Final = "hash"
HINT: Final = "hint"
ANNOUNCE: Final = "announce"
PIN_RESERVE: Final = "pin_reserve"
VOTE: Final = "vote"
RECONCILE: Final = "reconcile"
CAPACITY_WAIT: Final = "capacity_wait"
WAIT_BEHIND: Final = "wait_behind"
"""Another request is computing the same prefix."""
SCHEDULE: Final = "schedule"
PREPARE: Final = "prepare"
EXECUTE: Final = "execute"
WAVE: Final = "wave"
COPY: Final = "copy"
FINISH: Final = "finish"

# Span kinds, by the names OpenTelemetry gives them
INTERNAL: Final = "internal"
CLIENT: Final = "client"
SERVER: Final = "server"

# Attributes: who and what
REQUEST_ID: Final = "wavepp.request_id"
ATTEMPT: Final = "wavepp.attempt"
PIPELINE: Final = "wavepp.pipeline"
STAGE: Final = "wavepp.stage"
RANK: Final = "wavepp.rank"
INCARNATION: Final = "wavepp.incarnation"
EPOCH: Final = "wavepp.epoch"
FORMATION: Final = "wavepp.formation"
OUTCOME: Final = "wavepp.outcome"
"""On finish: finished, or the reason of the error. On vote and prepare: the vote's outcome."""

# Attributes: admission
LIMITING_STAGE: Final = "wavepp.limiting_stage"
ENDPOINT: Final = "wavepp.endpoint"
"""Tokens reused on every stage."""
CANDIDATE: Final = "wavepp.candidate"
"""Endpoint that the hint proposed to the first round (tokens)."""
OWN_HIT: Final = "wavepp.own_hit"
"""On vote and prepare: tokens that this stage alone could reuse."""
TOKENS_LOST_TO_AGREEMENT: Final = "wavepp.tokens_lost_to_agreement"
TOKENS_LOST_TO_SNAPSHOTS: Final = "wavepp.tokens_lost_to_snapshots"
SHARED: Final = "wavepp.shared_tokens"
"""On admission: tokens of the endpoint that waiting behind others won."""
FRONT: Final = "wavepp.front"
"""On wait_behind: the request that computes the prefix."""
BOUNDARY: Final = "wavepp.boundary"
"""On wait_behind: where the shared prefix ends (tokens)."""
WAIT_REASON: Final = "wavepp.wait_reason"
ROUNDS: Final = "wavepp.rounds"
ROUND: Final = "wavepp.round"
"""On pin_reserve: the round's ordinal on the first daemon asked. On vote: on this daemon."""
SHORTFALL_BLOCKS: Final = "wavepp.shortfall_blocks"
PROMPT_TOKENS: Final = "wavepp.prompt_tokens"

# Attributes: execution
WAVE_ORDINAL: Final = "wavepp.wave"
TOKENS: Final = "wavepp.tokens"
ROWS: Final = "wavepp.rows"
CHUNK_START: Final = "wavepp.chunk_start"
CHUNK_LENGTH: Final = "wavepp.chunk_length"
VOID: Final = "wavepp.void"

# Attributes of a copy
DIRECTION: Final = "wavepp.direction"
"""offload (device to host) or onboard."""
BLOCKS: Final = "wavepp.blocks"

# Attributes of a wave: what its stage did between the previous wave and this one (microseconds),
# in the order in which the four lie before the compute start.
IDLE_US: Final = "wavepp.idle_us"
ADMISSION_WAIT_US: Final = "wavepp.admission_wait_us"
PREPARING_US: Final = "wavepp.preparing_us"
ACTIVATION_WAIT_US: Final = "wavepp.activation_wait_us"

# Semantic conventions: process and service
SERVICE_NAME: Final = "service.name"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
SERVICE_VERSION: Final = "service.version"
PROCESS_PID: Final = "process.pid"
ERROR_TYPE: Final = "error.type"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"

# Semantic conventions: RPC
RPC_SYSTEM_NAME: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
"""Fully qualified, such as wavepp.v1.Prefill/Submit."""
RPC_RESPONSE_STATUS_CODE: Final = "rpc.response.status_code"
RPC_SYSTEM_GRPC: Final = "grpc"

# Semantic conventions: generative AI
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_OPERATION_TEXT_COMPLETION: Final = "text_completion"
GEN_AI_PROVIDER_WAVEPP: Final = "wavepp"
