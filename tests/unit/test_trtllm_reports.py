"""What TensorRT-LLM has reported in public, as far as one stage's adapter can meet it, on the stand-in.

The rows that need a pipeline are in fault/test_trtllm_pipeline.py; tests/README.md lists all. There is
no export of a finished cache yet: what is asked of one in a report is asked of its refusal there.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.harness import tiny_models
from tests.harness.stage_core import key
from tests.harness.trtllm_stage import BLOCK, trtllm_stage
from wavepp_proto.errors import EngineFault

_DRAW = random.Random(6)
PROMPT = [_DRAW.randrange(3, tiny_models.VOCABULARY) for _ in range(150)]
OTHER = [_DRAW.randrange(3, tiny_models.VOCABULARY) for _ in range(100)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("models"))


def first_token(model: Path, tokens: list[int]) -> int:
    return int(tiny_models.unsplit_logits(model, tokens).argmax())


def test_stage_answers_a_typed_shortfall_when_a_prompt_finds_no_room(model: Path) -> None:
    """TensorRT-LLM#9659: a stage that cannot is asked again later, and says how much it lacks."""
    with trtllm_stage(model, pool_blocks=16) as stage:
        total = stage.cache.pool_blocks
        stage.admit("first", PROMPT)
        before = stage.cache.census()
        lease = stage.lease("second", OTHER)
        assert (lease.endpoint, lease.shortfall.blocks) == (0, 7 - (total - 10))
        assert stage.cache.census() == before
        assert stage.cache.hold_state(key("second")) is None
        stage.release("first")
        assert stage.prefill("second", OTHER) == first_token(model, OTHER)


def test_stage_answers_a_shortfall_when_only_rows_are_missing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM#9659 again: rows of the page table run out before pages do."""
    monkeypatch.setenv("FAKE_TRTLLM_ROWS", "1")
    with trtllm_stage(model) as stage:
        stage.admit("first", OTHER)
        assert not stage.lease("second", PROMPT).shortfall
        before = stage.cache.census()
        assert stage.escrow("second").shortfall.blocks == 1
        assert stage.cache.census() == before
        stage.release("first")
        assert not stage.escrow("second").shortfall


def test_chunk_starts_where_the_one_before_ended_when_a_prompt_is_cut(model: Path) -> None:
    """TensorRT-LLM#9308: order is kept per request, whatever else the wave holds."""
    with trtllm_stage(model) as stage:
        stage.admit("a", PROMPT)
        stage.admit("b", OTHER)
        stage.run(("a", 64), ("b", 32))
        stage.prompts["a"].computed += BLOCK
        with pytest.raises(EngineFault, match="does not continue"):
            stage.engine.run(stage.wave([("a", 64)]), None)
        # Nobody knows any more what was computed: that ends the load.
        assert "does not continue" in stage.engine.fenced


def test_other_rows_are_unaffected_when_one_claim_finds_less_than_was_hinted(model: Path) -> None:
    """TensorRT-LLM#13318: a prefix that was evicted between hint and claim lowers the endpoint, never a batch."""
    with trtllm_stage(model, pool_blocks=16, wave_tokens=256) as stage:
        stage.prefill("first", PROMPT)
        stage.prefill("filler", [*OTHER, *OTHER[:60]])
        stage.admit("runner", OTHER[:40])
        lease = stage.lease("again", PROMPT, 144)
        assert 0 < lease.endpoint == lease.own_hit < 144
        assert not stage.escrow("again").shortfall
        stage.cache.commit(key("again"))
        stage.cache.materialise(key("again"))
        (one, other) = stage.run(("runner", 40), ("again", 150 - lease.endpoint)).results
        assert one.token_id == first_token(model, OTHER[:40])
        assert other.token_id == first_token(model, PROMPT)


def test_claim_is_refused_when_it_is_not_exactly_the_endpoint(model: Path) -> None:
    """TensorRT-LLM#13318: what was pinned and what is claimed are one number, or the stage says no."""
    with trtllm_stage(model) as stage:
        stage.prefill("first", PROMPT)
        assert stage.lease("again", PROMPT, 64).endpoint == 64
        manager = stage.engine.desk.manager  # type: ignore[union-attr]
        claim = manager.prepare_context_cache
        vars(manager)["prepare_context_cache"] = lambda request, reuse_limit: claim(
            request, reuse_limit=reuse_limit // 2
        )
        before = stage.cache.census()
        assert stage.escrow("again").shortfall
        assert stage.cache.census() == before
        del vars(manager)["prepare_context_cache"]
        assert not stage.escrow("again").shortfall


@pytest.mark.parametrize("vintage", ["newer", "rc26"])
@pytest.mark.parametrize("length", [BLOCK, 3 * BLOCK])
def test_first_chunk_keeps_its_size_when_it_begins_behind_a_reused_prefix(
    model: Path, monkeypatch: pytest.MonkeyPatch, vintage: str, length: int
) -> None:
    """TensorRT-LLM#12682: reuse shifts a pending chunk; here the wave's own length is what runs."""
    monkeypatch.setenv("FAKE_TRTLLM_VINTAGE", vintage)
    with trtllm_stage(model) as stage:
        stage.prefill("first", PROMPT)
        assert stage.admit("again", PROMPT, 64) == 64
        request = stage.engine.desk.requests[key("again")]  # type: ignore[union-attr]
        assert (request.context_current_position, request.context_remaining_length) == (64, 86)
        stage.run(("again", length))
        assert request.context_current_position == 64 + length
        (result,) = stage.run(("again", 86 - length)).results
        assert result.token_id == first_token(model, PROMPT)


def test_pages_return_to_the_baseline_when_a_prompt_is_cancelled_between_chunks(model: Path) -> None:
    """TensorRT-LLM#10111: pins neither leak nor underflow, however often it happens."""
    with trtllm_stage(model) as stage:
        stage.prefill("first", PROMPT)
        for attempt in range(3):
            stage.admit("cancelled", [*PROMPT[:140], 4, 5, 6 + attempt], 96)
            stage.run(("cancelled", 32))
            stage.release("cancelled")
            census = stage.cache.census()
            assert (census.held, census.leases, census.free + census.cached) == (0, 0, stage.cache.pool_blocks)
        assert stage.resident(PROMPT) == 9


@pytest.mark.parametrize("phase", ["leased", "escrowed", "committed", "running"])
def test_second_release_changes_nothing_when_the_first_gave_everything_back(model: Path, phase: str) -> None:
    """TensorRT-LLM#12816, #15655, #11247: a cache is freed exactly once, whoever asks how often."""
    with trtllm_stage(model) as stage:
        stage.prefill("first", PROMPT)
        stage.lease("again", PROMPT, 64)
        if phase != "leased":
            stage.escrow("again")
        if phase in ("committed", "running"):
            stage.cache.commit(key("again"))
        if phase == "running":
            stage.cache.materialise(key("again"))
            stage.run(("again", 32))
        for _ in range(2):
            stage.release("again")
            assert stage.held() == 0
        assert stage.prefill("third", PROMPT, 144) == first_token(model, PROMPT)


def test_release_gives_pages_back_once_when_the_formation_ended_before(model: Path) -> None:
    """TensorRT-LLM#7455: the end comes in two steps, and a release between them finds nothing to do."""
    with trtllm_stage(model) as stage:
        stage.admit("running", PROMPT)
        stage.run(("running", 32))
        stage.cache.end_formation(1)
        assert stage.cache.quarantined_blocks == 10
        stage.release("running")
        assert stage.cache.quarantined_blocks == 10
        stage.cache.executor_stopped(1)
        stage.cache.executor_stopped(1)
        census = stage.cache.census()
        assert (census.held, census.quarantined) == (0, 0)


def test_held_prefix_is_not_evicted_when_others_need_room(model: Path) -> None:
    """TensorRT-LLM#12542: what somebody counts on is held, so it cannot go; the others wait."""
    with trtllm_stage(model, pool_blocks=16) as stage:
        stage.prefill("first", PROMPT)
        assert stage.lease("again", PROMPT, 144).endpoint == 144
        assert stage.lease("other", OTHER + OTHER[:40]).shortfall.blocks > 0
        assert stage.lease("small", OTHER[:60]).shortfall.blocks == 0
        stage.escrow("small")
        assert stage.resident(PROMPT) == 9
        stage.escrow("again")
        stage.cache.commit(key("again"))
        stage.cache.materialise(key("again"))
        (result,) = stage.run(("again", 6)).results
        assert result.token_id == first_token(model, PROMPT)


def test_prefix_that_went_to_the_host_is_the_same_when_it_comes_back(model: Path) -> None:
    """TensorRT-LLM#12542, where it ends well: a lower tier costs a copy, not the prefix."""
    with trtllm_stage(model, pool_blocks=12, host_pool_blocks=12) as stage:
        stage.prefill("first", PROMPT)
        stage.prefill("filler", OTHER + OTHER[:60])
        assert stage.resident(PROMPT) == 9
        assert stage.cache.host_cached_blocks > 0
        assert stage.admit("again", PROMPT, 144) == 144
        (result,) = stage.run(("again", 6)).results
        assert result.token_id == first_token(model, PROMPT)


def test_recurrent_model_is_refused_by_name_when_reuse_would_stop_at_snapshots(
    tmp_path: Path,
) -> None:
    """TensorRT-LLM#12185, #12896: hybrids reuse at snapshots alone, which this adapter does not plan yet."""
    folder = tiny_models.build("qwen3_next", tmp_path)
    with pytest.raises(EngineFault) as caught, trtllm_stage(folder, layers=tiny_models.HYBRID_LAYERS):
        raise AssertionError("it loaded")
    assert caught.value.fields


@pytest.mark.parametrize("vintage", ["newer", "rc26"])
def test_answers_agree_when_the_package_is_of_either_version(
    model: Path, monkeypatch: pytest.MonkeyPatch, vintage: str
) -> None:
    """TensorRT-LLM#19154, #16218: the core moved and changed hands; claims with and without a limit end alike."""
    monkeypatch.setenv("FAKE_TRTLLM_VINTAGE", vintage)
    with trtllm_stage(model) as stage:
        assert ("rc26" in stage.engine.version) is (vintage == "rc26")
        assert stage.prefill("first", PROMPT) == first_token(model, PROMPT)
        for candidate in (0, 16, 96, 144):
            name = f"again at {candidate}"
            assert stage.admit(name, PROMPT, candidate) == candidate
            rest = 150 - candidate
            while rest:
                outcome = stage.run((name, min(rest, 64)))
                rest -= min(rest, 64)
            assert outcome.results[0].token_id == first_token(model, PROMPT)
            stage.release(name)


def test_load_is_refused_when_the_manager_s_blocks_have_another_size(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-LLM#13320: a kernel forced another block size, and whoever counted in blocks read the wrong ones."""
    monkeypatch.setenv("FAKE_TRTLLM_FORCE_TOKENS_PER_BLOCK", "32")
    with pytest.raises(EngineFault) as caught, trtllm_stage(model):
        raise AssertionError("it loaded")
    assert caught.value.fields["field"] == "block_tokens"
    assert (caught.value.fields["value"], caught.value.fields["limit"]) == ("32", "16")


def test_everything_is_refused_until_it_is_loaded_again_when_a_forward_failed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Section 5.2: after a failed forward the group is fenced, holds and all."""
    with trtllm_stage(model) as stage:
        stage.prefill("first", PROMPT)
        stage.admit("running", OTHER)
        stage.lease("leased", PROMPT, 64)
        monkeypatch.setenv("FAKE_TRTLLM_FAIL_FORWARD", "all")
        with pytest.raises(RuntimeError, match="injected"):
            stage.run(("running", 32))
        monkeypatch.delenv("FAKE_TRTLLM_FAIL_FORWARD")
        assert stage.lease("third", OTHER).shortfall
        with pytest.raises(EngineFault, match="not loaded"):
            stage.run(("running", 32))
        for name in ("running", "leased"):
            stage.release(name)
        stage.reload()
        assert stage.resident(PROMPT) == 0
        assert stage.prefill("after", PROMPT, 0) == first_token(model, PROMPT)
