"""The stand-in's executor, one rank: positions and pages from requests, rows, start-up, threads, faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.fake_trtllm.tensorrt_llm._fake import knobs
from tests.fake_trtllm.tensorrt_llm._fake.fifo import Pipes
from tests.fake_trtllm.tensorrt_llm._torch.distributed.communicator import PPCommTorch
from tests.fake_trtllm.tensorrt_llm.bindings import LlmRequestState
from tests.fake_trtllm.tensorrt_llm.mapping import Mapping
from tests.harness import tiny_models
from tests.harness.fake_executor import BLOCK, Rank, make_rank, make_request

PROMPT = torch.randint(3, tiny_models.VOCABULARY, (70,), generator=torch.Generator().manual_seed(7)).tolist()
OTHER = [*PROMPT[:40], *PROMPT[:20]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    knobs.reset_counts()
    made = make_rank(folder, monkeypatch)
    yield made
    made.close()


def _close(logits: torch.Tensor, folder: Path, tokens: list[int]) -> bool:
    return torch.allclose(logits, tiny_models.unsplit_logits(folder, tokens), atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral"])
def test_answer_is_the_unsplit_model_s_when_a_prompt_runs_in_chunks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_models.build(family, tmp_path)
    rank = make_rank(folder, monkeypatch)
    assert _close(rank.prefill(PROMPT, [32, 32, 6]), folder, PROMPT)
    rank.close()


def test_rows_of_one_batch_are_apart_when_prompts_share_pages(rank: Rank, folder: Path) -> None:
    rank.prefill(PROMPT, [70])
    first, second = rank.admit(OTHER, 32), rank.admit(PROMPT[:40], 32)
    assert [request.context_current_position for request in (first, second)] == [32, 32]
    logits = rank.run([(first, 28), (second, 8)])
    assert _close(logits[0], folder, OTHER)
    assert _close(logits[1], folder, PROMPT[:40])
    for request in (first, second):
        rank.free(request)


def test_answer_is_wrong_when_a_page_number_is(rank: Rank, folder: Path) -> None:
    request, other = rank.admit(PROMPT, 0), rank.admit(PROMPT[::-1], 0)
    rank.run([(request, 64)])
    rank.run([(other, 64)])
    table = rank.manager.host_kv_cache_block_offsets[0, :, 0, 0]
    rows = [rank.manager.index_mapper.get_index(one.py_request_id) for one in (request, other)]
    table[rows[0]] = table[rows[1]]
    assert not _close(rank.run([(request, 6)], commit=False)[0], folder, PROMPT)
    for one in (request, other):
        rank.free(one)


def test_answer_is_no_number_when_a_page_was_never_written(rank: Rank) -> None:
    request = rank.admit(PROMPT, 0)
    request.context_current_position = 64
    assert rank.run([(request, 6)], commit=False).isnan().any()
    rank.free(request)


def test_chunk_runs_first_when_it_is_not_the_last_of_its_prompt(rank: Rank) -> None:
    last, chunk = rank.admit(PROMPT[:10], 0), rank.admit(PROMPT, 0)
    batch = rank.batch([(last, 10), (chunk, 16)])
    assert batch.context_requests == [chunk, last]
    rank.free(last)
    rank.free(chunk)


@pytest.mark.parametrize(
    ("position", "size"), [(0, 10), (0, 0), (16, 200)], ids=["off a block boundary", "empty", "beyond the prompt"]
)
def test_forward_refuses_a_chunk_when_it_is_not_one(rank: Rank, position: int, size: int) -> None:
    request = rank.admit(PROMPT, 0)
    request.context_current_position = position
    if size == 200:
        assert rank.batch([(request, size)]).context_requests[0].context_chunk_size == 54  # cut to what is left
    else:
        with pytest.raises(ValueError, match="chunk"):
            rank.run([(request, size)])
    rank.free(request)


def test_forward_refuses_a_batch_when_it_has_more_tokens_than_the_engine_takes(rank: Rank) -> None:
    requests = [rank.admit([token, *PROMPT], 0) for token in (3, 4)]
    with pytest.raises(AssertionError, match="total_num_tokens"):
        rank.run([(request, 71) for request in requests])
    for request in requests:
        rank.free(request)


def test_forward_refuses_a_request_when_nobody_gave_it_room(rank: Rank) -> None:
    request = make_request(90, PROMPT)
    assert rank.manager.prepare_context_cache(request, reuse_limit=0) == 0
    with pytest.raises(RuntimeError, match="no room"):
        rank.run([(request, 16)])
    rank.free(request)


def test_claim_is_refused_when_every_row_of_the_page_table_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TRTLLM_ROWS", "2")
    rank = make_rank(folder, monkeypatch)
    requests = [rank.admit(PROMPT[:20], 0) for _ in range(2)]
    third = make_request(99, PROMPT[:20])
    assert rank.manager.prepare_context_cache(third, reuse_limit=0) is None
    assert 99 not in rank.manager.kv_cache_map
    rank.free(third)  # nothing was taken
    rank.manager.release_index_slot(requests[0].py_request_id)
    assert rank.manager.prepare_context_cache(third, reuse_limit=0) == 0
    for request in (*requests, third):
        rank.free(request)
    assert rank.manager.index_mapper.num_free_slots() == 2
    rank.close()


def test_claim_stays_suspended_when_resuming_is_refused(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TRTLLM_REFUSE_RESUME", "all")
    request = make_request(5, PROMPT)
    assert rank.manager.prepare_context_cache(request, reuse_limit=0) is None
    assert not rank.manager.kv_cache_map[5].is_active
    monkeypatch.delenv("FAKE_TRTLLM_REFUSE_RESUME")
    assert rank.manager.prepare_context_cache(request, reuse_limit=0) == 0
    rank.free(request)


def test_claim_stops_at_the_limit_and_below_the_prompt_s_end_when_all_is_cached(rank: Rank) -> None:
    rank.prefill(PROMPT[:64], [64])
    claims = []
    for limit in (0, 16, 24, 63, 64):
        request = make_request(10 + limit, PROMPT[:64])
        claims.append(rank.manager.prepare_context_cache(request, reuse_limit=limit))
        rank.free(request)
    assert claims == [0, 16, 16, 48, 48]


def test_chunk_is_shifted_not_shrunk_when_a_prefix_is_prepopulated() -> None:
    request = make_request(1, PROMPT)
    request.context_chunk_size = 24
    request.set_prepopulated_prompt_len(16, BLOCK)
    assert (request.context_current_position, request.context_chunk_size) == (16, 16)
    assert request.is_first_context_chunk
    whole = make_request(2, PROMPT)
    whole.set_prepopulated_prompt_len(32, BLOCK)
    assert (whole.context_chunk_size, whole.is_last_context_chunk) == (38, True)
    with pytest.raises(RuntimeError, match="at least one token"):
        whole.set_prepopulated_prompt_len(70, BLOCK)
    whole.state = LlmRequestState.GENERATION_COMPLETE
    with pytest.raises(RuntimeError, match="context phase"):
        whole.context_chunk_size = 1


def test_other_thread_is_refused_when_one_owns_the_cache(rank: Rank) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="owns the cache"):
        pool.submit(rank.manager.get_kv_cache_stats).result()


def test_cache_is_out_of_reach_when_the_executor_s_own_loop_was_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(folder, monkeypatch, loop=True)
    with pytest.raises(RuntimeError, match="own loop"):
        rank.manager.get_kv_cache_stats()


@pytest.mark.parametrize("event_rank", [0, 1])
def test_events_exist_on_rank_zero_only_when_nothing_else_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, event_rank: int
) -> None:
    rank = make_rank(folder, monkeypatch, mpi_rank=event_rank)
    rank.prefill(PROMPT, [70])
    rank.manager.flush_iteration_events()
    assert bool(rank.manager.get_latest_events(0)) is (event_rank == 0)
    rank.close()


@pytest.mark.parametrize("fault", ["FAIL_FORWARD", "FAIL_PREPARE"])
def test_fault_strikes_once_when_it_names_a_call(rank: Rank, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv(f"FAKE_TRTLLM_{fault}", "3")  # the first was the warm-up's, or none
    knobs.reset_counts()
    request = rank.admit(PROMPT, 0)
    outcomes = []
    for _ in range(4):
        try:
            rank.run([(request, 16)])
            outcomes.append("ran")
        except RuntimeError as error:
            outcomes.append(str(error))
    assert [outcome.startswith("injected") for outcome in outcomes] == [False, False, True, False]
    rank.free(request)


def _ends() -> tuple[PPCommTorch, PPCommTorch]:
    pipes = Pipes()
    first, second = (Mapping(2, rank, pp_size=2) for rank in (0, 1))
    return PPCommTorch(first, pipes.end(0)), PPCommTorch(second, pipes.end(1))


def test_activations_come_in_order_when_stages_only_agree_on_shapes() -> None:
    first, second = _ends()
    sent = [torch.full((3, 2), float(value)) for value in (1, 2)]
    for tensor in sent:
        first.send(tensor)
    received = [torch.empty(3, 2), torch.empty(3, 2)]
    for tensor in received:
        second.recv(tensor)
    assert all(torch.equal(*pair) for pair in zip(sent, received, strict=True))


def test_receive_fails_when_the_neighbour_sent_another_shape() -> None:
    first, second = _ends()
    first.send(torch.zeros(3, 2))
    with pytest.raises(RuntimeError, match=r"sent \(3, 2\).*\(4, 2\)"):
        second.recv(torch.empty(4, 2))


def test_receive_fails_instead_of_hanging_when_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TRTLLM_TIMEOUT_S", "0.01")
    _, second = _ends()
    with pytest.raises(RuntimeError, match="nothing came from rank 0"):
        second.recv(torch.empty(1))


def test_receive_waits_when_the_neighbour_is_late() -> None:
    first, second = _ends()
    received = torch.empty(2)
    thread = threading.Thread(target=second.recv, args=(received,))
    thread.start()
    first.send(torch.ones(2))
    thread.join(timeout=10)
    assert received.tolist() == [1, 1]


def test_layers_follow_the_partition_when_it_is_uneven() -> None:
    ranks = [Mapping(3, rank, pp_size=3, pp_partition=[3, 2, 2]) for rank in range(3)]
    assert [rank.pp_layers(7) for rank in ranks] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [Mapping(3, rank, pp_size=3).pp_layers(8) for rank in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    with pytest.raises(ValueError, match="add up"):
        ranks[0].pp_layers(8)
    grid = [Mapping(4, rank, tp_size=2, pp_size=2) for rank in range(4)]
    assert [(rank.pp_rank, rank.tp_rank, rank.next_pp_rank()) for rank in grid] == [
        (0, 0, 2), (0, 1, 3), (1, 0, 0), (1, 1, 1)]  # fmt: skip
