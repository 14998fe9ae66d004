"""Text prompts: where the tokenizer comes from, and what is said when there is none."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wavepp import AsyncClient, _tokenizer, errors
from wavepp._tokenizer import first_text
from wavepp._types import Tokenizer
from wavepp.testing import Answer, FakeController

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[UNK]", "[BOS]", "the", "capital", "of", "France", "is", "Paris"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a word-level tokenizer that puts [BOS] in front."""
    words = {word: index for index, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing("[BOS] $A", None, [("[BOS]", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
async def controller() -> AsyncIterator[FakeController]:
    async with FakeController(answer=Answer(first_token=7)) as controller:
        yield controller


def ids(*words: str) -> bytes:
    return np.array([WORDS.index(word) for word in words], dtype="<i4").tobytes()


@pytest.mark.parametrize("as_file", [False, True], ids=["folder", "file"])
async def test_text_goes_in_and_comes_out_when_a_path_is_given(
    controller: FakeController, folder: Path, as_file: bool
) -> None:
    path = folder / "tokenizer.json" if as_file else folder
    async with AsyncClient(controller.address, tokenizer=path) as client:
        result = await client.prefill("the capital of France is")
    assert controller.requests[0].request.token_ids == ids("[BOS]", "the", "capital", "of", "France", "is")
    assert (result.first_token, result.first_text) == (7, " Paris")
    assert controller.describe_calls == 0


async def test_first_text_is_none_when_tokens_went_in(controller: FakeController, folder: Path) -> None:
    async with AsyncClient(controller.address, tokenizer=folder) as client:
        assert (await client.prefill([2])).first_text is None


async def test_controllers_model_folder_is_used_when_it_exists_here(controller: FakeController, folder: Path) -> None:
    controller.description = replace(controller.description, model_path=str(folder))
    async with AsyncClient(controller.address) as client:
        outcomes = [outcome async for outcome in client.prefill_many(["the", "capital"], pipeline="default")]
    assert [outcome.unwrap().first_text for outcome in outcomes] == [" Paris", " Paris"]


async def test_streamed_text_is_tokenized_before_the_first_event(controller: FakeController, folder: Path) -> None:
    async with AsyncClient(controller.address, tokenizer=str(folder)) as client, client.stream("the") as stream:
        assert controller.requests == []
        result = await stream.result()
    assert result.first_text == " Paris"
    assert controller.requests[0].request.token_ids == ids("[BOS]", "the")


async def test_tokenizer_is_loaded_once_when_many_texts_arrive_together(
    controller: FakeController, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Path] = []
    original = _tokenizer.load

    def counted(path: Path) -> Tokenizer:
        loads.append(path)
        return original(path)

    monkeypatch.setattr(_tokenizer, "load", counted)
    async with AsyncClient(controller.address, tokenizer=folder) as client:
        await asyncio.gather(*(client.prefill("the") for _ in range(5)))
    assert loads == [folder]


class Letters:
    """A tokenizer of the user's own: one token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


async def test_tokenizer_object_is_used_when_given(controller: FakeController) -> None:
    controller.answer = Answer(first_token=ord("c"))
    async with AsyncClient(controller.address, tokenizer=Letters()) as client:
        assert (await client.prefill("ab")).first_text == "c"
    assert controller.requests[0].request.token_ids == np.array([97, 98], dtype="<i4").tobytes()


async def test_text_without_tokens_is_an_empty_prompt(controller: FakeController, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    async with AsyncClient(controller.address, tokenizer=tmp_path) as client:
        with pytest.raises(errors.EmptyPrompt):
            await client.prefill("  ")


async def refusal(controller: FakeController, tokenizer: Path | None) -> errors.TokenizerUnavailable:
    async with AsyncClient(controller.address, tokenizer=tokenizer) as client:
        with pytest.raises(errors.TokenizerUnavailable) as caught:
            await client.prefill("the")
    assert controller.requests == []
    return caught.value


async def test_unavailable_says_what_to_do_when_the_path_holds_none(controller: FakeController, tmp_path: Path) -> None:
    error = await refusal(controller, tmp_path)
    assert "give tokenizer=PATH" in error.message
    assert error.fields == {"field": "tokenizer", "value": str(tmp_path)}


async def test_unavailable_says_what_to_do_when_the_controllers_folder_is_elsewhere(
    controller: FakeController, tmp_path: Path
) -> None:
    controller.description = replace(controller.description, model_path=str(tmp_path / "gone"))
    error = await refusal(controller, None)
    assert "does not exist on this host" in error.message
    assert error.fields == {"field": "tokenizer", "value": str(tmp_path / "gone"), "pipeline": "default"}


async def test_unavailable_says_what_to_do_when_the_controller_names_no_folder(controller: FakeController) -> None:
    error = await refusal(controller, None)
    assert "names no model folder" in error.message
    assert "tokenizer=PATH" in error.message


async def test_unavailable_names_the_file_when_it_cannot_be_read(controller: FakeController, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    error = await refusal(controller, tmp_path)
    assert error.fields["value"] == str(tmp_path / "tokenizer.json")


async def test_unavailable_names_the_extra_when_the_package_is_missing(
    controller: FakeController, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    error = await refusal(controller, folder)
    assert "pip install tokenizers" in error.message


def test_first_text_keeps_the_space_that_a_lone_token_would_lose() -> None:
    class Strips:
        def encode(self, text: str) -> list[int]:
            raise AssertionError("not needed")

        def decode(self, token_ids: Sequence[int]) -> str:
            return " ".join(WORDS[token] for token in token_ids)

    assert first_text(Strips(), WORDS.index("is"), WORDS.index("Paris")) == " Paris"


def test_first_text_stands_alone_when_its_neighbour_changes_with_it() -> None:
    class Merges:
        def encode(self, text: str) -> list[int]:
            raise AssertionError("not needed")

        def decode(self, token_ids: Sequence[int]) -> str:
            return {(1,): "\ufffd", (2,): "\ufffd", (1, 2): "\u00e9"}[tuple(token_ids)]

    assert first_text(Merges(), 1, 2) == "\ufffd"
