"""Where stages that load together find out that all have come, before anything collective begins.

Owns that one wait, which unlike a collective of torch can be given up: when one stage cannot come, the join is
over for all, and the others must be free for the next one at once. Called on the executor's thread by engines
whose load is collective, with whatever store they have in common.
"""

from __future__ import annotations

import time

from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.base import StageGroup
from wavepp_stage.engine.bounded_store import KeyStore

POLL_S = 0.02


def gather(store: KeyStore, group: StageGroup, place: int) -> None:
    """Say that `place` has come and wait for all others. Raises EngineFault naming who is absent, at the group's
    time-out or once the join is given up."""
    keys = [f"{group.name}/came/{one}" for one in range(len(group.pools))]
    deadline = time.monotonic() + group.timeout_s
    store.set(keys[place], "1")
    while not store.check(keys):
        given_up = group.abandoned.wait(POLL_S)
        if given_up or time.monotonic() > deadline:
            absent = " ".join(str(one) for one, key in enumerate(keys) if not store.check([key]))
            why = "before the join was given up" if given_up else f"within {group.timeout_s:g} s"
            raise EngineFault(f"place {absent or 'none'} did not come {why}", field="group", value=absent)
