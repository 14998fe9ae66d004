"""The paper's tables beside ours: every cell with every mode and policy, and one report (DESIGN.md, Planning waves).

Owns the command, the processes that play and what is kept between runs: a result that exists for this state of
code and profile is not played again. In virtual time every mode pays the same round and link times. Ends 1 unless
overlapped+adaptive beats lockstep+fixed in every cell or stands at the bound with it, and no cell on the real clock
misses a bar.

    scripts/bench-paper [--virtual | --real] [--models glm,minimax,k3] [--only NAME] [--round-ms MS|FILE] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.bench import paper_html, paper_markdown, paper_real_report
from tests.bench.kept import read_kept, write_kept
from tests.bench.paper_cells import PROFILES, Task, play, tasks
from tests.bench.paper_real_all import RealHalf
from tests.bench.paper_real_cells import SECONDS
from tests.bench.paper_report import Tables, standing
from tests.bench.paper_rounds import STORED, rounds

OUT = Path("bench-results/paper")


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    folder = options.out / "virtual"
    folder.mkdir(parents=True, exist_ok=True)
    measured = rounds(options.models.split(","), options.round_ms)
    every = [task for task in tasks(measured.by_model) if task.name.startswith(options.only)]
    if not options.report_only and not options.real:
        _play_all([task for task in every if not _known(folder, task)], folder, options.jobs)
    real = RealHalf(options.out / "real", measured.by_model, options.only, options.seconds, options.speed_up)
    if not options.report_only and not options.virtual:
        real.measure()
        real.play_twins(options.jobs)
    found = [(task, result) for task in every if (result := _read(folder, task)) is not None]
    results = [result for _, result in found]
    stale = sum(result["key"] != task.key for task, result in found)
    tables = Tables(results)
    notes = [
        f"{len(results)} of {len(every)} results are there, {stale} of them of another state of the code.",
        f"Rounds take their time {measured.source}.",
    ]
    rows, real_notes = real.rows(tables), [real.note]
    markdown = paper_markdown.markdown(tables, notes) + paper_real_report.markdown(rows, real_notes)
    (options.out / "report.md").write_text(markdown)
    (options.out / "report.html").write_text(
        paper_html.page(tables, notes, paper_real_report.section(rows, real_notes))
    )
    behind = [] if options.real else tables.behind()
    behind += [] if options.virtual else paper_real_report.findings(rows)
    print(f"{options.out / 'report.md'}: {standing(tables)} {paper_real_report.standing(rows)}", file=sys.stderr)
    for cell in behind:
        print(f"  {cell}", file=sys.stderr)
    missing = (not options.real and len(results) < len(every)) or (not options.virtual and real.missing)
    return 1 if behind or missing else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    half = parser.add_mutually_exclusive_group()
    half.add_argument("--virtual", action="store_true", help="only play the cells in virtual time")
    half.add_argument("--real", action="store_true", help="only measure cells on the real clock, within an hour")
    parser.add_argument("--models", default=",".join(PROFILES), help="of %(default)s")
    parser.add_argument("--only", default="", help="cells whose name begins so, e.g. glm-suffix4k")
    parser.add_argument("--jobs", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--round-ms", help=f"a prepare round, or what bench-admission printed ({STORED} if there)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="least that is measured of a cell (%(default)s)")
    parser.add_argument("--speed-up", type=float, default=1.0, help="of the emulated devices, for trials (%(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="%(default)s")
    parser.add_argument("--report-only", action="store_true", help="play nothing, write the report of what is there")
    options = parser.parse_args(arguments)
    unknown = set(options.models.split(",")) - PROFILES.keys()
    if unknown:
        parser.error(f"no model {' '.join(sorted(unknown))}; known: {' '.join(PROFILES)}")
    return options


def _play_all(missing: list[Task], folder: Path, jobs: int) -> None:
    """Each result is written as soon as it is there."""
    began = time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        playing = {pool.submit(play, task): task for task in missing}
        for done, future in enumerate(as_completed(playing), 1):
            task = playing[future]
            error = future.exception()
            if error is not None:
                print(f"{task.name}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            result = future.result()
            write_kept(_path(folder, task), {"key": task.key, **result})
            told = f"{result['tokens_per_s']:11,.0f} tokens/s, {result['result']['work_of_bound']:.1%} of the bound"
            print(
                f"[{done}/{len(missing)}, {time.monotonic() - began:.0f} s] {task.name}: {told}, {result['took_s']} s",
                file=sys.stderr,
            )


def _path(folder: Path, task: Task) -> Path:
    return folder / f"{task.name}.json"


def _read(folder: Path, task: Task) -> dict[str, Any] | None:
    return read_kept(_path(folder, task), "key", "result")


def _known(folder: Path, task: Task) -> bool:
    found = _read(folder, task)
    return found is not None and found["key"] == task.key


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept, the same command goes on", file=sys.stderr)
        sys.exit(130)
