"""Where a text prompt's tokenizer comes from, and the three lines of work it does.

Owns finding it (a path the user gave, else the model folder that the controller names, if that exists
on this host) and keeping it loaded. Imports `tokenizers` (extra `text`) only when text comes in; no
torch. Every way to have none ends in TokenizerUnavailable, which says what to do. Called by the client.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from wavepp._types import Description, Tokenizer
from wavepp_proto.errors import TokenizerUnavailable

if TYPE_CHECKING:
    import tokenizers

FILE = "tokenizer.json"
GIVE_PATH: Final = "give tokenizer=PATH"
SEND_IDS: Final = "send token ids"
"""What errors advise; the commands say the same in their own words."""


class Tokenizers:
    """The client's tokenizers: one given by the user, or one per pipeline as the controller names them."""

    def __init__(
        self,
        given: str | os.PathLike[str] | Tokenizer | None,
        describe: Callable[[str | None], Awaitable[Description]],
    ) -> None:
        self._describe = describe
        self._path = Path(given) if isinstance(given, (str, os.PathLike)) else None
        self._given = None if isinstance(given, (str, os.PathLike)) else given
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
    """The tokenizer in the folder or file `path`. Blocking: reads and parses megabytes."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        message = f"there is no {FILE} at {path}: {GIVE_PATH} of a model folder or of its {FILE}, or {SEND_IDS}"
        raise TokenizerUnavailable(message, field="tokenizer", value=str(path))
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        message = f"text prompts need the package tokenizers: pip install tokenizers, or {SEND_IDS}"
        raise TokenizerUnavailable(message, field="tokenizer", value=str(path)) from error
    try:
        return FileTokenizer(Backend.from_file(str(file)))
    except Exception as error:  # the library raises bare Exception for every broken file
        message = f"{file} is no tokenizer this version of tokenizers can read: {error}"
        raise TokenizerUnavailable(message, field="tokenizer", value=str(file)) from error


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
