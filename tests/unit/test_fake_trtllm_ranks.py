"""The stand-in's ranks as processes: what they agree on at the start, and that one alone does not hang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import tiny_models
from tests.harness.fake_ranks import PROMPT, run_ranks
from tests.harness.ports import free_port


@pytest.mark.processes
@pytest.mark.parametrize(
    ("tp", "partition", "layers"),
    [(1, [3, 2], [[0, 1, 2], [3, 4]]), (2, [5], [[0, 1, 2, 3, 4]] * 2)],
    ids=["two uneven stages", "two ranks of one stage"],
)
def test_ranks_answer_as_the_unsplit_model_when_they_load_together(
    tp: int, partition: list[int], layers: list[list[int]], tmp_path: Path
) -> None:
    folder = tiny_models.build("llama", tmp_path)
    seen = run_ranks(folder, free_port(), tp=tp, partition=partition, blocks=[32, 24])
    assert [rank["layers"] for rank in seen] == layers
    # The smaller pool counts, and both have room above what resuming may use.
    assert {rank["blocks"] for rank in seen} == {24}
    heads = 2 // tp
    assert [rank["bytes_per_token"] for rank in seen] == [len(own) * 2 * heads * 16 * 4 for own in layers]
    assert [rank["events"] > 0 for rank in seen] == [True, False]
    expected = tiny_models.unsplit_logits(folder, PROMPT)
    last = [rank["logits"] for rank in seen if rank["logits"] is not None]
    assert len(last) == tp
    for logits in last:
        assert torch.allclose(torch.tensor(logits), expected, atol=1e-5)
    assert [bool(rank["alone"]) for rank in seen] == [True, False]
    assert "not every rank joined" in seen[0]["alone"]
