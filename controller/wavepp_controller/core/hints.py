"""What every stage is thought to hold of a request's prefix (DESIGN.md, hint).

Owns the combination of the index (what digests say) with the chains that requests have just published,
over the cache groups of one formation, and when a hint is worth computing again. A hint binds nobody.
Called by `admission`.
"""

from __future__ import annotations

from wavepp_controller.core import traced
from wavepp_controller.core.fresh import FreshChains
from wavepp_controller.core.index import ReuseIndex
from wavepp_controller.core.request import Request
from wavepp_proto.digest import Hashes


class Hints:
    def __init__(self, index: ReuseIndex, *, attention: bool, recurrent: bool) -> None:
        self._index, self._attention, self._recurrent = index, attention, recurrent
        self._fresh = FreshChains()

    def refresh(self, request: Request, now: float) -> None:
        """Set the candidate, unless nothing has become known since it was computed."""
        version = (self._index.version, self._fresh.version)
        if request.current.hinted_version == version or request.chain is None:
            return
        request.current.hinted_version = version
        blocks = self._blocks(request.chain, request.cap // request.block_tokens, now)
        request.current.candidate = blocks * request.block_tokens
        traced.hinted(request, now)

    def published(self, request: Request, now: float) -> None:
        """The request has finished: every stage has published its full blocks, and the snapshots it took."""
        if request.chain is not None:
            places = (place // request.block_tokens for place in request.current.taken_snapshots)
            self._fresh.finished(request.chain, now, places)

    def _blocks(self, chain: Hashes, most: int, now: float) -> int:
        if self._attention:
            most = min(most, self._fresh.extend(chain, self._index.attention_blocks(chain), now))
        if not self._recurrent:
            return most
        return self._fresh.snapshot_blocks(chain, self._index.snapshot_blocks(chain, most), most, now)
