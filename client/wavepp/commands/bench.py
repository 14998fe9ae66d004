"""`wavepp bench`: load on a running pipeline, and what came of it.

Owns the options and the order measure, write, show; `wavepp.bench` does the work. Ctrl-C shows what was measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from wavepp.commands._shared import Controller, Proxy, address_of, console, explain, run, security
from wavepp_proto.runtime import options as opt

if TYPE_CHECKING:
    from wavepp.bench.cells import Cell
    from wavepp.bench.store import Document, Store

T = TypeVar("T", int, float)
MOST_SPEED_UP = 1e9


def bench(
    controller: Controller = None,
    pipeline: Annotated[
        str | None, typer.Option("--pipeline", envvar="WAVEPP_PIPELINE", help="The one to measure; the default one.")
    ] = None,
    family: Annotated[
        str,
        typer.Option(
            "--family",
            envvar="WAVEPP_FAMILY",
            help="short_cold, long_cold, short_reuse, long_reuse, mixed, suffix4k, behind; several: a,b.",
        ),
    ] = "short_cold,short_reuse",
    lengths: Annotated[
        str, typer.Option("--lengths", envvar="WAVEPP_LENGTHS", help="Whose prompt lengths: glm, minimax or k3.")
    ] = "glm",
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", envvar="WAVEPP_PROMPT_TOKENS", help="Instead of that length.")
    ] = None,
    scale: Annotated[
        float,
        typer.Option("--scale", envvar="WAVEPP_SCALE", help="Shorten all prompts to this share, for small pipelines."),
    ] = 1.0,
    concurrency: Annotated[
        str,
        typer.Option("--concurrency", envvar="WAVEPP_CONCURRENCY", help="Slots of the closed loop, 1..128: 8,16,32"),
    ] = "8",
    rate: Annotated[
        str | None,
        typer.Option("--rate", envvar="WAVEPP_RATE", help="Poisson arrivals (requests/s) instead: 0.5,1,2"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", envvar="WAVEPP_TRACE", help="Replay this file (Mooncake's format) instead."),
    ] = None,
    speed: Annotated[
        float, typer.Option("--speed", envvar="WAVEPP_SPEED", help="Of the trace: 2 sends it in half its time.")
    ] = 1.0,
    minutes: Annotated[
        float | None, typer.Option("--minutes", envvar="WAVEPP_MINUTES", help="Of the trace's own time; all of it.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", envvar="WAVEPP_SEED", help="Of prompts and arrivals.")] = 0,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", envvar="WAVEPP_SECONDS", help="Least time of each cell (and two rounds of a closed loop)."
        ),
    ] = 30.0,
    requests: Annotated[
        int | None, typer.Option("--requests", envvar="WAVEPP_REQUESTS", help="Measure so many instead of a time.")
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option("--warmup", envvar="WAVEPP_WARMUP", help="Requests before that; by default one round."),
    ] = None,
    preload: Annotated[
        bool,
        typer.Option("--preload/--no-preload", envvar="WAVEPP_PRELOAD", help="Send shared prefixes before the load."),
    ] = True,
    cache_salt: Annotated[
        str | None,
        typer.Option("--cache-salt", envvar="WAVEPP_CACHE_SALT", help="By default each cell has one of its own."),
    ] = None,
    deadline_s: Annotated[
        float, typer.Option("--deadline-s", envvar="WAVEPP_DEADLINE_S", help="Deadline of each request (seconds).")
    ] = 600.0,
    expect: Annotated[
        str, typer.Option("--expect", envvar="WAVEPP_EXPECT", help="Reasons that are no failure: QUEUE_FULL,TOO_LATE")
    ] = "",
    profile: Annotated[
        str | None,
        typer.Option("--profile", envvar="WAVEPP_PROFILE", help="Device profile (name or file), for its bound."),
    ] = None,
    speed_up: Annotated[
        float | None,
        typer.Option(
            "--speed-up",
            envvar="WAVEPP_SPEED_UP",
            help="How much faster than the profile the stages run; by default as the emulated model says.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", envvar="WAVEPP_OUT", help="Folder of the results; cells found there are not repeated."),
    ] = None,
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", envvar="WAVEPP_PLOTS", help="Write PNG files and report.html too.")
    ] = False,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline", envvar="WAVEPP_TIMELINE", help="What its `wavepp up --trace-file` writes; implies --plots."
        ),
    ] = None,
    tls_ca: opt.TlsCa = None,
    tls_cert: opt.TlsCert = None,
    tls_key: opt.TlsKey = None,
    tls_server_name: opt.TlsServerName = "",
    proxy: Proxy = None,
    as_json: opt.Json = False,
) -> None:
    """Measure a running pipeline under load; exit status 1 if a request failed unexpectedly."""
    from wavepp import AsyncClient, RetryPolicy, profiles
    from wavepp.bench.cells import Cell
    from wavepp.bench.run import Bench, Plan
    from wavepp.bench.running import Options
    from wavepp.bench.store import Store
    from wavepp.bench.timeline import settled
    from wavepp_proto.errors import WaveppError
    from wavepp_proto.limits import MAX_DEADLINE_MS

    try:
        _in_range("deadline_s", deadline_s, MAX_DEADLINE_MS / 1000)
        if speed_up is not None:
            _in_range("speed_up", speed_up, MOST_SPEED_UP)
        like = Cell(
            lengths=lengths, prompt_tokens=prompt_tokens, seed=seed, scale=scale, speed=speed, minutes=minutes,
            requests=requests, seconds=seconds, warmup=warmup,
        )  # fmt: skip
        plan = Plan(
            cells=_cells(like, family, concurrency, rate, trace),
            options=Options(
                address=address_of(controller), deadline_s=deadline_s, cache_salt=cache_salt or "", preload=preload,
                expected=_reasons(expect), profile=profiles.load(profile) if profile else None, speed_up=speed_up,
            ),
            own_salts=cache_salt is None,
            pipeline=pipeline,
            command=sys.argv,
        )  # fmt: skip
        plots = plots or timeline is not None
        if plots:
            _check_plots(timeline)
        store = Store(out or Path("bench-results") / time.strftime("%Y%m%d-%H%M%S"))
        # A bench shows refusals instead of hiding them behind a second try.
        client = AsyncClient(
            plan.options.address,
            tls=security(tls_ca, tls_cert, tls_key, tls_server_name),
            proxy=proxy,
            retry=RetryPolicy(attempts=1),
        )
    except WaveppError as error:
        typer.echo(explain(error), err=True)
        raise typer.Exit(1) from None

    def say(text: str) -> None:
        console().print(text, highlight=False, markup=False)

    bench = Bench(client, plan, store, say)

    async def work() -> None:
        async with client:
            await bench.run()
        if timeline is not None and not await asyncio.to_thread(settled, timeline, time.time()):
            say(f"{timeline} was not written again after the load: its waves are older")

    try:
        run(work())
    finally:
        _show(bench.document(), store, as_json)
        if plots or _is_drawn(store):
            _draw(bench.document(), store, timeline)
    if bench.unexpected_failures:
        raise typer.Exit(1)


def _cells(like: Cell, family: str, concurrency: str, rate: str | None, trace: Path | None) -> list[Cell]:
    """What the options ask for. Raises InvalidRequest naming the first that cannot be."""
    from wavepp.bench.cells import arriving, closed, replayed
    from wavepp_proto.errors import InvalidRequest

    families = [name.strip() for name in family.split(",") if name.strip()]
    if not families and trace is None:
        raise InvalidRequest("name a family", field="family", value=family)
    if trace is not None:
        cells = [replayed(trace, like)]
    elif rate is not None:
        cells = arriving(families, _numbers("rate", rate, float), like)
    else:
        cells = closed(families, _numbers("concurrency", concurrency, int), like)
    for cell in cells:
        cell.check()
    return cells


def _numbers(field: str, text: str, kind: Callable[[str], T]) -> list[T]:
    from wavepp_proto.errors import InvalidRequest

    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"{field} must be numbers with commas between, got {text!r}", field=field) from None


def _in_range(field: str, value: float, most: float) -> None:
    from wavepp_proto.errors import InvalidRequest

    if not 0 < value <= most:
        message = f"{field} must be over 0 and at most {most:g}, got {value}"
        raise InvalidRequest(message, field=field, value=value, limit=most)


def _reasons(text: str) -> frozenset[str]:
    from wavepp_proto.errors import BY_REASON, InvalidRequest

    reasons = frozenset(part.strip() for part in text.split(",") if part.strip())
    for reason in sorted(reasons - BY_REASON.keys()):
        known = " ".join(sorted(BY_REASON))
        raise InvalidRequest(f"no reason {reason!r} of an error", field="expect", value=reason, limit=known)
    return reasons


def _check_plots(timeline: Path | None) -> None:
    """Before the work, not after it."""
    from importlib.util import find_spec

    from wavepp.bench.timeline import read_timeline
    from wavepp_proto.errors import InvalidRequest

    if find_spec("matplotlib") is None:
        raise InvalidRequest("plots need matplotlib: pip install matplotlib", field="plots")
    if timeline is not None:
        read_timeline(timeline)


def _show(document: Document, store: Store, as_json: bool) -> None:
    """Write what was measured and tell of it; nothing if there is nothing."""
    from wavepp.bench.report import print_tables, without_samples

    if not document["cells"]:
        return
    store.write(store.folder / "bench.json", document)
    if as_json:
        typer.echo(json.dumps(without_samples(document), allow_nan=False))
    else:
        print_tables(document)
    console().print(f"all of it in {store.folder / 'bench.json'}", highlight=False, markup=False, soft_wrap=True)


def _is_drawn(store: Store) -> bool:
    """Whether an earlier bench drew a page here, out of date now; left alone without matplotlib."""
    from importlib.util import find_spec

    return (store.folder / "report.html").is_file() and find_spec("matplotlib") is not None


def _draw(document: Document, store: Store, timeline: Path | None) -> None:
    from wavepp.bench.page import write_page

    if document["cells"]:
        page = write_page(document, store.folder, timeline)
        console().print(f"plots in {page}", highlight=False, markup=False, soft_wrap=True)
