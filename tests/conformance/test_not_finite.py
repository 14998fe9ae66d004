"""A prompt that computes NaN, over the whole product: its request alone fails, typed, and poisons no prefix."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.harness import tiny_models
from tests.harness.cluster import EMULATED, Cluster
from wavepp import PrefillResult, Sampling, errors
from wavepp.commands.prefill import _as_dict
from wavepp_proto.terms import LinkKind
from wavepp_stage.engine.emulated import expected_first_token
from wavepp_stage.engine.torch.engine import TorchEngine

pytestmark = pytest.mark.engines("emulated", why="it spoils an engine from inside, or plants the fault by its preset")
BAD = 7
FULL = Sampling(full_logits=True, top_logprobs=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("qwen3", tmp_path_factory.mktemp("models"))


def prompt(length: int, seed: int, vocabulary: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(BAD + 1, vocabulary, length)]


def assert_exact(model: Path, tokens: list[int], result: PrefillResult) -> None:
    expected = tiny_models.unsplit_logits(model, tokens).numpy()
    assert result.logits is not None
    assert np.abs(result.logits - expected).max() <= 1e-4
    assert result.first_token == int(expected.argmax())


async def failed(cluster: Cluster, tokens: list[int], sampling: Sampling = FULL) -> errors.NonFinite:
    """Its reason and that a caller may not try again are part of the type: the same prompt would compute NaN again."""
    with pytest.raises(errors.NonFinite) as caught:
        await cluster.client.prefill(tokens, sampling=sampling)
    return caught.value


@pytest.mark.parametrize("link", [LinkKind.GLOO, LinkKind.GRPC])
async def test_prompts_that_share_its_prefix_are_exact_when_a_prompts_embedding_is_nan(
    model: Path, link: LinkKind
) -> None:
    """64 sound tokens stand ahead of the bad one, in its chunk and its tile: they were once published as NaN."""
    async with Cluster(stages=2, engine="torch", model=str(model), link=link) as cluster:
        engine = cluster.daemons[0].equipment.engine
        assert isinstance(engine, TorchEngine)
        with torch.no_grad():
            engine.band.model.get_input_embeddings().weight[BAD, 0] = float("nan")
        prefix, innocent = prompt(64, 1, tiny_models.VOCABULARY), prompt(10, 2, tiny_models.VOCABULARY)
        drawn = Sampling(temperature=0.8, seed=1, top_logprobs=4)
        beside = prompt(100, 3, tiny_models.VOCABULARY)
        error, other = await asyncio.gather(
            failed(cluster, [*prefix, BAD, *innocent], drawn), cluster.client.prefill(beside, sampling=FULL)
        )
        assert (error.reason, error.retryable, error.fields["stage"]) == ("NON_FINITE", False, "0")
        assert "embeddings or received activations of stage 0 are not finite" in error.message
        assert_exact(model, beside, other)
        result = await cluster.client.prefill([*prefix, *innocent], sampling=FULL)
        assert result.cached_tokens == 0
        assert_exact(model, [*prefix, *innocent], result)
        again = await cluster.client.prefill([*prefix, *innocent], sampling=FULL)
        assert again.cached_tokens == 64
        assert_exact(model, [*prefix, *innocent], again)
        assert cluster.formation == 1, "one prompt's fault ends no formation"


async def test_layer_is_named_when_the_emulated_engine_plants_a_bad_row() -> None:
    preset = f"{EMULATED},nan_token={BAD},nan_layer=5"
    async with Cluster(stages=2, model=preset) as cluster:
        tokens = prompt(50, 1, 1000)
        error = await failed(cluster, [*tokens, BAD], Sampling())
        assert error.fields == {"stage": "1", "rank": "0", "wave": "1", "layer": "5"}
        result = await cluster.client.prefill([*tokens, BAD + 1])
        assert result.first_token == expected_first_token([*tokens, BAD + 1], 1000)
        assert result.cached_tokens == 0


async def test_outcomes_are_json_when_a_prompt_of_the_file_computed_nan() -> None:
    async with Cluster(stages=2, model=f"{EMULATED},nan_token={BAD}") as cluster:
        tokens = prompt(30, 1, 1000)
        outcomes = [
            outcome
            async for outcome in cluster.client.prefill_many(
                [[*tokens, BAD], tokens], sampling=Sampling(top_logprobs=3)
            )
        ]
        lines = sorted((_as_dict(outcome) for outcome in outcomes), key=lambda line: line["index"])
        printed = [json.loads(json.dumps(line, allow_nan=False)) for line in lines]
        assert printed[0]["error"]["reason"] == "NON_FINITE"
        assert printed[1]["first_token"] == expected_first_token(tokens, 1000)
        assert len(printed[1]["top_logprobs"]) == 3
