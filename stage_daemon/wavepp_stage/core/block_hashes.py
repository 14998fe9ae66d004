"""The announced block hashes of one prompt, as arrays.

Owns their unpacking only: hashing is the controller's (wavepp_proto.hashing), meaning is the tree's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavepp_proto.hashing import HASH_BYTES, SHORT_BYTES

Shorts = npt.NDArray[np.uint64]
FULL = np.dtype(f"V{HASH_BYTES}")


@dataclass(frozen=True, slots=True, eq=False)
class BlockHashes:
    """Hash i names the prefix [0, (i + 1) * B) of one prompt."""

    full: npt.NDArray[np.void]
    """Shape [full blocks], 32 bytes each."""
    shorts: Shorts
    """Shape [full blocks]: the first 8 bytes of each, the keys of every map."""

    @classmethod
    def unpack(cls, packed: bytes) -> BlockHashes:
        words = np.frombuffer(packed, dtype="<u8").reshape(-1, HASH_BYTES // SHORT_BYTES)
        return cls(np.frombuffer(packed, dtype=FULL), np.ascontiguousarray(words[:, 0]))

    def __len__(self) -> int:
        return len(self.shorts)
