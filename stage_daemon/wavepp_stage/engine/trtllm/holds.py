"""What one attempt of one request holds of a TensorRT-LLM cache.

Owns the phases' data: a pin while it is leased, a request with its row and pages from the escrow on. The table of
phases is the core's (core/holds.py). `cache.py` is the only caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wavepp_proto.hashing import blocks_for
from wavepp_proto.terms import HoldState
from wavepp_stage.core.holds import Hold
from wavepp_stage.engine.trtllm import compat
from wavepp_stage.engine.trtllm.desk import Desk


@dataclass(slots=True, kw_only=True)
class TrtllmHold(Hold):
    """`leased_blocks` is the endpoint in blocks; the core's arrays stay empty, for blocks have no numbers here."""

    desk: Desk
    """Where pin and request come from: worthless once another one stands there."""
    tokens: list[int]
    """The prompt; empty once no claim can follow."""
    salt: str | None
    pin: compat.Pin | None = None
    request: compat.Request | None = None
    keys: list[str] = field(default_factory=list)
    """What events call the prompt's full blocks; empty before the escrow."""
    backed: tuple[int, int, int] = (0, 0, 0)
    """Where the reservation's blocks came from: free, off-loaded and evicted ones."""

    def endpoint(self, block_tokens: int) -> int:
        return self.leased_blocks * block_tokens

    def own_blocks(self, block_tokens: int) -> int:
        """Blocks taken beside the prefix."""
        return blocks_for(self.prompt_tokens, block_tokens) - self.leased_blocks if self.request is not None else 0

    def state(self, block_tokens: int) -> HoldState:
        """Nothing is promised here: what is escrowed is taken."""
        endpoint = self.endpoint(block_tokens)
        return HoldState(
            self.key,
            self.phase.value,
            endpoint=endpoint,
            leased_blocks=self.leased_blocks,
            escrow_blocks=0,
            owned_blocks=self.own_blocks(block_tokens),
        )


def namespace(hold: Hold) -> str | None:
    """Salt of the tree in which a prompt's blocks are looked up.

    A stage is not told the tenant's salt nor the adapter, but the hash of a prompt's first block covers both, and
    prompts share a prefix only if they share that block: it names the tree. None for a prompt of less than a block,
    which shares nothing."""
    return hold.hashes.full[0].tobytes().hex() if len(hold.hashes) else None
