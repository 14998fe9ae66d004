"""The request life as a table: total, closed under its inputs, and explaining what it refuses."""

from __future__ import annotations

from itertools import product

import pytest

from wavepp_controller.core.request_table import (
    HOLDING,
    IMPOSSIBLE,
    LIVING,
    TABLE,
    TERMINAL,
    IllegalTransition,
    RequestInput,
    RequestState,
    next_state,
)

S, In = RequestState, RequestInput
PAIRS = list(product(RequestState, RequestInput))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_pair_is_legal_or_impossible_with_a_reason_when_walked(pair: tuple[RequestState, RequestInput]) -> None:
    assert (pair in TABLE) != (pair in IMPOSSIBLE)
    if pair in IMPOSSIBLE:
        assert IMPOSSIBLE[pair]
        with pytest.raises(IllegalTransition):
            next_state("r", *pair, ())
    else:
        assert next_state("r", *pair, ()) is TABLE[pair]


def test_illegal_transition_tells_the_story_when_raised() -> None:
    with pytest.raises(IllegalTransition) as caught:
        next_state("r7", S.QUEUED, In.COMMIT, ["1.0 received --accept--> queued", "1.1 something else"])
    message = str(caught.value)
    assert "r7 in queued cannot take 'commit': it is in no round" in message
    assert "received --accept--> queued\n  1.1 something else" in message


def test_every_living_state_can_end_when_a_client_or_a_clock_says_so() -> None:
    for state in LIVING:
        assert TABLE[state, In.CANCEL] is S.CANCELLED
        assert TABLE[state, In.EXPIRE] is S.FAILED
        assert TABLE[state, In.FAIL] is S.FAILED


def test_every_state_is_reachable_when_walking_from_received() -> None:
    reached, left = {S.RECEIVED}, [S.RECEIVED]
    while left:
        state = left.pop()
        following = {after for (before, _), after in TABLE.items() if before is state} - reached
        reached |= following
        left += following
    assert reached == set(RequestState)


def test_terminal_states_have_no_way_out_when_reached() -> None:
    assert not [pair for pair in TABLE if pair[0] in TERMINAL]


def test_what_holds_cache_is_lost_with_the_formation_when_it_ends() -> None:
    for state in LIVING:
        given = In.READMIT if state in HOLDING else In.NEW_FORMATION
        assert TABLE[state, given] is S.QUEUED
