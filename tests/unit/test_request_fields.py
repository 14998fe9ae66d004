"""Every field of a request is honoured or refused: walked, so that a new one cannot be taken and ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from google.protobuf.descriptor import Descriptor

from tests.harness.fake_pipeline import FakePipeline, record, request, tokens
from wavepp_controller.core.events import AnnounceRequest, HashPrompt, SendRound, Submit
from wavepp_proto import convert
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.terms import Failed, PrefillRequest, RequestId, RowResult, Sampling
from wavepp_proto.v1 import prefill_pb2 as pb
from wavepp_stage.engine import emulated
from wavepp_stage.engine.torch.sampler import sample_rows

OTHER: dict[str, Any] = {
    "request_id": "b",
    "pipeline": "q",
    "deadline_ms": 500,
    "priority": 5,
    "cache_salt": "tenant",
    "adapter": "legal",
    "sampling.temperature": 0.5,
    "sampling.seed": 1,
    "sampling.top_logprobs": 3,
    "sampling.full_logits": True,
    "trace.traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
    "trace.tracestate": "a=b",
    "prompt_tokens": 101,
}
"""By path in PrefillHeader: another value than that of the plain request."""
FRAMES: dict[Descriptor, set[str]] = {
    pb.SubmitRequest.DESCRIPTOR: {"header", "token_ids", "last"},
    pb.RunRequest.DESCRIPTOR: {"header", "token_ids"},
    pb.NumberedRun.DESCRIPTOR: {"number", "run"},
    pb.RunManyRequest.DESCRIPTOR: {"runs", "cancels"},
}
"""What carries a header: the prompt, and the numbering of frames and runs."""


def leaves(message: Descriptor, path: str = "") -> Iterator[str]:
    for field in message.fields:
        inner = field.message_type
        yield from [f"{path}{field.name}"] if inner is None else leaves(inner, f"{path}{field.name}.")


def asked(path: str | None, **plain: Any) -> PrefillRequest:
    """A request of 100 tokens as it crossed the wire, plain but for one field."""
    sent = request("a", 100, **plain)
    header = convert.prefill_header_to_pb(sent)
    if path is not None:
        *outer, last = path.split(".")
        target: Any = getattr(header, outer[0]) if outer else header
        setattr(target, last, OTHER[path])
    frame = pb.SubmitRequest(header=header, token_ids=sent.token_ids, last=True)
    taken = convert.PromptAssembler().add(frame)
    assert taken is not None
    return taken


def submitted(made: PrefillRequest, pipeline: FakePipeline | None = None) -> FakePipeline:
    pipeline = pipeline or FakePipeline()
    pipeline.post(Submit(made, pipeline.now))
    return pipeline


def told(path: str) -> tuple[object, object]:
    """What stages and hashes are told of the plain request and of the other."""
    seen = []
    for each in (None, path):
        pipeline = submitted(asked(each), FakePipeline(members=[record(stage, adapters=True) for stage in (0, 1)]))
        (announced,), (hashed,) = pipeline.of(AnnounceRequest), pipeline.of(HashPrompt)
        owner = path.partition(".")[0]
        seen.append({"sampling": announced.request.sampling, "trace": announced.trace}.get(owner, hashed.scope))
    return seen[0], seen[1]


def is_told(path: str) -> bool:
    plain, other = told(path)
    return plain != other


def names_the_outcome(path: str) -> bool:
    return bool(submitted(asked(path)).outcome(OTHER[path]))


def names_the_pipeline(path: str) -> bool:
    outcome = submitted(asked(path)).outcome("a")
    return isinstance(outcome, Failed) and outcome.error.reason == "UNKNOWN_PIPELINE"


def ends_in_time(path: str) -> bool:
    pipeline = FakePipeline()
    pipeline.hold = {SendRound}
    submitted(asked(path), pipeline)
    pipeline.pass_time(0.6)
    return pipeline.reason("a") == "DEADLINE_EXPIRED"


def overtakes(path: str) -> bool:
    pipeline = FakePipeline()
    pipeline.hold = {SendRound}
    pipeline.submit("front", 100)
    pipeline.submit("before", 100)
    submitted(asked(path), pipeline)
    pipeline.hold = set()
    pipeline.release_held()
    pipeline.pass_time(0.1)
    rounds = [action.round for action in pipeline.of(SendRound) if action.key.stage == 0]
    order = [prepare.key.request_id for one in rounds for prepare in one.prepares]
    return order.index(RequestId("a")) < order.index(RequestId("before"))


def is_refused_or_told(path: str) -> bool:
    """Refused where one engine would ignore it, else part of the hash."""
    outcome = submitted(asked(path)).outcome("a")
    return isinstance(outcome, Failed) and dict(outcome.error.fields)["field"] == path and is_told(path)


def is_compared(path: str) -> bool:
    """With the tokens that really came."""
    with pytest.raises(InvalidRequest) as caught:
        asked(path)
    return caught.value.fields["field"] == path


CHECKS: dict[str, Callable[[str], bool]] = {
    "request_id": names_the_outcome,
    "pipeline": names_the_pipeline,
    "deadline_ms": ends_in_time,
    "priority": overtakes,
    "cache_salt": is_told,
    "adapter": is_refused_or_told,
    "sampling.temperature": is_told,
    "sampling.seed": is_told,
    "sampling.top_logprobs": is_told,
    "sampling.full_logits": is_told,
    "trace.traceparent": is_told,
    "trace.tracestate": is_told,
    "prompt_tokens": is_compared,
}


def test_every_field_of_a_request_is_looked_at() -> None:
    assert set(leaves(pb.PrefillHeader.DESCRIPTOR)) == CHECKS.keys() == OTHER.keys()
    for message, known in FRAMES.items():
        assert {field.name for field in message.fields} == known, message.name


@pytest.mark.parametrize("path", CHECKS)
def test_field_of_a_request_is_honoured_or_refused(path: str) -> None:
    assert CHECKS[path](path)


# --- what an engine makes of sampling -----------------------------------------------------------

LOGITS = torch.randn(1, 1000, generator=torch.Generator().manual_seed(7))


def by_torch(sampling: Sampling) -> RowResult:
    """torch, and trtllm, which samples with the same code."""
    return sample_rows(LOGITS, [(0, sampling)])[0]


def by_emulated(sampling: Sampling) -> RowResult:
    return emulated._answer(0, 12345, sampling, 1000)


@pytest.mark.parametrize("engine", [by_torch, by_emulated])
@pytest.mark.parametrize("field", [field.name for field in fields(Sampling)])
def test_engine_honours_every_field_of_sampling(engine: Callable[[Sampling], RowResult], field: str) -> None:
    plain = Sampling(temperature=5.0, seed=3)
    assert engine(replace(plain, **{field: OTHER[f"sampling.{field}"]})) != engine(plain)


@pytest.mark.parametrize("engine", [by_torch, by_emulated])
def test_every_bit_of_a_seed_counts(engine: Callable[[Sampling], RowResult]) -> None:
    """torch's generator takes the low 32 bits alone: seeds that differ above them drew the same token."""
    seeds = [0, *(1 << bit for bit in range(64))]
    drawn = [engine(Sampling(temperature=100.0, seed=seed)).token_id for seed in seeds]
    assert len(set(drawn)) > 55  # of a thousand nearly equal tokens, 65 draws repeat about two


def test_prompt_is_the_tokens_that_came() -> None:
    assert asked(None).token_ids == tokens(100)
