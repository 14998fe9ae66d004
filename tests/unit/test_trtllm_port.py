"""The object that stands for TensorRT-LLM's pipeline communicator during a wave."""

from __future__ import annotations

import pytest
import torch

from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.trtllm.facts import PARTS
from wavepp_stage.engine.trtllm.pp_comm import PayloadPort, payload_rows

HIDDEN = 4
CPU = torch.device("cpu")
SOURCE = torch.arange(6 * PARTS * HIDDEN, dtype=torch.float32).view(6, -1)


def test_rows_are_taken_in_the_batch_s_order_and_put_back_where_they_were() -> None:
    """Payload rows 0-1 and 4-5 are live, the later ones run first; rows 2-3 belong to a void row and stay zero."""
    port, target = PayloadPort(HIDDEN), torch.zeros_like(SOURCE)
    port.begin(payload_rows([(4, 2), (0, 2)], CPU), SOURCE, target)
    hidden, residual = torch.empty(4, HIDDEN), torch.empty(4, HIDDEN)
    port.recv(hidden)
    port.recv(residual, 0)
    assert torch.equal(hidden, SOURCE[[4, 5, 0, 1], :HIDDEN])
    assert torch.equal(residual, SOURCE[[4, 5, 0, 1], HIDDEN:])
    port.send(hidden)
    port.send(residual, 2)
    port.end()
    assert torch.equal(target[[0, 1, 4, 5]], SOURCE[[0, 1, 4, 5]])
    assert not target[2:4].any()


def test_second_part_stays_zero_when_layers_carry_no_residual() -> None:
    port, target = PayloadPort(HIDDEN), torch.zeros(1, PARTS * HIDDEN)
    port.begin(payload_rows([(0, 1)], CPU), None, target)
    port.send(torch.ones(1, HIDDEN))
    port.end()
    assert target.tolist() == [[1.0] * HIDDEN + [0.0] * HIDDEN]


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(3, HIDDEN), torch.empty(2, HIDDEN + 1), torch.empty(2, HIDDEN, dtype=torch.bfloat16)],
    ids=["rows", "width", "dtype"],
)
def test_exchange_is_refused_when_a_tensor_does_not_fit(tensor: torch.Tensor) -> None:
    """TensorRT-LLM's own would hang, or hand over garbage."""
    port = PayloadPort(HIDDEN)
    port.begin(payload_rows([(0, 2)], CPU), SOURCE, None)
    with pytest.raises(EngineFault):
        port.recv(tensor)


def test_exchange_is_refused_when_a_third_part_is_asked_for() -> None:
    port = PayloadPort(HIDDEN)
    port.begin(payload_rows([(0, 2)], CPU), SOURCE, None)
    port.recv(torch.empty(2, HIDDEN))
    port.recv(torch.empty(2, HIDDEN))
    with pytest.raises(EngineFault):
        port.recv(torch.empty(2, HIDDEN))


def test_exchange_is_refused_outside_a_wave() -> None:
    with pytest.raises(EngineFault):
        PayloadPort(HIDDEN).send(torch.empty(1, HIDDEN))


@pytest.mark.parametrize("part", ["source", "target"])
def test_wave_is_refused_when_its_layers_exchanged_nothing(part: str) -> None:
    port = PayloadPort(HIDDEN)
    ends = {"source": None, "target": None, part: SOURCE}
    port.begin(payload_rows([(0, 2)], CPU), **ends)
    with pytest.raises(EngineFault):
        port.end()
