"""The radix tree of committed blocks: matching, and what goes when a page is dropped.

Owns blocks and their place. A block hangs on its parent; a dropped attention page takes its whole
subtree with it, a dropped snapshot takes only itself. Called by `_sequence.py` and `_manager.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ._common import ReuseScope, Tokens, block_key, root_key
from ._event_manager import KVCacheEventManager
from ._storage import Page, Storage


@dataclass(eq=False)
class Block:
    tokens: tuple[int, ...]
    """Empty for a root; fewer than a block's for the last, partial one."""
    key: bytes
    scope: ReuseScope
    parent: Block | None
    children: dict[tuple[int, ...], Block] = field(default_factory=dict)
    pages: dict[int, Page] = field(default_factory=dict)
    """Layer group to page."""

    @property
    def is_root(self) -> bool:
        return self.parent is None


@dataclass(frozen=True)
class Match:
    num_tokens: int
    blocks: list[Block]
    """The last one in part, if `num_tokens` is not a multiple of a block."""


class RadixTree:
    def __init__(self, storage: Storage, tokens_per_block: int, attention: int | None, recurrent: int | None,
                 events: KVCacheEventManager | None) -> None:  # fmt: skip
        self._storage = storage
        self.tokens_per_block = tokens_per_block
        self._attention = attention
        self._recurrent = recurrent
        self._events = events
        self._roots: dict[ReuseScope, Block] = {}
        storage.on_drop = self._dropped
        storage.on_move = self._moved

    def root(self, scope: ReuseScope) -> Block:
        if scope not in self._roots:
            self._roots[scope] = Block((), root_key(scope), scope, None)
        return self._roots[scope]

    def match(self, scope: ReuseScope, tokens: Tokens, partial: bool) -> Match:
        """The longest usable prefix of exactly these tokens."""
        found = self._full_blocks(scope, tokens)
        if self._recurrent is not None:
            while found and self._recurrent not in found[-1].pages:
                found.pop()
            return Match(len(found) * self.tokens_per_block, found)
        length = len(found) * self.tokens_per_block
        if partial:
            rest = tuple(tokens[length : length + self.tokens_per_block])
            above = found[-1] if found else self._roots.get(scope)
            best = max(above.children.values(), key=lambda child: _common(child.tokens, rest)) if (
                above is not None and above.children) else None  # fmt: skip
            if best is not None and (extra := _common(best.tokens, rest)):
                return Match(length + extra, [*found, best])
        return Match(length, found)

    def _full_blocks(self, scope: ReuseScope, tokens: Tokens) -> list[Block]:
        found: list[Block] = []
        block = self._roots.get(scope)
        for start in range(0, len(tokens) - self.tokens_per_block + 1, self.tokens_per_block):
            key = tuple(int(token) for token in tokens[start : start + self.tokens_per_block])
            block = block.children.get(key) if block is not None else None
            if block is None or (self._attention is not None and self._attention not in block.pages):
                break
            found.append(block)
        return found

    def find_or_add(self, parent: Block, tokens: tuple[int, ...]) -> tuple[Block, bool]:
        """(block, whether it is new). A partial block below one that begins alike is useless: that one is given."""
        if tokens in parent.children:
            return parent.children[tokens], False
        if len(tokens) < self.tokens_per_block:
            longer = next((child for child in parent.children.values() if child.tokens[: len(tokens)] == tokens), None)
            if longer is not None:
                return longer, False
        block = Block(tokens, block_key(parent.key, tokens), parent.scope, parent)
        for shorter in [child for child in parent.children.values() if tokens[: len(child.tokens)] == child.tokens]:
            if all(page.holds == 0 for page in shorter.pages.values()):
                self._remove(shorter)
        parent.children[tokens] = block
        return block, True

    def attach(self, block: Block, page: Page) -> None:
        """`page` holds the block's data from now on."""
        assert page.group not in block.pages
        block.pages[page.group] = page
        page.block = block
        if self._events is not None:
            self._events.add_stored(block, page)

    def _moved(self, page: Page, old_level: int) -> None:
        if self._events is not None and page.block is not None:
            self._events.add_moved(page.block, page, old_level)

    def _dropped(self, page: Page) -> None:
        block = page.block
        if block is None:
            raise AssertionError("an uncommitted page is never droppable")
        if page.group == self._recurrent:
            self._detach(block, page)
            self._prune(block)
        else:
            self._remove(block)

    def _detach(self, block: Block, page: Page) -> None:
        del block.pages[page.group]
        page.block = None
        self._storage.release(page)
        if self._events is not None:
            self._events.add_removed(block, page.group)

    def _prune(self, block: Block) -> None:
        """Blocks that hold nothing and lead nowhere go: without attention layers no page keeps them."""
        while block.parent is not None and not block.pages and not block.children:
            block.parent.children.pop(block.tokens)
            block = block.parent

    def _remove(self, block: Block) -> None:
        """The subtree, deepest first."""
        for child in list(block.children.values()):
            self._remove(child)
        for page in list(block.pages.values()):
            self._detach(block, page)
        assert block.parent is not None
        block.parent.children.pop(block.tokens, None)

    def clear(self) -> None:
        for root in self._roots.values():
            for child in list(root.children.values()):
                self._remove(child)
        self._roots.clear()

    def blocks(self) -> Iterator[Block]:
        """Every block, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            block = stack.pop()
            yield block
            stack.extend(block.children.values())


def _common(left: Tokens, right: Tokens) -> int:
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
