"""Hints that count on what a finished request has just published."""

from __future__ import annotations

import numpy as np

from wavepp_controller.core.fresh import KEEP_S, FreshChains


def chain(*hashes: int) -> np.ndarray:
    return np.array(hashes, dtype=np.uint64)


def test_prefix_is_extended_to_the_common_part_when_a_request_has_just_finished() -> None:
    fresh = FreshChains()
    fresh.finished(chain(1, 2, 3, 4), 0.0)
    assert fresh.extend(chain(1, 2, 3, 9, 9), 0, 0.1) == 3
    assert fresh.extend(chain(1, 2, 3, 4, 5), 2, 0.1) == 4
    assert fresh.extend(chain(7, 8), 0, 0.1) == 0


def test_longest_of_several_finished_requests_counts() -> None:
    fresh = FreshChains()
    fresh.finished(chain(1, 2), 0.0)
    fresh.finished(chain(1, 2, 3), 0.0)
    fresh.finished(chain(5), 0.0)
    assert fresh.extend(chain(1, 2, 3, 4), 0, 0.1) == 3


def test_nothing_is_believed_when_it_is_old_or_empty() -> None:
    fresh = FreshChains()
    fresh.finished(chain(), 0.0)
    fresh.finished(chain(1, 2), 0.0)
    assert fresh.extend(chain(1, 2), 0, KEEP_S + 0.01) == 0
    assert fresh.extend(chain(), 0, 0.0) == 0


def test_index_is_never_shortened() -> None:
    fresh = FreshChains()
    fresh.finished(chain(1), 0.0)
    assert fresh.extend(chain(1, 2, 3), 3, 0.1) == 3


def test_deepest_snapshot_within_the_prefix_counts_when_a_request_took_some() -> None:
    fresh = FreshChains()
    fresh.finished(chain(1, 2, 3, 4, 5, 6), 0.0, (2, 4, 6))
    fresh.finished(chain(1, 2, 3, 9), 0.0, (3,))
    assert fresh.snapshot_blocks(chain(1, 2, 3, 4, 5, 7), 0, 5, 0.1) == 4
    assert fresh.snapshot_blocks(chain(1, 2, 3, 4, 5, 7), 0, 3, 0.1) == 3
    assert fresh.snapshot_blocks(chain(1, 2, 8), 0, 3, 0.1) == 2
    assert fresh.snapshot_blocks(chain(8, 9, 10, 11), 0, 4, 0.1) == 0


def test_snapshot_that_the_index_knows_is_never_passed_over_for_an_earlier_one() -> None:
    fresh = FreshChains()
    fresh.finished(chain(1, 2, 3, 4), 0.0, (2,))
    assert fresh.snapshot_blocks(chain(1, 2, 3, 4), 3, 4, 0.1) == 3
    assert fresh.snapshot_blocks(chain(1, 2, 3, 4), 0, 4, KEEP_S + 0.01) == 0
