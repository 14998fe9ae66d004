"""`wavepp simulate`: play a scenario text, explore random histories by seed, or plan a deployment.

Owns the command line only; `script`, `campaign` and `shrink` do the work and are imported when they are
needed, `plan_command` has the planner's options. Ends 1 with the seed, its story and a short scenario when an
invariant is broken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wavepp_simulator.plan_command import plan

STORY_LINES = 60
"""Lines of a failing seed's story that are shown unless --whole-story is given."""

command = typer.Typer(no_args_is_help=True, help="Run both cores in virtual time: scenarios, random faults, plans.")
command.command()(plan)


@command.command()
def run(
    scenario: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A scenario text.")],
) -> None:
    """Play a scenario and print it with what happened."""
    from wavepp_simulator.script import ScriptError, play

    try:
        typer.echo(play(scenario.read_text(encoding="utf-8")))
    except ScriptError as error:
        typer.echo(error.text)
        raise typer.Exit(1) from error


@command.command()
def faults(
    seeds: Annotated[int, typer.Option("--seeds", min=1, envvar="WAVEPP_SEEDS", help="How many histories.")] = 100,
    first: Annotated[int, typer.Option("--first-seed", min=0, envvar="WAVEPP_FIRST_SEED", help="First seed.")] = 0,
    requests: Annotated[
        int, typer.Option("--requests", min=0, envvar="WAVEPP_REQUESTS", help="Requests in each history.")
    ] = 25,
    jobs: Annotated[int, typer.Option("--jobs", min=1, envvar="WAVEPP_JOBS", help="Processes that explore.")] = 1,
    shrinks: Annotated[
        bool, typer.Option("--shrink/--no-shrink", envvar="WAVEPP_SHRINK", help="Make a failing seed short.")
    ] = True,
    whole: Annotated[
        bool, typer.Option("--whole-story", envvar="WAVEPP_WHOLE_STORY", help="Show a failing seed's whole story.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", envvar="WAVEPP_JSON", help="Print the totals as JSON.")] = False,
) -> None:
    """Explore random loads and faults; every event is checked. Stops at the first broken invariant."""
    import json
    import time

    from rich.console import Console
    from rich.progress import Progress

    from wavepp_simulator import campaign
    from wavepp_simulator.report import failing_seed, totals_in_words

    console = Console(stderr=True)
    began = time.perf_counter()
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("exploring", total=seeds)
        totals, failure = campaign.run(first, seeds, requests, jobs, lambda played: bar.advance(task, played))
    took = time.perf_counter() - began
    if failure is not None:
        typer.echo(failing_seed(failure.seed, requests, shrinks, None if whole else STORY_LINES))
        typer.echo(f"seed {failure.seed}: {failure.violation}", err=True)
        typer.echo(
            f"again: wavepp simulate faults --first-seed {failure.seed} --seeds 1 --requests {requests}", err=True
        )
        raise typer.Exit(1)
    if as_json:
        typer.echo(json.dumps({**totals.as_data(), "violations": 0, "seconds": round(took, 3)}, allow_nan=False))
    else:
        typer.echo(totals_in_words(totals, took))


def main() -> None:
    command()


if __name__ == "__main__":
    main()
