"""Collected spans laid out on tracks: which slice lies where, in nanoseconds, in no file format.

Owns the layout. Does not own collection (`trace_sink.py`) or the Chrome trace format
(`timeline.py`, its only caller). Pure.

    process "pipeline NAME"   one track a stage: waves, and between them named gaps
    process "copies NAME"     one track a stage that copied: lots between device and host
    process "admission"       one track a lane: admissions that overlap in time lie on different lanes

What lies before a wave comes from the wave's own attributes, laid backwards from its start and cut
where the previous wave ended; what they leave open is shown as such:

    | previous wave | unattributed | idle | waiting for admission | preparing | waiting for activations | wave |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from wavepp_proto.runtime import span_names

AttributeValue = str | bool | int | float | tuple[str, ...]
SpanKey = tuple[str, str]
"""(trace id, span id)."""

GAPS: Final = (
    ("waiting for activations", span_names.ACTIVATION_WAIT_US),
    ("preparing", span_names.PREPARING_US),
    ("waiting for admission", span_names.ADMISSION_WAIT_US),
    ("idle", span_names.IDLE_US),
)
"""Slice title and wave attribute, from the wave's start backwards."""
UNATTRIBUTED: Final = "unattributed"
ROUNDING_NS: Final = 1_000 * len(GAPS)
"""What the four durations may lack together, each being cut to whole microseconds."""
ADMISSION_PROCESS: Final = "admission"
PIPELINE_PROCESS: Final = "pipeline"
COPY_PROCESS: Final = "copies"


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A finished span, however it was collected. Ids are lower-case hexadecimal."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    links: tuple[SpanKey, ...] = ()
    kind: str = span_names.INTERNAL
    error: str = ""
    service: str = ""
    instance: str = ""

    @property
    def key(self) -> SpanKey:
        return self.trace_id, self.span_id

    @property
    def parent(self) -> SpanKey | None:
        return None if self.parent_span_id is None else (self.trace_id, self.parent_span_id)

    def number(self, name: str) -> int:
        """An integer attribute; 0 if absent."""
        value = self.attributes.get(name, 0)
        return value if isinstance(value, int) else 0


class Slice(NamedTuple):
    title: str
    category: str
    """wave, gap, copy or admission."""
    start_ns: int
    end_ns: int
    args: Mapping[str, object]
    requests: Sequence[SpanKey] = ()
    """Spans of the requests that an arrow may connect through this slice."""


@dataclass(frozen=True, slots=True)
class Track:
    process: str
    title: str
    slices: Sequence[Slice]


def layout(spans: Sequence[CollectedSpan]) -> list[Track]:
    """Stage tracks by (pipeline, stage, rank), copies likewise, then admission lanes. Spans may come in any order."""
    ordered = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.key))
    names = _request_names(ordered)
    return [*_stage_tracks(ordered, names), *_copy_tracks(ordered), *_admission_tracks(ordered, names)]


def _request_names(spans: Sequence[CollectedSpan]) -> dict[SpanKey, str]:
    """Request id by the key of the span that waves link to and admissions hang on."""
    names: dict[SpanKey, str] = {}
    for span in spans:
        request_id = span.attributes.get(span_names.REQUEST_ID)
        if request_id is None:
            continue
        if span.name in (span_names.PREFILL, span_names.REQUEST):
            names[span.key] = str(request_id)
        elif span.name == span_names.ADMISSION and span.parent is not None:
            names.setdefault(span.parent, str(request_id))
    return names


# --- stages -------------------------------------------------------------------------------------


def _stage_tracks(spans: Sequence[CollectedSpan], names: Mapping[SpanKey, str]) -> list[Track]:
    origin_ns = spans[0].start_ns if spans else 0
    return [
        Track(f"{PIPELINE_PROCESS} {pipeline}".rstrip(), title, list(_stage_slices(waves, names, origin_ns)))
        for pipeline, title, waves in _by_stage(spans, span_names.WAVE)
    ]


def _copy_tracks(spans: Sequence[CollectedSpan]) -> list[Track]:
    return [
        Track(f"{COPY_PROCESS} {pipeline}".rstrip(), title, [_copy_slice(copy) for copy in copies])
        for pipeline, title, copies in _by_stage(spans, span_names.COPY)
    ]


def _copy_slice(copy: CollectedSpan) -> Slice:
    title = f"{copy.attributes.get(span_names.DIRECTION, span_names.COPY)} {copy.number(span_names.BLOCKS)}"
    return Slice(title, "copy", copy.start_ns, copy.end_ns, _args(copy))


def _by_stage(spans: Sequence[CollectedSpan], name: str) -> Iterator[tuple[str, str, list[CollectedSpan]]]:
    """(pipeline, title of the stage, its spans called `name`), in drawing order."""
    found: dict[tuple[str, int, int], list[CollectedSpan]] = defaultdict(list)
    for span in spans:
        if span.name == name:
            pipeline = str(span.attributes.get(span_names.PIPELINE, ""))
            found[pipeline, span.number(span_names.STAGE), span.number(span_names.RANK)].append(span)
    for (pipeline, stage, rank), of_stage in sorted(found.items()):
        yield pipeline, _place(stage, rank), of_stage


def _place(stage: int, rank: int) -> str:
    return f"stage {stage}" + (f" rank {rank}" if rank else "")


def _stage_slices(waves: Sequence[CollectedSpan], names: Mapping[SpanKey, str], origin_ns: int) -> Iterator[Slice]:
    previous_end: int | None = None
    for wave in waves:
        yield from _gaps(wave, origin_ns, previous_end)
        requests = [names[key] for key in wave.links if key in names]
        title = f"wave {wave.number(span_names.WAVE_ORDINAL)}"
        yield Slice(title, "wave", wave.start_ns, wave.end_ns, {**_args(wave), "requests": requests}, wave.links)
        previous_end = max(wave.end_ns, previous_end or wave.end_ns)


def _gaps(wave: CollectedSpan, origin_ns: int, previous_end: int | None) -> list[Slice]:
    """Slices that fill `[previous_end, wave start)` exactly; before the first wave, what it names."""
    floor = origin_ns if previous_end is None else previous_end
    pieces: list[Slice] = []
    end = wave.start_ns
    for title, attribute in GAPS:
        start = max(floor, end - 1_000 * wave.number(attribute))
        if start < end:
            pieces.append(Slice(title, "gap", start, end, {}))
            end = start
    if previous_end is not None and end > floor:
        if pieces and end - floor <= ROUNDING_NS:
            pieces[-1] = pieces[-1]._replace(start_ns=floor)
        else:
            pieces.append(Slice(UNATTRIBUTED, "gap", floor, end, {}))
    return pieces[::-1]


# --- admission ----------------------------------------------------------------------------------


def _admission_tracks(spans: Sequence[CollectedSpan], names: Mapping[SpanKey, str]) -> list[Track]:
    children: dict[SpanKey, list[CollectedSpan]] = defaultdict(list)
    for span in spans:
        if span.parent is not None:
            children[span.parent].append(span)
    lanes: list[list[Slice]] = []
    ends: list[int] = []
    for span in spans:
        if span.name != span_names.ADMISSION:
            continue
        lane = next((lane for lane, end in enumerate(ends) if end <= span.start_ns), len(ends))
        if lane == len(ends):
            lanes.append([])
            ends.append(0)
        ends[lane] = span.end_ns
        request = names.get(span.parent) if span.parent is not None else None
        lanes[lane].extend(_nested(span, children, request))
    return [Track(ADMISSION_PROCESS, f"lane {lane}", slices) for lane, slices in enumerate(lanes)]


class _Placed(NamedTuple):
    start_ns: int
    end_ns: int
    depth: int
    span: CollectedSpan


def _nested(
    root: CollectedSpan, children: Mapping[SpanKey, Sequence[CollectedSpan]], request: str | None
) -> Iterator[Slice]:
    """`root` and its descendants as slices that nest; a partial overlap is cut at the outer end."""
    open_until: list[int] = []
    family = sorted(_family(root, children), key=lambda placed: (placed.start_ns, -placed.end_ns, placed.depth))
    for start_ns, end_ns, depth, span in family:
        while open_until and open_until[-1] <= start_ns:
            open_until.pop()
        end_ns = min([end_ns, *open_until[-1:]])
        open_until.append(end_ns)
        args = {**_args(span), "duration_us": (span.end_ns - span.start_ns) / 1_000, "request": request}
        linked = [root.parent] if depth == 0 and root.parent is not None else []
        yield Slice(_title(span, request), "admission", start_ns, end_ns, args, linked)


def _family(root: CollectedSpan, children: Mapping[SpanKey, Sequence[CollectedSpan]]) -> list[_Placed]:
    """`root` first, then its descendants, each cut to its parent."""
    family = [_Placed(root.start_ns, root.end_ns, 0, root)]
    for outer in family:  # grows while it is walked: breadth first
        for child in children.get(outer.span.key, ()):
            # The votes of a round overlap and end as the answers arrive. Drawn from the start of the
            # round they nest with their true ends; in which order the asks were written is noise.
            start_ns = outer.start_ns if child.name == span_names.VOTE else max(outer.start_ns, child.start_ns)
            end_ns = min(outer.end_ns, child.end_ns)
            family.append(_Placed(min(start_ns, end_ns), end_ns, outer.depth + 1, child))
    return family


def _title(span: CollectedSpan, request: str | None) -> str:
    if span.name == span_names.VOTE:
        return f"{span.name} {_place(span.number(span_names.STAGE), span.number(span_names.RANK))}"
    return f"{span.name} {request}" if span.name == span_names.ADMISSION and request else span.name


def _args(span: CollectedSpan) -> dict[str, object]:
    shown: dict[str, object] = dict(sorted(span.attributes.items()))
    return {**shown, "trace_id": span.trace_id, **({"error": span.error} if span.error else {})}
