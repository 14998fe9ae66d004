"""The demo's prompts and pools: what is shared, what is asked again, and that one stage must forget."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest

from wavepp.demo.pools import SMALL_STAGE, plan_pools
from wavepp.demo.prompts import PASSES, DemoPrompt, build_passes
from wavepp.demo.tokens import ModelText
from wavepp_proto.errors import InvalidRequest

BLOCK = 32
WORDS = ModelText(None, vocabulary=49_152, window=8192)


class ChatTokenizer:
    """Single characters, and ChatML's marks as single tokens."""

    def encode(self, text: str, /) -> list[int]:
        return [ord(char) for char in text.replace("<|im_start|>", "\1").replace("<|im_end|>", "\2")]

    def decode(self, token_ids: object, /) -> str:
        assert isinstance(token_ids, list)
        return "".join(map(chr, token_ids))


class PlainTokenizer(ChatTokenizer):
    def encode(self, text: str, /) -> list[int]:
        return list(map(ord, text))


def common_prefix(one: DemoPrompt, other: DemoPrompt) -> int:
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one.token_ids), len(other.token_ids)))


def by_title(passes: tuple[tuple[DemoPrompt, ...], ...]) -> dict[str, DemoPrompt]:
    return {prompt.title: prompt for prompts in passes for prompt in prompts}


def test_two_dozen_prompts_stand_in_three_passes_when_built() -> None:
    assert [len(prompts) for prompts in build_passes(WORDS)] == [8, 8, 8]


def test_prompts_share_what_their_titles_say_when_built() -> None:
    prompts = by_title(build_passes(WORDS))
    document = common_prefix(prompts["council 1"], prompts["council 2"])
    system = common_prefix(prompts["council 1"], prompts["bakery 1"])
    assert system >= 300
    assert document >= system + 400
    # A question to anybody may happen to begin like a document, by a word or two.
    assert abs(common_prefix(prompts["anybody 1"], prompts["council 1"]) - system) <= 2
    assert common_prefix(prompts["alone 1"], prompts["council 1"]) <= 1


def test_prompt_is_marked_when_an_earlier_pass_asked_it() -> None:
    again = [prompt for prompts in build_passes(WORDS) for prompt in prompts if prompt.asked_before]
    assert [prompt.title for prompt in again] == ["lighthouse 2", "ships_log 2", "alone 1"]
    first, second, _ = build_passes(WORDS)
    assert {prompt.token_ids for prompt in again} <= {prompt.token_ids for prompt in (*first, *second)}


def test_no_pass_asks_twice_when_listed() -> None:
    assert all(len(set(asked)) == len(asked) for asked in PASSES)


def test_window_is_named_when_the_prompts_are_too_long() -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_passes(ModelText(None, vocabulary=512, window=600))
    assert caught.value.fields["limit"] == "600"


# --- tokens --------------------------------------------------------------------------------------


def test_prompt_is_chatml_when_the_vocabulary_has_its_marks() -> None:
    text = ModelText(ChatTokenizer(), vocabulary=256, window=8192)
    assert text.chats
    prompt = "".join(map(chr, text.encode("be brief", "why?", "Because")))
    assert prompt == "\1system\nbe brief\2\n\1user\nwhy?\2\n\1assistant\nBecause"
    assert "".join(map(chr, text.encode("", "why?", "So"))) == "\1user\nwhy?\2\n\1assistant\nSo"


def test_prompt_is_paragraphs_when_the_vocabulary_has_no_marks() -> None:
    text = ModelText(PlainTokenizer(), vocabulary=256, window=8192)
    assert not text.chats
    assert "".join(map(chr, text.encode("be brief", "why?", "So"))) == "be brief\n\nwhy?\n\nAnswer: So"


def test_words_become_ids_when_the_folder_has_no_tokenizer() -> None:
    token_ids = WORDS.encode("be brief", "be quick", "Now")
    assert len(token_ids) == 5
    assert token_ids[0] == token_ids[2]
    assert all(0 <= token < WORDS.vocabulary for token in token_ids)
    assert WORDS.text_after(token_ids, 7) == "#7"


def test_folder_is_refused_by_name_when_it_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ModelText.of(tmp_path)
    assert caught.value.fields == {"field": "model", "value": str(tmp_path)}


# --- pools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_pools_differ_and_hold_every_prompt_when_planned(stages: int) -> None:
    passes = build_passes(WORDS)
    pools = plan_pools(passes, BLOCK, stages, concurrency=8)
    longest = max(-(-len(prompt.token_ids) // BLOCK) for prompts in passes for prompt in prompts)
    assert len(set(pools.blocks)) == len(pools.blocks) == stages
    assert min(pools.blocks) == pools.blocks[SMALL_STAGE] >= longest
    assert pools.blocks[SMALL_STAGE] < pools.wanted_back


def test_largest_pool_holds_everything_at_once_when_planned() -> None:
    passes = build_passes(WORDS)
    distinct = {
        prompt.token_ids[:end]
        for prompts in passes
        for prompt in prompts
        for end in range(BLOCK, len(prompt.token_ids) + 1, BLOCK)
    }
    under_way = sum(sorted(-(-len(prompt.token_ids) // BLOCK) for prompts in passes for prompt in prompts)[-8:])
    assert max(plan_pools(passes, BLOCK, 4, concurrency=8).blocks) >= len(distinct) + under_way


@pytest.mark.parametrize("order", ["as asked", "reversed"])
def test_some_second_prompt_finds_less_on_the_small_stage_when_it_forgets_leaves_first(order: str) -> None:
    """A stage by itself, one request after the other: the pool is too small whatever the order."""
    first, second, _ = build_passes(WORDS)
    pool = plan_pools((first, second), BLOCK, 4, concurrency=8).blocks[SMALL_STAGE]
    held: OrderedDict[tuple[int, ...], None] = OrderedDict()
    for prompt in first if order == "as asked" else reversed(first):
        chain = [prompt.token_ids[:end] for end in range(BLOCK, len(prompt.token_ids), BLOCK)]
        for block in reversed(chain):  # the root is used last, so that leaves go first
            held.pop(block, None)
            held[block] = None
        while len(held) > pool:
            held.popitem(last=False)
    wanted = {prompt.token_ids[:end] for prompt in first for end in range(BLOCK, len(prompt.token_ids), BLOCK)}
    back = {prompt.token_ids[:end] for prompt in second for end in range(BLOCK, len(prompt.token_ids), BLOCK)} & wanted
    assert back - held.keys()


def test_pools_are_refused_when_there_is_one_stage() -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan_pools(build_passes(WORDS), BLOCK, 1, concurrency=8)
    assert caught.value.fields["field"] == "stages"


def test_pools_are_refused_when_prompts_share_too_little() -> None:
    lonely = tuple(DemoPrompt(f"p{n}", tuple(range(n * 1000, n * 1000 + 100)), False) for n in range(4))
    with pytest.raises(InvalidRequest) as caught:
        plan_pools((lonely[:2], lonely[2:]), BLOCK, 4, concurrency=8)
    assert caught.value.fields["field"] == "model"


def test_folder_of_deep_json_is_no_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(InvalidRequest, match="is no model folder"):
        ModelText.of(tmp_path)
