"""Verdicts at the door (DESIGN.md): what can never be served is refused at once, typed.

Owns the checks of one request against itself, against the model and against the pools. Each raises the
error that names field, value and limit; nothing is held or queued by then. Does not own the checks
that need the machine's state (duplicates, queue room, draining): `machine` does those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from wavepp_controller.core.request import Request
from wavepp_proto import limits
from wavepp_proto.errors import EmptyPrompt, InvalidRequest, NeverFits, PromptTooLong, TokenOutOfRange, TooLate
from wavepp_proto.hashing import TOKEN_BYTES, blocks_for
from wavepp_proto.terms import CacheGroup, MemberRecord, ModelFacts, PrefillRequest, StageIndex

LEAST_SLOTS = 2
"""One working state, and the snapshot at the end of the prompt."""


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """What a verdict must know of a pipeline."""

    model: ModelFacts
    block_tokens: int
    pool_blocks: int
    """Blocks of the daemon that has fewest; headroom is no limit, an oversized request may use it."""
    pool_stage: StageIndex
    """Its stage."""
    state_slots: int | None = None
    """Recurrent slots of the daemon that has fewest; None where no band has recurrent layers."""
    state_stage: StageIndex | None = None
    layout: str = ""
    """What cached blocks depend on besides the model: part of every block's hash."""
    adapters: bool = False
    """Every engine applies the adapter that a request names."""

    @classmethod
    def of(cls, records: Iterable[MemberRecord]) -> PipelineFacts:
        """Facts of the members that are there, in (stage, rank) order; at least one."""
        members = list(records)
        poorest = min(members, key=lambda record: record.pool_blocks)
        first = members[0]
        facts = cls(
            first.model,
            first.block_tokens,
            poorest.pool_blocks,
            poorest.key.stage,
            layout=_layout(first),
            adapters=all(record.adapters for record in members),
        )
        recurrent = [record for record in members if CacheGroup.RECURRENT in record.groups]
        if not recurrent:
            return facts
        fewest = min(recurrent, key=lambda record: record.state_slots)
        return replace(facts, state_slots=fewest.state_slots, state_stage=fewest.key.stage)


def _layout(record: MemberRecord) -> str:
    told = {field.name: getattr(record.numerics, field.name) for field in fields(record.numerics)}
    return " ".join([f"B{record.block_tokens}", *(f"{name}={value!r}" for name, value in told.items() if value)])


def check_request(request: PrefillRequest) -> None:
    """Everything that can be judged without a pipeline; raises InvalidRequest or EmptyPrompt."""
    _length("request_id", request.request_id, limits.MAX_REQUEST_ID_CHARS, required=True)
    _length("pipeline", request.pipeline or "", limits.MAX_NAME_CHARS)
    _length("cache_salt", request.cache_salt, limits.MAX_NAME_CHARS)
    _length("adapter", request.adapter, limits.MAX_NAME_CHARS)
    if request.deadline_ms is not None:
        _between("deadline_ms", request.deadline_ms, 1, limits.MAX_DEADLINE_MS)
    _between("priority", request.priority, limits.MIN_PRIORITY, limits.MAX_PRIORITY)
    _between("top_logprobs", request.sampling.top_logprobs, 0, limits.MAX_TOP_LOGPROBS)
    temperature = request.sampling.temperature
    if not math.isfinite(temperature) or temperature < 0:
        raise InvalidRequest(
            f"temperature {temperature} is not a finite number >= 0", field="temperature", value=temperature, limit=0
        )
    if len(request.token_ids) % TOKEN_BYTES:
        raise InvalidRequest(
            f"{len(request.token_ids)} bytes are not packed int32 tokens",
            field="token_ids",
            value=len(request.token_ids),
            limit=TOKEN_BYTES,
        )
    if not request.token_ids:
        raise EmptyPrompt("the prompt has no tokens", field="token_ids", value=0, limit=1)


def check_against(request: PrefillRequest, facts: PipelineFacts) -> None:
    """Everything that depends on the model; raises PromptTooLong, InvalidRequest or TokenOutOfRange."""
    window = min(facts.model.window, limits.MAX_PROMPT_TOKENS)
    if request.prompt_tokens > window:
        raise PromptTooLong(
            f"{request.prompt_tokens} tokens are more than the window of {window}",
            field="token_ids",
            value=request.prompt_tokens,
            limit=window,
        )
    if request.sampling.full_logits and facts.model.vocabulary > limits.MAX_VOCABULARY:
        raise InvalidRequest(
            f"a row of {facts.model.vocabulary} logits does not fit one message",
            field="full_logits",
            value=facts.model.vocabulary,
            limit=limits.MAX_VOCABULARY,
        )
    check_tokens(request.token_ids, facts.model.vocabulary)


def check_plan(request: PrefillRequest, facts: PipelineFacts) -> None:
    """Everything that depends on the daemons of a formation, and that another may have; raises InvalidRequest or
    NeverFits."""
    check_adapter(request, facts)
    check_fits(request.prompt_tokens, facts)


def check_adapter(request: PrefillRequest, facts: PipelineFacts) -> None:
    """InvalidRequest if the request names an adapter that a stage would ignore: the base model would answer."""
    if request.adapter and not facts.adapters:
        raise InvalidRequest(
            "the engines of this pipeline apply no adapters",
            field="adapter",
            value=request.adapter,
            limit="none",
        )


def check_tokens(token_ids: bytes, vocabulary: int) -> None:
    """TokenOutOfRange naming the first bad token; one pass over packed int32."""
    tokens = np.frombuffer(token_ids, dtype="<i4")
    if int(tokens.min()) >= 0 and int(tokens.max()) < vocabulary:
        return
    index = int(np.argmax((tokens < 0) | (tokens >= vocabulary)))
    raise TokenOutOfRange(
        f"token {int(tokens[index])} at index {index} is outside the vocabulary of {vocabulary}",
        field="token_ids",
        index=index,
        value=int(tokens[index]),
        limit=vocabulary,
    )


def check_fits(prompt_tokens: int, facts: PipelineFacts) -> None:
    """NeverFits if the prompt needs more blocks, or a prompt more recurrent slots, than a stage could ever give."""
    if facts.state_slots is not None and facts.state_slots < LEAST_SLOTS:
        raise NeverFits(
            f"a request needs {LEAST_SLOTS} recurrent slots, stage {facts.state_stage} has {facts.state_slots}",
            field="state_slots",
            value=LEAST_SLOTS,
            limit=facts.state_slots,
            stage=facts.state_stage,
        )
    needed = blocks_for(prompt_tokens, facts.block_tokens)
    if needed > facts.pool_blocks:
        raise NeverFits(
            f"{prompt_tokens} tokens need {needed} blocks, stage {facts.pool_stage} has {facts.pool_blocks}",
            field="token_ids",
            value=needed,
            limit=facts.pool_blocks,
            stage=facts.pool_stage,
            block_tokens=facts.block_tokens,
        )


def too_late(request: Request, wait_s: float | None, now: float) -> TooLate | None:
    """The verdict on a request that would start `wait_s` seconds from now; None if that is in time, or not known."""
    if wait_s is None or now + wait_s <= request.deadline:
        return None
    return TooLate(
        f"request {request.id} would start in {wait_s:.1f} s and has {request.deadline - now:.1f} s left",
        field="deadline_ms",
        value=round((now + wait_s - request.arrived) * 1e3),
        limit=round((request.deadline - request.arrived) * 1e3),
    )


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(
            f"{name} {value} is not in [{low}, {high}]", field=name, value=value, limit=low if value < low else high
        )


def _length(name: str, value: str, most: int, *, required: bool = False) -> None:
    if len(value) > most:
        raise InvalidRequest(
            f"{name} of {len(value)} characters is longer than {most}", field=name, value=len(value), limit=most
        )
    if (required and not value) or not value.isprintable():
        raise InvalidRequest(f"{name} must be printable text", field=name, value=ascii(value)[:64], limit="printable")
