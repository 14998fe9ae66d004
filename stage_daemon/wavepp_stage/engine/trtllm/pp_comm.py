"""Stands where TensorRT-LLM keeps its pipeline communicator while a wave runs.

Owns the exchange of one wave: its layers' receives are served from the payload that our link brought, and what they
send is collected for it. So a wave has a header, an ordinal and a deadline, and a row that is void on one stage alone
shifts nothing: live rows are taken from their payload rows, in the batch's order, and put back there.

    payload row   [ hidden | residual ]      both as wide as the model; a model without residual leaves zeros
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.trtllm.facts import PARTS


class PayloadPort:
    """One for the life of a load; `begin` and `end` enclose a wave."""

    def __init__(self, hidden: int) -> None:
        self.mapping: object | None = None
        """TensorRT-LLM's communicators have one; nothing here asks it."""
        self._hidden = hidden
        self._rows: Tensor | None = None
        self._source: Tensor | None = None
        self._target: Tensor | None = None
        self._received = 0
        self._sent = 0

    def begin(self, rows: Tensor, source: Tensor | None, target: Tensor | None) -> None:
        """`rows`: int64 [live tokens], the payload row of each token of the batch. `source` is what came, None on the
        first stage; `target`, zeros, is filled for the next stage, None on the last."""
        self._rows, self._source, self._target = rows, source, target
        self._received = self._sent = 0

    def end(self) -> None:
        """The wave has run. Raises EngineFault where its layers exchanged nothing, as if it had been one stage."""
        source, target = self._source, self._target
        self.drop()
        if source is not None and not self._received:
            raise EngineFault("the band received nothing", field="pp_comm", value=0, limit=1)
        if target is not None and not self._sent:
            raise EngineFault("the band sent nothing", field="pp_comm", value=0, limit=1)

    def drop(self) -> None:
        """Hold no tensor of a wave any more."""
        self._rows = self._source = self._target = None

    # --- called by the layers ---------------------------------------------------------------------

    def recv(self, tensor: Tensor, src: int | None = None) -> None:
        """Fill `tensor`, [live tokens, hidden], with the payload's next part."""
        part = self._part(self._source, self._received, tensor, "receive")
        tensor.copy_(part.index_select(0, self._need_rows()))
        self._received += 1

    def send(self, tensor: Tensor, dest: int | None = None) -> None:
        part = self._part(self._target, self._sent, tensor, "send")
        part.index_copy_(0, self._need_rows(), tensor)
        self._sent += 1

    def _need_rows(self) -> Tensor:
        assert self._rows is not None
        return self._rows

    def _part(self, payload: Tensor | None, number: int, tensor: Tensor, doing: str) -> Tensor:
        if payload is None or self._rows is None:
            raise EngineFault(f"nothing to {doing} in this wave", field="pp_comm", value=doing)
        expected = (len(self._rows), self._hidden)
        fits = tuple(tensor.shape) == expected and tensor.dtype == payload.dtype and number < PARTS
        if not fits:
            raise EngineFault(
                f"cannot {doing} part {number} of a payload: {tuple(tensor.shape)} {tensor.dtype}",
                field="pp_comm",
                value=str(tuple(tensor.shape)),
                limit=str((*expected, str(payload.dtype))),
            )
        return payload[:, number * self._hidden : (number + 1) * self._hidden]


def payload_rows(spans: list[tuple[int, int]], device: torch.device) -> Tensor:
    """Payload row of each token, for live rows given as (first payload row, length) in the batch's order."""
    return torch.cat([torch.arange(first, first + length) for first, length in spans]).to(device)
