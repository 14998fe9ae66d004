"""The controller core as a whole: a request's life on a pipeline of made-up daemons."""

from __future__ import annotations

from tests.harness.fake_pipeline import BLOCK, FakePipeline, tokens
from wavepp_controller.core.events import AnnounceRequest, FormPipeline, HashPrompt, SendRound, SendWave
from wavepp_proto.hashing import HashScope, hash_blocks
from wavepp_proto.terms import Admitted, Failed, Finished, LinkKind, Progress, Queued


def test_pipeline_forms_when_every_stage_has_registered() -> None:
    pipeline = FakePipeline(stages=4)
    (formed,) = pipeline.of(FormPipeline)
    assert [plan.key.stage for plan in formed.plans] == [0, 1, 2, 3]
    assert {plan.link for plan in formed.plans} == {LinkKind.GLOO}
    assert {plan.link_store for plan in formed.plans} == {"host0:2"}
    assert {plan.wave_tokens for plan in formed.plans} == {64}
    assert [plan.fence.formation for plan in formed.plans] == [1] * 4
    assert pipeline.machine.status().pipelines[0].state == "serving"


def test_request_runs_to_its_first_token_when_nothing_is_cached() -> None:
    pipeline = FakePipeline(stages=2)
    pipeline.submit("a", 150)
    kinds = [type(event) for event in pipeline.events]
    assert kinds == [Queued, Admitted, Progress, Progress, Finished]
    finished = pipeline.outcome("a")
    assert isinstance(finished, Finished)
    assert (finished.first_token, finished.prompt_tokens, finished.cached_tokens, finished.waves) == (7, 150, 0, 3)
    assert [[(r.start, r.length, r.final) for r in rows] for rows in pipeline.waves()] == [
        [(0, 64, False)],
        [(64, 64, False)],
        [(128, 22, True)],
    ]
    assert pipeline.nothing_held()
    assert pipeline.machine.live_requests == 0


def test_only_the_first_stage_is_sent_tokens_when_no_engine_needs_them() -> None:
    pipeline = FakePipeline(stages=3)
    pipeline.submit("a", 40)
    (announced,) = pipeline.of(AnnounceRequest)
    assert [with_tokens for _, _, with_tokens in announced.targets] == [True, False, False]
    assert len(announced.block_hashes) == 2 * 32


def test_chunks_cover_the_suffix_when_every_stage_holds_the_prefix() -> None:
    pipeline = FakePipeline(stages=2)
    scope = HashScope("f1", f"B{BLOCK}")
    hashes = hash_blocks(scope, tokens(100), BLOCK)
    for stage in (0, 1):
        pipeline.digest(stage, hashes)
        pipeline.daemon(stage).hits["a"] = 96
    pipeline.submit("a", 100)
    (hashed,) = pipeline.of(HashPrompt)
    assert hashed.scope == scope
    (admitted,) = pipeline.of_request("a", Admitted)
    assert (admitted.candidate, admitted.endpoint, admitted.limiting_stage, admitted.rounds) == (96, 96, None, 1)
    assert [(r.start, r.length) for rows in pipeline.waves() for r in rows] == [(96, 4)]


def test_stage_with_the_smallest_hit_limits_when_hits_differ() -> None:
    pipeline = FakePipeline(stages=3)
    hashes = hash_blocks(HashScope("f1", f"B{BLOCK}"), tokens(100), BLOCK)
    for stage, hit in ((0, 96), (1, 48), (2, 80)):
        pipeline.digest(stage, hashes)
        pipeline.daemon(stage).hits["a"] = hit
    pipeline.submit("a", 100)
    (admitted,) = pipeline.of_request("a", Admitted)
    assert (admitted.candidate, admitted.endpoint, admitted.limiting_stage) == (96, 48, 1)
    assert (admitted.best_stage_hit, admitted.rounds) == (96, 2)
    revised = [a for a in pipeline.of(SendRound) if a.round.revises]
    assert [(a.key.stage, a.round.revises[0].endpoint) for a in revised] == [(0, 48), (1, 48), (2, 48)]


def test_several_requests_share_a_wave_when_they_are_small() -> None:
    pipeline = FakePipeline(stages=2)
    pipeline.hold = {SendRound}
    for seed, name in enumerate("abc"):
        pipeline.submit(name, 20, seed)
    pipeline.hold = set()
    pipeline.release_held()
    assert all(isinstance(pipeline.outcome(name), Finished) for name in "abc")
    # `a` was prepared alone, for the others were not ready; they shared the next round and a wave.
    assert [[row.key.request_id for row in rows] for rows in pipeline.waves()] == [["a"], ["b", "c"]]


def test_request_fails_once_when_it_is_cancelled_while_running() -> None:
    pipeline = FakePipeline(stages=2)
    pipeline.hold = {SendWave}
    pipeline.submit("a", 1000)
    assert len(pipeline.held) == 4  # R = 2P
    pipeline.cancel("a")
    assert pipeline.reason("a") == "CANCELLED"
    (release,) = pipeline.daemon(0).rounds[-1].releases
    assert (release.after_wave, release.ended) == (4, True)
    pipeline.release_held()
    assert isinstance(pipeline.outcome("a"), Failed)
    assert pipeline.nothing_held()
