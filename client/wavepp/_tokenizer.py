"""Where a text prompt's tokenizer comes from, and what it makes of text.

Owns finding it (a path the user gave, else the model folder that the controller names, if that exists
on this host), reading it as transformers does, and keeping it loaded. Imports `tokenizers` (extra `text`)
only when text comes in; no torch. Having none, and one that raises, end in TokenizerUnavailable, which
says what to do. Called by the client and the demo.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from wavepp._prompt import pack
from wavepp._types import Description, Tokenizer
from wavepp_proto.errors import EmptyPrompt, InvalidRequest, PromptTooLong, TokenizerUnavailable, WaveppError

if TYPE_CHECKING:
    import tokenizers

FILE = "tokenizer.json"
GIVE_PATH: Final = "give tokenizer=PATH"
SEND_IDS: Final = "send token ids"
"""What errors advise; the commands say the same in their own words."""
_CONFIG: Final = "tokenizer_config.json"
_SPECIAL: Final = "special_tokens_map.json"
_ADDED: Final = "added_tokens.json"
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""In the order in which transformers gives ids to those that have none."""
_PANIC: Final = "PanicException"
"""What a fault in Rust raises. It is no Exception, and cannot be imported."""


class Tokenizers:
    """The client's tokenizers: one given by the user, or one per pipeline as the controller names them."""

    def __init__(
        self,
        given: str | os.PathLike[str] | Tokenizer | None,
        describe: Callable[[str | None], Awaitable[Description]],
    ) -> None:
        self._describe = describe
        self._path: Path | None = None
        self._given: Tokenizer | None = None
        if isinstance(given, (str, os.PathLike)):
            self._path = Path(given)
        elif given is not None:
            self._given = CheckedTokenizer(given, type(given).__name__)
        self._loaded: dict[Path, Tokenizer] = {}
        self._loading = asyncio.Lock()

    async def of(self, pipeline: str | None) -> Tokenizer:
        """The tokenizer for text sent to `pipeline`. Raises TokenizerUnavailable, or what Describe raises."""
        if self._given is not None:
            return self._given
        path = self._path or _named_folder(await self._describe(pipeline))
        async with self._loading:
            if path not in self._loaded:
                self._loaded[path] = await asyncio.to_thread(load, path)
            return self._loaded[path]


def load(path: Path) -> Tokenizer:
    """The tokenizer in the folder or file `path`. Blocking: reads and parses megabytes.

    Raises TokenizerUnavailable naming the file that is missing or broken."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        message = f"there is no {FILE} at {path}: {GIVE_PATH} of a model folder or of its {FILE}, or {SEND_IDS}"
        raise TokenizerUnavailable(message, field="tokenizer", value=str(path))
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        message = f"text prompts need the package tokenizers: pip install tokenizers, or {SEND_IDS}"
        raise TokenizerUnavailable(message, field="tokenizer", value=str(path)) from error
    with _typed(str(file), f"{file} is no tokenizer this version of tokenizers can read"):
        backend = Backend.from_buffer(file.read_bytes())
        # How a training run cut and filled its rows; transformers turns both off for a call that asks for neither.
        backend.no_truncation()
        backend.no_padding()
    if file.name == FILE:
        with _typed(str(file), f"the special tokens beside {file} cannot be added"):
            backend.add_tokens(_added_tokens(backend, file.parent))
            backend.encode_special_tokens = bool(_object(file.with_name(_CONFIG)).get("split_special_tokens"))
    return CheckedTokenizer(FileTokenizer(backend), str(file))


def packed(tokenizer: Tokenizer, text: str) -> bytes:
    """`text` as packed token ids. Blocking. Raises EmptyPrompt, PromptTooLong or TokenizerUnavailable."""
    ids = tokenizer.encode(text)
    name = type(ids).__name__
    with _typed(name, "the tokenizer did not encode to token ids"):
        try:
            return pack(ids)
        except (EmptyPrompt, PromptTooLong):
            raise
        except InvalidRequest as error:
            message = f"the tokenizer did not encode to token ids: {error.message}"
            raise TokenizerUnavailable(message, field="tokenizer", value=name) from error


def first_text(tokenizer: Tokenizer, last_prompt_token: int, first_token: int) -> str:
    """Text that `first_token` adds after the prompt.

    Decoded behind its neighbour: alone, some vocabularies lose the space in front of a word.
    """
    before = tokenizer.decode([last_prompt_token])
    both = tokenizer.decode([last_prompt_token, first_token])
    return both[len(before) :] if both.startswith(before) else tokenizer.decode([first_token])


class FileTokenizer:
    """A tokenizer.json as a `Tokenizer`."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def encode(self, text: str, /) -> list[int]:
        return list(self._backend.encode(text).ids)

    def decode(self, token_ids: Sequence[int], /) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))


class CheckedTokenizer:
    """Any tokenizer; everything it raises becomes a TokenizerUnavailable that names it."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name

    def encode(self, text: str, /) -> Sequence[int]:
        with _typed(self._name, "the tokenizer failed to encode the prompt"):
            return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int], /) -> str:
        with _typed(self._name, f"the tokenizer failed to decode {list(token_ids)}"):
            text: object = self._tokenizer.decode(token_ids)
            if not isinstance(text, str):
                raise TypeError(f"got {type(text).__name__}, not text")
            return text


@contextmanager
def _typed(name: str, message: str) -> Iterator[None]:
    """Raises TokenizerUnavailable for what a tokenizer, which may be anybody's, raises."""
    try:
        yield
    except BaseException as error:
        foreign = isinstance(error, Exception) or type(error).__name__ == _PANIC
        if isinstance(error, WaveppError) or not foreign:
            raise
        said = f"{message}: {type(error).__name__}: {error}"
        raise TokenizerUnavailable(said, field="tokenizer", value=name) from error


def _added_tokens(backend: tokenizers.Tokenizer, folder: Path) -> list[tokenizers.AddedToken]:
    """What the files beside tokenizer.json add to it, in the order and with the precedence of transformers.

    `add_bos_token` and `add_eos_token` do nothing, as in transformers: beside a tokenizer.json, the post-processor
    in that file alone puts tokens around a text.
    """
    settings = _object(folder / _CONFIG)
    listed = settings.get("added_tokens_decoder")
    if listed is None:
        settings |= _object(folder / _SPECIAL)
        listed = {index: content for content, index in _object(folder / _ADDED).items()}
    named = {key: token for key, token in settings.items() if key.endswith("_token") and isinstance(token, (str, dict))}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named, extra = named | extra, []
    first = {key: named[key] for key in _NAMED if key in named}
    special = {_content(token): token for token in (*(first | named).values(), *extra)}
    added = {
        _content(token): _added_token(token, special=_content(token) in special)
        for _, token in sorted(listed.items(), key=lambda entry: int(entry[0]))
    }
    there = {token.content for token in backend.get_added_tokens_decoder().values()}
    for content, token in special.items():
        if content not in there and content not in added:
            added[content] = _added_token(token, special=True)
    return list(added.values())


def _added_token(token: str | dict[str, Any], special: bool) -> tokenizers.AddedToken:
    """`special` holds where the token itself does not say it."""
    from tokenizers import AddedToken

    if isinstance(token, str):
        return AddedToken(token, special=special, normalized=not special)
    flags = {name: value for name, value in token.items() if name != "__type"}
    return AddedToken(**flags | {"special": flags.get("special", False) or special})


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; empty if there is no such file."""
    if not file.is_file():
        return {}
    with _typed(str(file), f"{file} cannot be read"):
        found = json.loads(file.read_bytes())
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}, no object")
        return found


def _named_folder(description: Description) -> Path:
    remedy = f"{GIVE_PATH} of a copy of the model's folder, or {SEND_IDS}"
    if not description.model_path:
        message = f"the controller names no model folder for pipeline {description.pipeline}: {remedy}"
        raise TokenizerUnavailable(message, field="tokenizer", pipeline=description.pipeline)
    path = Path(description.model_path)
    if not path.exists():
        message = f"the controller's model folder {path} does not exist on this host: {remedy}"
        raise TokenizerUnavailable(message, field="tokenizer", value=str(path), pipeline=description.pipeline)
    return path
