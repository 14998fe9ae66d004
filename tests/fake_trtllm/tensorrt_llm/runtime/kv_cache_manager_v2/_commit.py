"""How a sequence's computed blocks become reusable.

Owns one block of a sequence and its way into the tree. A block that is there already is not stored
twice: the sequence goes over to the page that the tree has, so the number of its page changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._common import OutOfPagesError
from ._storage import Page
from ._tree import Block

if TYPE_CHECKING:
    from ._sequence import _KVCache


@dataclass(eq=False, slots=True)
class SeqBlock:
    page: Page | None
    """None on a stage without attention layers."""
    tree: Block | None
    """None until committed."""


def commit_block(sequence: _KVCache, index: int) -> None:
    """Block `index` of `sequence`, full or the last one; one that cannot be found from the root stays private."""
    manager, block = sequence.manager, sequence.blocks[index]
    parent = sequence.blocks[index - 1].tree if index else manager.tree.root(sequence.reuse_scope)
    if parent is None:
        return
    start = index * sequence.tokens_per_block
    tokens = tuple(sequence.tokens[start : start + sequence.tokens_per_block])
    is_full = len(tokens) == sequence.tokens_per_block
    tree, is_new = manager.tree.find_or_add(parent, tokens)
    if not is_new and not is_full:
        return
    if block.page is not None and not _attach_or_rebase(sequence, block, block.page, tree):
        return
    block.tree = tree
    if is_full and start + len(tokens) == len(sequence.tokens):
        _take_snapshot(sequence, tree)


def _attach_or_rebase(sequence: _KVCache, block: SeqBlock, own: Page, tree: Block) -> bool:
    """False when the page that exists cannot be brought to the device: then the own one stays, private."""
    storage = sequence.manager.storage
    existing = tree.pages.get(own.group)
    if existing is None:
        sequence.manager.tree.attach(tree, own)
        return True
    storage.hold(existing)
    try:
        storage.onboard([existing])
    except OutOfPagesError:
        storage.unhold(existing)
        return False
    storage.lock(existing)
    sequence.give_back(own)
    block.page = existing
    return True


def _take_snapshot(sequence: _KVCache, tree: Block) -> None:
    """A copy of the recurrent state at the end of what is committed; without room there is none, silently."""
    storage, group = sequence.manager.storage, sequence.manager.recurrent_group
    if group is None or sequence.recurrent is None or group in tree.pages:
        return
    for level in range(len(storage.levels)):
        try:
            (page,) = storage.take(level, group, 1)
        except OutOfPagesError:
            continue
        storage.copy(sequence.recurrent, page)
        storage.hold(page)
        sequence.manager.tree.attach(tree, page)
        storage.unhold(page)
        return
