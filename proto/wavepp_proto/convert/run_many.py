"""Many runs on one stream: numbered requests and cancels, and their answers.

Owns what a run on a shared stream must keep to beyond the rules of any run (`prompt.py`). What a client says at the
same time is one message, made of parts: encodings of one message concatenate. Called by client and controller.
"""

from __future__ import annotations

from collections.abc import Iterable

from wavepp_proto import limits
from wavepp_proto.convert import _check
from wavepp_proto.convert import common as c
from wavepp_proto.convert.prefill import run_response_from_pb
from wavepp_proto.convert.prompt import run_request_from_pb, run_request_to_pb
from wavepp_proto.errors import InvalidRequest, WaveppError, from_info
from wavepp_proto.terms import Admitted, Failed, Finished, PipelineId, PrefillRequest, RequestId
from wavepp_proto.v1 import prefill_pb2 as pb

RUN_MANY_METHOD = "/wavepp.v1.Prefill/RunMany"
"""For a call that takes its messages as bytes, as they are made here."""


def may_share_stream(request: PrefillRequest) -> bool:
    """False for prompts, and for answers, that others would wait behind."""
    return len(request.token_ids) <= limits.MAX_STREAM_RUN_BYTES and not request.sampling.full_logits


def run_part(number: int, request: PrefillRequest) -> bytes:
    """A RunManyRequest of one run, serialised. Raises as `check_request` does."""
    numbered = pb.NumberedRun(number=number, run=run_request_to_pb(request))
    return pb.RunManyRequest(runs=(numbered,)).SerializeToString()


def cancels_part(numbers: Iterable[int]) -> bytes:
    """A RunManyRequest of cancels, serialised."""
    return pb.RunManyRequest(cancels=numbers).SerializeToString()


def check_run_many(msg: pb.RunManyRequest) -> None:
    """Raise InvalidRequest for a message that would keep an event loop too long."""
    _check.at_most("runs", len(msg.runs), limits.MAX_MESSAGE_RUNS)
    _check.at_most("cancels", len(msg.cancels), limits.MAX_STREAM_RUNS)


def shared_run_from_pb(msg: pb.RunRequest) -> PrefillRequest:
    """Raises as `run_request_from_pb` does, and for what may not share a stream."""
    request = run_request_from_pb(msg)
    _check.payload("token_ids", len(request.token_ids), limits.MAX_STREAM_RUN_BYTES)
    if request.sampling.full_logits:
        raise InvalidRequest("full logits need a call of their own", field="full_logits", value="true")
    return request


def refusal_to_pb(number: int, error: WaveppError) -> pb.RunAnswer:
    out = pb.RunAnswer(number=number)
    c.fill_error(out.refused, error.info())
    return out


def run_answer_from_pb(
    request_id: RequestId, msg: pb.RunAnswer
) -> tuple[PipelineId, Admitted | None, Finished | Failed]:
    """Raises what the run was refused with, InvalidRequest when there is no answer in it."""
    if msg.HasField("refused"):
        raise from_info(c.error_from_pb(msg.refused))
    _check.present("response", msg.HasField("response"))
    return run_response_from_pb(request_id, msg.response)
