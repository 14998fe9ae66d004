"""What the benches' JSON says of each bar of DESIGN.md (Bars): one row a bar, and whether it is met.

Owns the bars' limits and which of a bench's figures each is held against. Pure: JSON in, rows out; `bars`
runs the benches and shows the rows. A figure that a bench did not give makes an open row, not an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tests.bench.paper_cells import ORACLE
from tests.bench.paper_report import WINNER, Tables

Raw = Mapping[str, Any]
LONGEST_SECTION_US = 200.0
LATEST_LOOP_MS = 2.0
HINT_P50_US, HINT_P99_US = 24.0, 1000.0
HASHING_RATIO = 1.3
ROUND_RATIO = 1.5
ADMISSIONS_PER_S = 1000.0
INGEST_PER_S = 1e6
ISOLATED_MS = 3.0
OF_ORACLE, OF_ORACLE_FROM = 0.97, 8
PAPER_CELLS = 68
RESTART_S = 3.0
LOST_S = 2.0
TRACING = 0.02


class Bar(NamedTuple):
    """One row. Figures carry their unit; None where there is none."""

    what: str
    p50: str | None
    """The figure itself where there is one figure only."""
    p99: str | None
    bare: str | None
    """The anchor of the same run."""
    ratio: float | None
    """Figure over anchor."""
    limit: str
    met: bool | None
    """None if it was not measured."""
    how: str


def open_bar(what: str, limit: str, how: str) -> Bar:
    return Bar(what, None, None, None, None, limit, None, how)


def stage_core(raw: Raw) -> Iterator[Bar]:
    for name in ("lease", "escrow", "commit"):
        found = raw[name]
        yield Bar(
            f"{name} of 6,250 blocks, pool of 100K", f"{found['p50_us']:g} us", f"{found['p99_us']:g} us", None, None,
            f"p99 <= {LONGEST_SECTION_US:g} us", found["p99_us"] <= LONGEST_SECTION_US,
            f"CPU of one call under the mutex; on the clock p99 {found['wall_p99_us']:g} us",
        )  # fmt: skip


def loop(raw: Raw) -> Iterator[Bar]:
    (found,) = raw["loop"]
    daemon, alone = found["daemon"], found["only_probing"]
    yield Bar(
        "event-loop delay of a daemon that computes", f"{daemon['p50_ms']:g} ms", f"{daemon['p99_ms']:g} ms",
        f"{alone['p99_ms']:g} ms", daemon["p99_ms"] / alone["p99_ms"] if alone["p99_ms"] else None,
        f"p99 <= {LATEST_LOOP_MS:g} ms", daemon["p99_ms"] <= LATEST_LOOP_MS, "bare: a process that only probes",
    )  # fmt: skip


def hint(raw: Raw) -> Iterator[Bar]:
    p50, p99 = raw["hint_us_p50"], raw["hint_us_p99"]
    yield Bar(
        "hint for 200K tokens, 1M blocks known, 64 at once", f"{p50:g} us", f"{p99:g} us", None, None,
        f"{HINT_P50_US:g} us, p99 <= 1 ms", p50 <= HINT_P50_US and p99 <= HINT_P99_US,
        f"{raw['bytes_per_block']:g} bytes a block over {raw['daemons']} daemons",
    )  # fmt: skip


def hashing(raw: Raw) -> Iterator[Bar]:
    medians = raw["median_ms"]
    ratio = max(raw["ratio_to_bare_loop"].values())
    yield Bar(
        "block hashes of 131,072 tokens, B = 64", f"{max(medians.values()):.2f} ms", None,
        f"{medians['bare_loop']:.2f} ms", ratio, f"<= {HASHING_RATIO:g} x bare", ratio <= HASHING_RATIO,
        "medians of turns; bare: hashlib's loop",
    )  # fmt: skip


def rounds(raw: Raw) -> Iterator[Bar]:
    for found in raw["rounds"]:
        ours, bare = found["round_ms"], found["bare_fan_out_ms"]
        ratios = {q: ours[q] / bare[q] for q in ("p50", "p99")}
        worst = max(ratios.values())
        yield Bar(
            f"prepare round, 4,096 blocks, P = {found['stages']}", f"{ours['p50']:.2f} ms", f"{ours['p99']:.2f} ms",
            f"{bare['p50']:.2f} / {bare['p99']:.2f} ms", worst, f"<= {ROUND_RATIO:g} x bare, p50 and p99",
            worst <= ROUND_RATIO, f"x {ratios['p50']:.2f} at p50, x {ratios['p99']:.2f} at p99; bare: stream fan-out",
        )  # fmt: skip


def rate(raw: Raw) -> Iterator[Bar]:
    best = max(raw["rate"], key=lambda found: float(found["admissions_per_s"]))
    spent = best["machine"]["cpu_ms_per_request_all"]
    yield Bar(
        "admissions, P = 4, 4K tokens", f"{best['admissions_per_s']:.0f} /s", None, None, None,
        f">= {ADMISSIONS_PER_S:.0f} /s", best["admissions_per_s"] >= ADMISSIONS_PER_S,
        f"best of {len(raw['rate'])} concurrencies ({best['concurrency']}); {spent:g} ms CPU a request in all",
    )  # fmt: skip


def isolated(raw: Raw) -> Iterator[Bar]:
    (found,) = raw["isolated"]
    beyond = found["beyond_stages_and_round_ms"]
    yield Bar(
        f"one request, idle pipeline, P = {found['stages']}: beyond stages and round", f"{beyond['p50']:.2f} ms",
        f"{beyond['p99']:.2f} ms", None, None, f"<= {ISOLATED_MS:g} ms", beyond["p50"] <= ISOLATED_MS,
        f"{found['elapsed_ms']['p50']:.1f} ms in all at p50",
    )  # fmt: skip


def ingest(raw: Raw) -> Iterator[Bar]:
    ours, bare = raw["blocks_per_s"], raw["bare_blocks_per_s"]
    yield Bar(
        f"digest ingest, {raw['senders']} senders, {raw['hashes_a_message']} a message", f"{ours / 1e6:.2f}M /s", None,
        f"{bare / 1e6:.1f}M /s", ours / bare, ">= 1M blocks/s", ours >= INGEST_PER_S,
        f"{raw['blocks_per_cpu_s'] / 1e6:.2f}M for each second of the controller's CPU; bare: raw bytes over gRPC",
    )  # fmt: skip


def restart(raw: Raw) -> Iterator[Bar]:
    ours, bare = raw["restart_s"], raw["bare_snapshots_s"]
    yield Bar(
        f"controller's start to an equal index, {raw['blocks_a_stage'] / 1e6:.2f}M x {raw['stages']}", f"{ours:.2f} s",
        None, f"{bare:.2f} s", ours / bare, f"<= {RESTART_S:g} s", ours <= RESTART_S,
        f"serving after {raw['serving_s']:.2f} s, {raw['controller_cpu_s']:.1f} s CPU; bare: snapshots, parsed only",
    )  # fmt: skip


def tracing(raw: Raw) -> Iterator[Bar]:
    more = raw["more_cpu_p50"]
    low, _, high = raw["more_cpu_quartiles"]
    yield Bar(
        f"tracing {raw['sample']:.0%} of requests: more CPU a request", f"{more:+.1%}", None,
        f"{raw['all_ms_without']:.2f} ms", raw["all_ms_with"] / raw["all_ms_without"], f"<= {TRACING:.0%}",
        more <= TRACING, f"{raw['rounds']} turns, quartiles {low:+.1%} to {high:+.1%}; bare: without tracing",
    )  # fmt: skip


def paper(results: Iterable[Raw]) -> Iterator[Bar]:
    tables = Tables([dict(one) for one in results])
    shares = [
        (share, row.place)
        for row in tables.rows
        if row.place.concurrency >= OF_ORACLE_FROM and (share := row.ratio(WINNER, ORACLE[0])) is not None
    ]
    what, limit = f"throughput over the oracle's, c >= {OF_ORACLE_FROM}", f">= {OF_ORACLE:.0%} in every cell"
    if shares:
        worst, place = min(shares)
        below = sum(share < OF_ORACLE for share, _ in shares)
        yield Bar(
            what, f"{worst:.1%}", None, None, None, limit, not below,
            f"worst of {len(shares)} cells: {place}; {below} below",
        )  # fmt: skip
    else:
        yield open_bar(what, limit, "scripts/bench-paper --virtual has no results here")
    ahead, level = len(tables.judged("ahead")), len(tables.judged("level"))
    judged = sum(bool(row.verdict) for row in tables.rows)
    how = (
        f"{judged} cells are there, in virtual time; {level} level" if judged else "scripts/bench-paper has no results"
    )
    met = ahead + level == PAPER_CELLS if judged == PAPER_CELLS else None
    what, limit = "paper's cells ahead of lockstep+fixed", f"all {PAPER_CELLS}, or both at the bound"
    yield Bar(what, f"{ahead}", None, None, None, limit, met, how)


def fault(raw: Raw) -> Iterator[Bar]:
    for what, name in (("killed", "kill_stage_to_last_error_s"), ("frozen", "freeze_stage_to_last_error_s")):
        if name in raw:
            yield Bar(
                f"stage {what}, to the last answer", f"{raw[name]:.2f} s", None, None, None, f"< {LOST_S:g} s",
                raw[name] < LOST_S, "last run of tests/fault",
            )  # fmt: skip
