"""The one gate for staleness (DESIGN.md): called before any handler, on both sides.

Owns the comparison of fence tuples; handlers never look at epochs, formations or incarnations.
"""

from __future__ import annotations

from dataclasses import dataclass

from wavepp_proto.errors import StaleMessage
from wavepp_proto.terms import Epoch, Fence, Formation, Incarnation

NO_EPOCH = Epoch(0)
NO_FORMATION = Formation(0)


@dataclass(frozen=True, slots=True)
class Standing:
    """What the receiver currently is."""

    epoch: Epoch
    formation: Formation
    incarnation: Incarnation


def check_fence(fence: Fence, standing: Standing, *, formation: bool = True) -> None:
    """Raise StaleMessage naming the first part of `fence` that is not the receiver's.

    `formation=False` for messages that outlive a formation (rounds of releases, inventory, join).
    """
    pairs = [("incarnation", fence.incarnation, standing.incarnation), ("epoch", fence.epoch, standing.epoch)]
    if formation:
        pairs.append(("formation", fence.formation, standing.formation))
    for field, got, mine in pairs:
        if got != mine:
            raise StaleMessage(
                f"{field} {got} does not match {mine}", field=field, value=got, limit=mine, ordinal=fence.ordinal
            )


def check_epoch(fence: Fence, standing: Standing) -> None:
    """For messages that may INSTALL an epoch (inventory, join): lower ones are stale."""
    if fence.incarnation != standing.incarnation:
        check_fence(fence, standing, formation=False)
    if fence.epoch < standing.epoch:
        raise StaleMessage(
            f"epoch {fence.epoch} is older than {standing.epoch}: another controller leads, "
            "or etcd lost its history (then restart the stage daemons)",
            field="epoch",
            value=fence.epoch,
            limit=standing.epoch,
        )
