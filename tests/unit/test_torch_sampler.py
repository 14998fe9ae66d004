"""The first token: greedy, or drawn with the request's seed, the same on every device and in every batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from wavepp_proto.terms import Sampling
from wavepp_stage.engine.torch.sampler import sample_rows

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 0.0, 0.0]])


def test_rows_keep_their_wave_index_when_greedy() -> None:
    results = sample_rows(LOGITS, [(4, Sampling()), (9, Sampling())])
    assert [(result.row, result.token_id) for result in results] == [(4, 1), (9, 0)]


def test_one_seed_gives_one_token_whatever_the_batch() -> None:
    wanted = [Sampling(temperature=1.0, seed=seed) for seed in range(20)]
    alone = [sample_rows(LOGITS[:1], [(0, sampling)])[0].token_id for sampling in wanted]
    both = [sample_rows(LOGITS, [(0, sampling), (1, Sampling())])[0].token_id for sampling in wanted]
    assert alone == both
    assert len(set(alone)) > 1


def test_draws_follow_the_softmax_of_logits_over_temperature() -> None:
    draws = Counter(
        sample_rows(LOGITS[:1], [(0, Sampling(temperature=2.0, seed=seed))])[0].token_id for seed in range(4000)
    )
    expected = torch.softmax(LOGITS[0] / 2.0, -1).tolist()
    # Four standard deviations of a binomial share.
    for token, share in enumerate(expected):
        assert abs(draws[token] / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5


def test_draw_is_greedy_and_finite_when_temperature_is_tiny() -> None:
    (result,) = sample_rows(LOGITS[:1] * 1e4, [(0, Sampling(temperature=1e-9, seed=3))])
    assert result.token_id == 1


def test_seed_may_be_any_64_bit_number() -> None:
    for seed in (-1, 2**64 - 1, 2**63):
        assert sample_rows(LOGITS[1:], [(0, Sampling(temperature=0.1, seed=seed))])[0].token_id == 0


def test_full_logits_are_packed_float32() -> None:
    (result,) = sample_rows(LOGITS[:1], [(0, Sampling(full_logits=True, top_logprobs=9))])
    assert np.frombuffer(result.logits, "<f4").tolist() == LOGITS[0].tolist()
    assert [best.token_id for best in result.top_logprobs] == [1, 3, 2, 0]


def test_logprobs_are_finite_when_logits_lie_further_apart_than_float32_reaches() -> None:
    (result,) = sample_rows(torch.tensor([[3e38, -3e38]]), [(0, Sampling(temperature=0.5, top_logprobs=2))])
    assert [best.token_id for best in result.top_logprobs] == [0, 1]
    assert np.isfinite(np.array([best.logprob for best in result.top_logprobs], np.float32)).all()
