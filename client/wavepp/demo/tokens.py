"""Text to token ids and back for the demo's model, whatever folder it is.

Owns the three forms of a prompt: ChatML where the vocabulary has its marks, plain paragraphs for any
other tokenizer.json, and for a folder without one (random weights) words hashed to ids. Reads the
model's configuration for its vocabulary and window. Called by `prompts.py` and the report.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from wavepp._tokenizer import FILE, first_text, load
from wavepp._types import Tokenizer
from wavepp_proto.errors import InvalidRequest

CHAT_START, CHAT_END = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True, slots=True)
class ModelText:
    """How a model folder reads and writes text."""

    tokenizer: Tokenizer | None
    """None: words become ids by hash and ids cannot become text."""
    vocabulary: int
    window: int
    """Longest prompt (tokens)."""

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read `folder`. Raises InvalidRequest (no model) or TokenizerUnavailable (an unreadable tokenizer)."""
        try:
            config = json.loads((folder / "config.json").read_bytes())
            vocabulary, window = int(config["vocab_size"]), int(config["max_position_embeddings"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidRequest(f"{folder} is no model folder: {error!r}", field="model", value=str(folder)) from error
        tokenizer = load(folder) if (folder / FILE).is_file() else None
        return cls(tokenizer, vocabulary, window)

    @property
    def chats(self) -> bool:
        """Whether the vocabulary has ChatML's marks as single tokens."""
        if self.tokenizer is None:
            return False
        # Without what a post-processor puts around every text.
        return len(self.tokenizer.encode(CHAT_START)) - len(self.tokenizer.encode("")) == 1

    def encode(self, system: str, user: str, begun: str) -> tuple[int, ...]:
        """A whole prompt up to where the model goes on with the answer, which begins with `begun`.

        Equal beginnings of the text give equal first tokens."""
        if self.tokenizer is None:
            return tuple(zlib.crc32(word.encode()) % self.vocabulary for word in f"{system} {user} {begun}".split())
        if not self.chats:
            return tuple(self.tokenizer.encode("\n\n".join(filter(None, (system, user, f"Answer: {begun}")))))
        turns = [("system", system), ("user", user)]
        text = "".join(f"{CHAT_START}{role}\n{said}{CHAT_END}\n" for role, said in turns if said)
        return tuple(self.tokenizer.encode(f"{text}{CHAT_START}assistant\n{begun}"))

    def text_after(self, prompt: Sequence[int], token: int) -> str:
        """What `token` adds after `prompt`."""
        return f"#{token}" if self.tokenizer is None else first_text(self.tokenizer, prompt[-1], token)
