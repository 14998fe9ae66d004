"""When the bench sends its next request, and which of them count: exact, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.harness.virtual_clock import VirtualClock
from wavepp.bench.load import Ask, Extent, closed_loop, open_loop
from wavepp.bench.measure import Sample
from wavepp.bench.window import MOST_FAILURES, Window
from wavepp_proto.workload import MOMENT_S, Arrival, Part, Prompt

PROMPT = Prompt((Part("stream", 100),))


def asker(
    clock: VirtualClock, ends: Callable[[float, int], float], reason: str = "", seen: list[int] | None = None
) -> Ask:
    """Requests that end at `ends(sent, number)`; `seen` gets how many were under way at each sending."""
    under_way = 0

    async def ask(number: int, prompt: Prompt, due_s: float) -> Sample:
        nonlocal under_way
        under_way += 1
        if seen is not None:
            seen.append(under_way)
        sent_s = clock.now()
        await clock.until(ends(sent_s, number))
        under_way -= 1
        return Sample(number, "", due_s, sent_s, clock.now(), prompt.tokens, 0, reason=reason)

    return ask


def numbers(samples: list[Sample]) -> list[int]:
    return [one.number for one in samples]


async def test_closed_loop_measures_from_the_end_of_its_warmup() -> None:
    clock, window, seen = VirtualClock(), Window(), list[int]()
    ask = asker(clock, lambda sent, number: sent + 1 + number % 2 / 2, seen=seen)
    await clock.run(closed_loop(ask, lambda number: PROMPT, 2, Extent(2, 4, 0.0), window, clock))
    # 0 ends at 1.0, 1 at 1.5; then 2 at 2.0 (its slot sent it at 1.0), 3 at 3.0, 4 at 3.0, 5 at 4.5, ...
    assert (numbers(window.warmup), window.opened_s) == ([0, 1], 1.5)
    assert (numbers(window.measured), window.closed_s) == ([2, 3, 4, 6], 4.0)
    assert numbers(window.tail) == [5, 7]
    assert max(seen) == 2
    assert window.seconds == 2.5


async def test_closed_loop_gives_up_what_runs_at_the_end_when_no_tail_is_wanted() -> None:
    clock, window = VirtualClock(), Window()
    ask = asker(clock, lambda sent, number: sent + 1 + number % 2 / 2)
    await clock.run(closed_loop(ask, lambda number: PROMPT, 2, Extent(2, 4, 0.0, tail=False), window, clock))
    assert (numbers(window.measured), window.closed_s) == ([2, 3, 4, 6], 4.0)
    assert window.tail == []


async def test_closed_loop_begins_and_ends_between_waves_when_requests_end_together() -> None:
    """Four requests share each wave of one second: two extra ones of the warm-up's wave would have cost no time."""
    clock, window = VirtualClock(), Window()
    ask = asker(clock, lambda sent, number: number // 4 + 1 + number % 4 * MOMENT_S / 8)
    await clock.run(closed_loop(ask, lambda number: PROMPT, 8, Extent(2, 6, 0.0), window, clock))
    last = 3 * MOMENT_S / 8
    assert (numbers(window.warmup), window.opened_s) == ([0, 1, 2, 3], 1 + last)
    assert (numbers(window.measured), window.closed_s) == (list(range(4, 12)), 3 + last)
    assert len(window.measured) / window.seconds == 4.0


async def test_closed_loop_goes_on_until_both_requests_and_seconds_are_reached() -> None:
    clock, window = VirtualClock(), Window()
    ask = asker(clock, lambda sent, number: sent + 1)
    await clock.run(closed_loop(ask, lambda number: PROMPT, 1, Extent(1, 2, 5.0), window, clock))
    assert numbers(window.measured) == [1, 2, 3, 4, 5]
    assert (window.opened_s, window.closed_s) == (1.0, 6.0)


async def test_closed_loop_without_warmup_measures_from_its_start() -> None:
    clock, window = VirtualClock(), Window()
    ask = asker(clock, lambda sent, number: sent + 1)
    await clock.run(closed_loop(ask, lambda number: PROMPT, 1, Extent(0, 2, 0.0), window, clock))
    assert (numbers(window.measured), window.opened_s, window.closed_s) == ([0, 1], 0.0, 2.0)


async def test_requests_that_always_end_together_cannot_put_off_the_window() -> None:
    clock, window = VirtualClock(), Window()
    ask = asker(clock, lambda sent, number: sent + MOMENT_S / 4)
    await clock.run(closed_loop(ask, lambda number: PROMPT, 2, Extent(2, 4, 0.0), window, clock))
    assert window.opened.is_set()
    assert window.closed.is_set()


@pytest.mark.parametrize("warmup", [0, 1000])
async def test_cell_ends_early_when_everything_fails(warmup: int) -> None:
    clock, window = VirtualClock(), Window()
    ask = asker(clock, lambda sent, number: sent + 1, reason="STAGE_LOST")
    await clock.run(closed_loop(ask, lambda number: PROMPT, 1, Extent(warmup, 10_000, 0.0), window, clock))
    assert (window.broken, window.unexpected, window.ended) == (True, MOST_FAILURES, MOST_FAILURES)
    assert window.opened.is_set() is (warmup == 0)


async def test_failures_that_were_expected_end_nothing() -> None:
    clock, window = VirtualClock(), Window(frozenset({"TOO_LATE"}))
    ask = asker(clock, lambda sent, number: sent + 1, reason="TOO_LATE")
    await clock.run(closed_loop(ask, lambda number: PROMPT, 1, Extent(0, 150, 0.0), window, clock))
    assert (window.unexpected, len(window.measured)) == (0, 150)


async def test_open_loop_sends_when_due_whatever_is_under_way() -> None:
    clock, window = VirtualClock(), Window()
    arrivals = [Arrival(at, PROMPT) for at in (0.5, 1.0, 1.5, 4.0)]
    ask = asker(clock, lambda sent, number: sent + 2)
    await clock.run(open_loop(ask, arrivals, 1, 100, window, clock))
    assert [(one.number, one.due_s, one.sent_s, one.ended_s) for one in window.warmup] == [(0, 0.5, 0.5, 2.5)]
    assert [one.sent_s for one in window.measured] == [1.0, 1.5, 4.0]
    assert (window.opened_s, window.closed_s) == (1.0, 6.0)


async def test_open_loop_counts_the_wait_of_arrivals_that_found_no_room() -> None:
    clock, window, seen = VirtualClock(), Window(), list[int]()
    arrivals = [Arrival(at, PROMPT) for at in (0.0, 0.1, 0.2)]
    ask = asker(clock, lambda sent, number: sent + 2, seen=seen)
    await clock.run(open_loop(ask, arrivals, 0, 1, window, clock))
    assert [(one.due_s, one.sent_s, one.ended_s) for one in window.measured] == [
        (0.0, 0.0, 2.0),
        (0.1, 2.0, 4.0),
        (0.2, 4.0, 6.0),
    ]
    assert max(seen) == 1


async def test_open_loop_stops_sending_when_everything_fails() -> None:
    clock, window = VirtualClock(), Window()
    arrivals = [Arrival(float(at), PROMPT) for at in range(1000)]
    ask = asker(clock, lambda sent, number: sent, reason="DRAINING")
    await clock.run(open_loop(ask, arrivals, 0, 100, window, clock))
    assert window.ended == MOST_FAILURES


async def test_partial_window_is_as_long_as_its_last_request_when_it_is_interrupted() -> None:
    clock, window = VirtualClock(), Window()
    ask = asker(clock, lambda sent, number: sent + 1 if number < 3 else float("inf"))
    running = asyncio.create_task(closed_loop(ask, lambda n: PROMPT, 1, Extent(1, 9, 0.0), window, clock))

    async def interrupted() -> None:
        await clock.until(10.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    await clock.run(interrupted())
    assert (numbers(window.measured), window.seconds, window.closed.is_set()) == ([1, 2], 2.0, False)
