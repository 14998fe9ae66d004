"""What planner tests are made of: lanes, waves in flight and views, with the paper's numbers as defaults."""

from __future__ import annotations

from collections.abc import Sequence

from wavepp_controller.core.planner import Lane
from wavepp_controller.core.planning import InFlight, PlanView
from wavepp_proto.terms import Attempt, DaemonKey, HoldKey, PipelineId, Rank, RequestId, Row, StageIndex, WaveOrdinal

B = 64
M = 16_384


def key(name: str) -> HoldKey:
    return HoldKey(RequestId(name), Attempt(1))


def daemon(stage: int) -> DaemonKey:
    return DaemonKey(PipelineId("p"), StageIndex(stage), Rank(0))


def lane(name: str, start: int, prompt: int, snapshots: tuple[int, ...] = (), stops: tuple[int, ...] = ()) -> Lane:
    return Lane(key(name), start, prompt, snapshots, stops)


def lanes(*lengths: int) -> list[Lane]:
    """Cold prompts a, b, c, ... of these lengths."""
    return [lane(chr(ord("a") + place), 0, length) for place, length in enumerate(lengths)]


def flying(*waves: Sequence[int]) -> tuple[InFlight, ...]:
    """Waves 1, 2, ... in flight, each given by the lengths of its rows; of requests that no lane belongs to."""
    return tuple(
        InFlight(
            WaveOrdinal(number),
            tuple(Row(key(f"flying{number}.{place}"), 0, length) for place, length in enumerate(lengths)),
            0.0,
        )
        for number, lengths in enumerate(waves, start=1)
    )


def view(
    ahead: Sequence[Lane],
    in_flight: Sequence[InFlight] = (),
    *,
    now: float = 0.0,
    stages: int = 4,
    wave_tokens: int = M,
    block_tokens: int = B,
    max_rows: int = 128,
    more_soon: bool = False,
) -> PlanView:
    """P = 4, R = 8, M = 16,384, B = 64 unless said otherwise."""
    return PlanView(now, ahead, in_flight, stages, 2 * stages, wave_tokens, block_tokens, max_rows, more_soon)


def shape(rows: Sequence[Row]) -> list[tuple[str, int, int, bool]]:
    return [(row.key.request_id, row.start, row.length, row.final) for row in rows]
