"""`wavepp simulate`: play a scenario text, or explore random histories by seed.

Owns the command line only; `script` and `explore` do the work and are imported when they are needed.
Ends 1 with the seed and its story when an invariant is broken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

STORY_LINES = 60
"""Lines of a failing seed's story that are shown unless --whole-story is given."""

command = typer.Typer(no_args_is_help=True, help="Run both cores in virtual time: scenarios and random faults.")


@command.command()
def run(
    scenario: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A scenario text.")],
) -> None:
    """Play a scenario and print it with what happened."""
    from wavepp_simulator.script import ScriptError, play

    try:
        typer.echo(play(scenario.read_text()))
    except ScriptError as error:
        typer.echo(error.text)
        raise typer.Exit(1) from error


@command.command()
def faults(
    seeds: Annotated[int, typer.Option("--seeds", min=1, envvar="WAVEPP_SEEDS", help="How many histories.")] = 100,
    first: Annotated[int, typer.Option("--first-seed", min=0, envvar="WAVEPP_FIRST_SEED", help="First seed.")] = 0,
    requests: Annotated[
        int, typer.Option("--requests", min=0, envvar="WAVEPP_REQUESTS", help="Requests in each history.")
    ] = 20,
    check_every: Annotated[
        int, typer.Option("--check-every", min=1, envvar="WAVEPP_CHECK_EVERY", help="Events between two checks.")
    ] = 1,
    whole: Annotated[
        bool, typer.Option("--whole-story", envvar="WAVEPP_WHOLE_STORY", help="Show a failing seed's whole story.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", envvar="WAVEPP_JSON", help="Print the totals as JSON.")] = False,
) -> None:
    """Explore random loads and faults; every event is checked. Stops at the first broken invariant."""
    import json

    from rich.console import Console
    from rich.progress import track

    from wavepp_simulator.explore import explore
    from wavepp_simulator.story import KINDS

    events = 0
    outcomes: dict[str, int] = {}
    console = Console(stderr=True)
    for seed in track(range(first, first + seeds), "exploring", console=console, disable=not console.is_terminal):
        history = explore(seed, requests, check_every)
        events += history.events
        for outcome, count in history.outcomes().items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
        if history.violation is not None:
            lines = list(history.world.story.lines(0, KINDS - {"tick", "beat"}))
            typer.echo("\n".join(lines if whole else lines[-STORY_LINES:]))
            typer.echo(f"seed {seed}: {history.violation}", err=True)
            typer.echo(f"again: wavepp simulate faults --first-seed {seed} --seeds 1 --requests {requests}", err=True)
            raise typer.Exit(1)
    if as_json:
        typer.echo(json.dumps({"seeds": seeds, "events": events, "violations": 0, "outcomes": outcomes}))
        return
    told = ", ".join(f"{name.lower()} {count}" for name, count in sorted(outcomes.items()))
    typer.echo(f"{seeds} seeds, {events} events, no violation; requests: {told}")


def main() -> None:
    command()


if __name__ == "__main__":
    main()
