"""The gate for staleness: which part is named, what outlives a formation, what may install an epoch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from wavepp_proto.errors import StaleMessage
from wavepp_proto.fence import Standing, check_epoch, check_fence
from wavepp_proto.terms import Epoch, Fence, Formation, Incarnation

STANDING = Standing(Epoch(5), Formation(7), Incarnation(9))
FENCE = Fence(Epoch(5), Formation(7), Incarnation(9), 11)


def test_fence_passes_when_every_part_is_the_receivers() -> None:
    check_fence(FENCE, STANDING)
    check_epoch(FENCE, STANDING)


def _with(field: str, value: int) -> Fence:
    parts: dict[str, Any] = {field: value}
    return replace(FENCE, **parts)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize(("field", "mine"), [("incarnation", 9), ("epoch", 5), ("formation", 7)])
def test_fence_is_refused_by_name_when_a_part_is_older_or_newer(field: str, mine: int, change: int) -> None:
    with pytest.raises(StaleMessage) as caught:
        check_fence(_with(field, mine + change), STANDING)
    assert caught.value.fields == {"field": field, "value": str(mine + change), "limit": str(mine), "ordinal": "11"}


def test_first_wrong_part_is_named_when_several_are() -> None:
    with pytest.raises(StaleMessage) as caught:
        check_fence(Fence(Epoch(1), Formation(1), Incarnation(1)), STANDING)
    assert caught.value.fields["field"] == "incarnation"


def test_formation_is_not_compared_when_the_message_outlives_it() -> None:
    check_fence(replace(FENCE, formation=Formation(0)), STANDING, formation=False)
    with pytest.raises(StaleMessage, match="epoch"):
        check_fence(replace(FENCE, epoch=Epoch(4)), STANDING, formation=False)


def test_epoch_is_installed_only_upwards_when_asked() -> None:
    check_epoch(replace(FENCE, epoch=Epoch(6)), STANDING)
    with pytest.raises(StaleMessage) as caught:
        check_epoch(replace(FENCE, epoch=Epoch(4)), STANDING)
    assert caught.value.fields == {"field": "epoch", "value": "4", "limit": "5"}


def test_old_epoch_is_refused_with_its_cures_when_it_may_not_be_installed() -> None:
    with pytest.raises(StaleMessage, match=r"4 is older than 5: another controller leads.*restart the stage daemons"):
        check_epoch(replace(FENCE, epoch=Epoch(4)), STANDING)


def test_new_epoch_is_refused_when_it_speaks_to_another_incarnation() -> None:
    """A controller that knew an earlier life of this daemon must not fence the present one."""
    with pytest.raises(StaleMessage) as caught:
        check_epoch(Fence(Epoch(6), Formation(7), Incarnation(8)), STANDING)
    assert caught.value.fields["field"] == "incarnation"
