"""What the end of a stream to a stage means for the formation."""

from __future__ import annotations

import socket

import grpc
import grpc.aio
import pytest

from wavepp_controller.runtime.stream_endings import is_refused, judge
from wavepp_proto import convert
from wavepp_proto.errors import (
    EngineFault,
    FormationEnded,
    InternalError,
    InvalidRequest,
    StageLost,
    StaleMessage,
    WaveppError,
)
from wavepp_proto.terms import DaemonKey, PipelineId, StageIndex


def untyped(code: grpc.StatusCode, text: str = "gRPC's own words") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), text)


def typed(error: WaveppError) -> grpc.aio.AioRpcError:
    code, details, trailers = convert.to_status(error)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details)


@pytest.mark.parametrize(
    ("cause", "reason", "resumable"),
    [
        pytest.param(None, FormationEnded.reason, False, id="closed in order"),
        pytest.param(untyped(grpc.StatusCode.UNAVAILABLE), StageLost.reason, True, id="connection broke"),
        pytest.param(
            untyped(grpc.StatusCode.INTERNAL, "Internal error from Core"),
            StageLost.reason,
            True,
            id="broke while written",
        ),
        pytest.param(typed(InternalError("broke")), InternalError.reason, False, id="a bug that it tells"),
        pytest.param(untyped(grpc.StatusCode.CANCELLED), StageLost.reason, True, id="dropped by its server"),
        pytest.param(typed(StaleMessage("gap", field="ordinal", value=7)), StaleMessage.reason, True, id="gap"),
        pytest.param(StaleMessage("gap", field="ordinal", value=7), StaleMessage.reason, True, id="gap, seen here"),
        pytest.param(
            typed(StaleMessage("old", field="incarnation", value=7)), StaleMessage.reason, False, id="other incarnation"
        ),
        pytest.param(typed(StaleMessage("old", field="epoch", value=7)), StaleMessage.reason, False, id="other epoch"),
        pytest.param(typed(FormationEnded("over")), FormationEnded.reason, False, id="formation over"),
        pytest.param(typed(EngineFault("broke")), EngineFault.reason, False, id="engine fault"),
        pytest.param(InvalidRequest("parts mix"), InvalidRequest.reason, False, id="nonsense"),
        pytest.param(untyped(grpc.StatusCode.UNKNOWN), "INTERNAL", False, id="a bug over there"),
    ],
)
def test_ending_is_judged_by_its_type(
    cause: grpc.aio.AioRpcError | WaveppError | None, reason: str, resumable: bool
) -> None:
    ending = judge(DaemonKey(PipelineId("p"), StageIndex(3)), cause)
    assert (ending.error.reason, ending.resumable) == (reason, resumable)


async def test_refusal_is_known_from_the_operating_system_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert not await is_refused(f"127.0.0.1:{port}")
        assert not await is_refused(f"localhost:{port}")
    assert await is_refused(f"127.0.0.1:{port}")
    assert await is_refused(f"localhost:{port}")
    assert not await is_refused(f"no-such-host.invalid:{port}")
