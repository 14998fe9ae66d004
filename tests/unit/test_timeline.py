"""What a timeline shows of known spans, and what its check refuses."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from wavepp_proto.errors import InternalError
from wavepp_proto.runtime import span_names
from wavepp_proto.runtime.timeline import CollectedSpan, check_timeline, timeline, write_timeline
from wavepp_proto.runtime.timeline_layout import AttributeValue

US = 1_000
ORIGIN = 1_700_000_000_000_000_000


def span(
    name: str, span_id: str, start_us: int, end_us: int, parent: str | None = None, **attributes: Any
) -> CollectedSpan:
    """A span of trace "t"; attribute names are given without their prefix."""
    named = {f"wavepp.{key}": value for key, value in attributes.items()}
    return CollectedSpan(name, "t", span_id, parent, ORIGIN + start_us * US, ORIGIN + end_us * US, named)


def wave(
    ordinal: int, start_us: int, end_us: int, stage: int = 0, requests: tuple[str, ...] = (), **times: int
) -> CollectedSpan:
    attributes: dict[str, AttributeValue] = {"wavepp.pipeline": "p0", "wavepp.stage": stage, "wavepp.wave": ordinal}
    attributes |= {f"wavepp.{key}": value for key, value in times.items()}
    links = tuple(("t", request) for request in requests)
    start_ns, end_ns = ORIGIN + start_us * US, ORIGIN + end_us * US
    return CollectedSpan(span_names.WAVE, f"w{stage}", f"{stage}.{ordinal}", None, start_ns, end_ns, attributes, links)


def slices(spans: list[CollectedSpan], process: str, track: str) -> list[tuple[str, float, float]]:
    """(title, start, end) in microseconds on one track of the checked document."""
    document = timeline(spans)
    check_timeline(json.dumps(document))
    events = document["traceEvents"]
    pid = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == process)
    named = (e for e in events if e["name"] == "thread_name" and e["pid"] == pid and e["args"]["name"] == track)
    place = next((e["pid"], e["tid"]) for e in named)
    found = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == place]
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in found]


# --- stages -------------------------------------------------------------------------------------


def test_gap_is_split_by_cause_in_order_when_the_wave_names_all_four() -> None:
    second = wave(2, 200, 300, activation_wait_us=40, preparing_us=30, admission_wait_us=20, idle_us=10)
    assert slices([wave(1, 0, 100), second], "pipeline p0", "stage 0") == [
        ("wave 1", 0, 100),
        ("idle", 100, 110),
        ("waiting for admission", 110, 130),
        ("preparing", 130, 160),
        ("waiting for activations", 160, 200),
        ("wave 2", 200, 300),
    ]


def test_gap_is_cut_at_the_previous_wave_when_the_causes_claim_more() -> None:
    second = wave(2, 150, 300, activation_wait_us=30, preparing_us=1_000, admission_wait_us=5, idle_us=5)
    assert slices([wave(1, 0, 100), second], "pipeline p0", "stage 0")[1:-1] == [
        ("preparing", 100, 120),
        ("waiting for activations", 120, 150),
    ]


def copy(start_us: int, end_us: int, direction: str, blocks: int) -> CollectedSpan:
    return span(
        span_names.COPY, f"c{start_us}", start_us, end_us, pipeline="p0", stage=1, direction=direction, blocks=blocks
    )


def test_copies_lie_on_a_track_of_their_own_beside_the_waves() -> None:
    spans = [copy(10, 30, "offload", 8), wave(1, 0, 100, stage=1), copy(40, 120, "onboard", 3)]
    assert slices(spans, "copies p0", "stage 1") == [("offload 8", 10, 30), ("onboard 3", 40, 120)]
    assert slices(spans, "pipeline p0", "stage 1") == [("wave 1", 0, 100)]
    assert check_timeline(json.dumps(timeline(spans))).stages == ("pipeline p0: stage 1",)


def test_overlapping_copies_are_refused_because_one_thread_makes_them() -> None:
    with pytest.raises(InternalError, match="leaves offload 8"):
        check_timeline(json.dumps(timeline([copy(10, 30, "offload", 8), copy(20, 40, "onboard", 3)])))


def test_rest_is_shown_as_unattributed_when_the_causes_claim_less() -> None:
    second = wave(2, 200, 300, activation_wait_us=30)
    assert slices([wave(1, 0, 100), second], "pipeline p0", "stage 0")[1:-1] == [
        ("unattributed", 100, 170),
        ("waiting for activations", 170, 200),
    ]
    summary = check_timeline(json.dumps(timeline([wave(1, 0, 100), second])))
    assert summary.gaps_us == {"unattributed": 70, "waiting for activations": 30}
    assert summary.unattributed_us == 70


def test_rest_joins_the_earliest_cause_when_it_is_rounding() -> None:
    second = wave(2, 200, 300, activation_wait_us=30, idle_us=67)
    assert slices([wave(1, 0, 100), second], "pipeline p0", "stage 0")[1] == ("idle", 100, 170)


def test_time_before_the_first_wave_starts_at_the_first_span_when_it_idled_longer() -> None:
    admission = span(span_names.ADMISSION, "a", 0, 10)
    first = wave(1, 50, 100, idle_us=10_000)
    assert slices([admission, first], "pipeline p0", "stage 0")[0] == ("idle", 0, 50)


def test_nothing_lies_between_waves_when_they_touch() -> None:
    assert slices([wave(1, 0, 100), wave(2, 100, 200, idle_us=5)], "pipeline p0", "stage 0") == [
        ("wave 1", 0, 100),
        ("wave 2", 100, 200),
    ]


def test_one_track_a_stage_when_four_stages_run_two_waves() -> None:
    spans = [wave(n, 100 * n + 10 * stage, 100 * n + 90 + 10 * stage, stage) for n in (1, 2) for stage in range(4)]
    summary = check_timeline(json.dumps(timeline(spans)))
    assert summary.stages == tuple(f"pipeline p0: stage {stage}" for stage in range(4))
    assert set(summary.waves.values()) == {2}
    assert summary.busy_us["pipeline p0: stage 3"] == 180


def test_check_refuses_when_waves_of_a_stage_overlap() -> None:
    with pytest.raises(InternalError, match="wave 2 overlaps wave 1"):
        check_timeline(json.dumps(timeline([wave(1, 0, 100), wave(2, 99, 200)])))


def test_check_refuses_when_a_gap_has_no_slice() -> None:
    document = timeline([wave(1, 0, 100), wave(2, 200, 300, idle_us=100)])
    document["traceEvents"] = [event for event in document["traceEvents"] if event["name"] != "idle"]
    with pytest.raises(InternalError, match="unnamed gap between wave 1 and wave 2"):
        check_timeline(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": 1}'])
def test_check_refuses_when_the_text_is_no_trace(text: str) -> None:
    with pytest.raises(InternalError):
        check_timeline(text)


# --- admission ----------------------------------------------------------------------------------


def admitted(request: str, start_us: int, end_us: int) -> list[CollectedSpan]:
    return [
        span(span_names.REQUEST, request, start_us, end_us + 50, request_id=request),
        span(span_names.ADMISSION, f"{request}.a", start_us, end_us, request, request_id=request),
    ]


def test_admissions_share_a_lane_unless_they_overlap() -> None:
    spans = [*admitted("r1", 0, 100), *admitted("r2", 50, 120), *admitted("r3", 100, 150)]
    assert [title for title, _, _ in slices(spans, "admission", "lane 0")] == ["admission r1", "admission r3"]
    assert [title for title, _, _ in slices(spans, "admission", "lane 1")] == ["admission r2"]


def test_phases_nest_and_votes_end_when_answered() -> None:
    spans = [
        *admitted("r1", 0, 100),
        span(span_names.QUEUE, "q", 0, 20, "r1.a"),
        span(span_names.PIN_RESERVE, "p", 30, 90, "r1.a"),
        span(span_names.VOTE, "v0", 31, 50, "p", stage=0),
        span(span_names.VOTE, "v1", 32, 80, "p", stage=1),
    ]
    assert slices(spans, "admission", "lane 0") == [
        ("admission r1", 0, 100),
        ("queue", 0, 20),
        ("pin_reserve", 30, 90),
        ("vote stage 1", 30, 80),
        ("vote stage 0", 30, 50),
    ]


def test_phases_are_cut_to_their_parent_when_they_stick_out() -> None:
    spans = [
        *admitted("r1", 10, 100),
        span(span_names.QUEUE, "q", 5, 20, "r1.a"),
        span(span_names.HASH, "h", 15, 40, "r1.a"),
        span(span_names.HINT, "x", 110, 120, "r1.a"),
    ]
    # The origin is the queue span, 5 us before the admission.
    assert slices(spans, "admission", "lane 0") == [
        ("admission r1", 5, 95),
        ("queue", 5, 15),
        ("hash", 10, 15),
        ("hint", 95, 95),
    ]


def test_wave_names_its_requests_and_arrows_lead_to_it() -> None:
    spans = [
        *admitted("r1", 0, 10),
        *admitted("r2", 0, 10),
        wave(1, 20, 30, stage=0, requests=("r1", "r2")),
        wave(1, 30, 40, stage=1, requests=("r1", "r2")),
        wave(2, 40, 50, stage=0, requests=("r1", "unknown")),
    ]
    document = timeline(spans)
    events = document["traceEvents"]
    assert [event["args"]["requests"] for event in events if event.get("cat") == "wave"] == [
        ["r1", "r2"],
        ["r1"],
        ["r1", "r2"],
    ]
    arrows = [(event["id"], event["ph"], event["ts"]) for event in events if event.get("cat") == "request"]
    assert arrows == [(n, phase, at) for n in (1, 2) for phase, at in (("s", 9.999), ("t", 20.0), ("f", 30.0))]
    assert check_timeline(json.dumps(document)).arrows == 2


# --- the file -----------------------------------------------------------------------------------


def test_file_is_the_same_when_spans_come_in_another_order(tmp_path: Path) -> None:
    spans = [*admitted("r1", 0, 100), *admitted("r2", 0, 100)]
    spans += [wave(n, 100 * n, 100 * n + 70, stage, ("r1", "r2"), idle_us=30) for n in range(5) for stage in range(3)]
    shuffled = list(spans)
    random.Random(7).shuffle(shuffled)
    write_timeline(spans, tmp_path / "a.trace.json")
    write_timeline(shuffled, tmp_path / "b.trace.json")
    text = (tmp_path / "a.trace.json").read_text()
    assert text == (tmp_path / "b.trace.json").read_text()
    summary = check_timeline(text)
    assert (summary.admissions, summary.lanes, summary.arrows) == (2, 2, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.trace.json", "b.trace.json"]


def test_file_is_valid_when_there_are_no_spans(tmp_path: Path) -> None:
    write_timeline([], tmp_path / "empty.trace.json")
    assert check_timeline((tmp_path / "empty.trace.json").read_text()).stages == ()
