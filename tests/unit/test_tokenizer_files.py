"""A tokenizer's folder is read as transformers reads it; one that raises, or is broken, is a typed error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from wavepp import AsyncClient, errors
from wavepp._tokenizer import load, packed
from wavepp.demo.tokens import ModelText
from wavepp.testing import Answer, FakeController

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[UNK]", "[BOS]", "[EOS]", "[PAD]", "the", "capital", "of", "France"]
NEW = len(WORDS)
"""Id of the first token that is not in the vocabulary."""
TEXT = "the capital of France [EOS] the capital"
OWN_BOS = "[BOS]the"
CHAT = "<|im_start|>the<|im_end|>"
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
MARK = {"content": "<|im_start|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def write(folder: Path, added: bool = True, post: bool = True, **beside: Any) -> Path:
    """A word-level tokenizer that puts [BOS] in front (`post`), cuts to 4 and fills to 64; `beside` are JSON files."""
    words = {word: index for index, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if added:
        backend.add_special_tokens(["[BOS]", "[EOS]"])
    if post:
        backend.post_processor = tokenizers.processors.TemplateProcessing("[BOS] $A", None, [("[BOS]", 1)])
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_id=3, pad_token="[PAD]")
    backend.save(str(folder / "tokenizer.json"))
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


CASES: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    "truncation and padding": ({}, [[1, 4, 5, 6, 7, 2, 4, 5], [1, 1, 4], [1, 0]]),
    "flags of the configuration": (
        {"tokenizer_config": FAST | {"add_bos_token": False, "add_eos_token": True, "eos_token": "[EOS]"}},
        [[1, 4, 5, 6, 7, 2, 4, 5], [1, 1, 4], [1, 0]],
    ),
    "no post-processor": (
        {"post": False, "tokenizer_config": FAST | {"add_bos_token": True, "bos_token": "[BOS]"}},
        [[4, 5, 6, 7, 2, 4, 5], [1, 4], [0]],
    ),
    "additional tokens": (
        {"tokenizer_config": FAST | {"additional_special_tokens": ["<|im_end|>", "<|im_start|>"]}},
        [[1, 4, 5, 6, 7, 2, 4, 5], [1, 1, 4], [1, NEW + 1, 4, NEW]],
    ),
    "tokens named by the model": (
        {"tokenizer_config": FAST | {"image_token": "<|im_end|>", "eos_token": "<|im_start|>"}},
        [[1, 4, 5, 6, 7, 2, 4, 5], [1, 1, 4], [1, NEW, 4, NEW + 1]],
    ),
    "extra tokens with names": (
        {"tokenizer_config": FAST | {"extra_special_tokens": {"start": "<|im_start|>", "end": "<|im_end|>"}}},
        [[1, 4, 5, 6, 7, 2, 4, 5], [1, 1, 4], [1, NEW, 4, NEW + 1]],
    ),
    "added tokens decoder": (
        {
            "tokenizer_config": FAST
            | {"added_tokens_decoder": {"10": MARK | {"content": "<|im_end|>"}, "9": MARK | {"special": True}}}
        },
        [[1, 4, 5, 6, 7, 2, 4, 5], [1, 1, 4], [1, NEW, 4, NEW + 1]],
    ),
    "special tokens map": (
        {"added": False, "special_tokens_map": {"eos_token": "[EOS]", "bos_token": MARK}},
        [[1, 4, 5, 6, 7, 2, 4, 5], [1, 0], [1, NEW, 0]],
    ),
    "added tokens file": (
        {"added_tokens": {"<|im_start|>": 9, "<|im_end|>": 8}},
        [[1, 4, 5, 6, 7, 2, 4, 5], [1, 1, 4], [1, NEW + 1, 4, NEW]],
    ),
    "special tokens are split": (
        {"tokenizer_config": FAST | {"split_special_tokens": True}},
        [[1, 4, 5, 6, 7, 2, 4, 5], [1, 0], [1, 0]],
    ),
    "flags of the file win over names": (
        {"tokenizer_config": FAST | {"bos_token": {"__type": "AddedToken", **MARK, "content": "[BOS]"}}},
        [[1, 4, 5, 6, 7, 2, 4, 5], [1, 1, 4], [1, 0]],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_folder_encodes_as_transformers_does(tmp_path: Path, case: str) -> None:
    transformers = pytest.importorskip("transformers")
    settings, expected = CASES[case]
    folder = write(tmp_path, **settings)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load(folder)
    assert [ours.encode(text) for text in (TEXT, OWN_BOS, CHAT)] == expected
    assert [theirs(text).input_ids for text in (TEXT, OWN_BOS, CHAT)] == expected
    assert load(folder / "tokenizer.json").encode(CHAT) == expected[2]


def test_text_is_neither_cut_nor_filled(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path))
    assert tokenizer.encode("the " * 125) == [1] + [4] * 125
    assert tokenizer.encode("the") == [1, 4]


def test_demo_finds_chat_marks_behind_a_tokenizers_own_prefix(tmp_path: Path) -> None:
    write(
        tmp_path,
        tokenizer_config=FAST | {"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]},
        config={"vocab_size": 10, "max_position_embeddings": 64},
    )
    assert ModelText.of(tmp_path).chats


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b'{"model": "cut sho'),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("special_tokens_map.json", b"{"),
        ("added_tokens.json", b"7"),
    ],
)
def test_broken_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(errors.TokenizerUnavailable) as caught:
        load(tmp_path)
    assert caught.value.fields == {"field": "tokenizer", "value": str(tmp_path / name)}


@pytest.mark.parametrize(
    "config", [{"added_tokens_decoder": {"x": MARK}}, {"added_tokens_decoder": [7]}, {"additional_special_tokens": [7]}]
)
def test_tokens_that_cannot_be_added_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(errors.TokenizerUnavailable, match="special tokens beside"):
        load(write(tmp_path, tokenizer_config=config))


class PanicException(BaseException):
    """What the Rust side of tokenizers raises, under the same name."""


class Given:
    """A user's tokenizer that answers, or raises, what it is given for each call."""

    def __init__(self, encoded: object, decoded: object = "x") -> None:
        self.encoded, self.decoded = encoded, decoded

    def encode(self, text: str) -> Any:
        return _answer(self.encoded)

    def decode(self, token_ids: object) -> Any:
        return _answer(self.decoded)


def _answer(value: object) -> object:
    if isinstance(value, BaseException):
        raise value
    return value


@pytest.fixture
async def controller() -> AsyncIterator[FakeController]:
    async with FakeController(answer=Answer(first_token=7)) as controller:
        yield controller


RAISED = [ValueError("no"), StopIteration(), KeyError("x"), RecursionError(), MemoryError(), PanicException("in Rust")]


@pytest.mark.parametrize(
    "encoded", [*RAISED, None, 7, "text", [1.5], [-1], [2**40], object()], ids=lambda one: type(one).__name__
)
async def test_tokenizer_that_cannot_encode_is_a_typed_error(controller: FakeController, encoded: object) -> None:
    async with AsyncClient(controller.address, tokenizer=Given(encoded)) as client:
        with pytest.raises(errors.TokenizerUnavailable) as caught:
            await client.prefill("the")
        (outcome,) = [outcome async for outcome in client.prefill_many(["the"])]
    assert caught.value.fields["field"] == "tokenizer"
    assert isinstance(outcome.error, errors.TokenizerUnavailable)
    assert controller.requests == []


@pytest.mark.parametrize("decoded", [*RAISED, None, b"x"], ids=repr)
async def test_tokenizer_that_cannot_decode_is_a_typed_error(controller: FakeController, decoded: object) -> None:
    async with AsyncClient(controller.address, tokenizer=Given([1], decoded)) as client:
        (outcome,) = [outcome async for outcome in client.prefill_many(["the"])]
    assert isinstance(outcome.error, errors.TokenizerUnavailable)
    assert outcome.error.fields == {"field": "tokenizer", "value": "Given"}


async def test_encoding_object_of_the_library_is_no_list_of_ids(controller: FakeController, tmp_path: Path) -> None:
    """The library's own tokenizer answers an object: said with its name, not with a shape."""
    backend = tokenizers.Tokenizer.from_file(str(write(tmp_path) / "tokenizer.json"))
    with pytest.raises(errors.TokenizerUnavailable) as caught:
        packed(backend, "the")
    assert caught.value.fields == {"field": "tokenizer", "value": "Encoding"}
