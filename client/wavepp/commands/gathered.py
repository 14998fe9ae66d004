"""Gathers the subcommands of every installed package into the `wavepp` command.

Owns nothing but the gathering: `up`, `prefill`, `bench`, `calibrate`, `profile`, `status` and `doctor` lie beside
this file, the others are found through the entry-point group `wavepp.commands`, so the client imports no other
package. Called by `__main__`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer

from wavepp.commands.bench import bench
from wavepp.commands.calibrate import calibrate
from wavepp.commands.doctor import doctor
from wavepp.commands.prefill import prefill
from wavepp.commands.profile import app as profile
from wavepp.commands.status import status
from wavepp.commands.up import up


def _version(wanted: bool) -> None:
    if wanted:
        from wavepp_proto import __version__

        typer.echo(f"wavepp {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Prefill for large language models split over a pipeline of stages."""


def build_app() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_root)
    for command in (up, prefill, bench, calibrate, status, doctor):
        app.command()(command)
    app.add_typer(profile, name="profile")
    for point in sorted(entry_points(group="wavepp.commands"), key=lambda found: found.name):
        _add(app, point.name, _load(point))
    return app


def _add(app: typer.Typer, name: str, command: Callable[..., Any] | typer.Typer) -> None:
    """A package brings one command, or a group of them."""
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


def _load(point: EntryPoint) -> Callable[..., Any] | typer.Typer:
    """A package's command; one that cannot be imported says why when it is called, and hinders no other."""
    try:
        command: Callable[..., Any] | typer.Typer = point.load()
    except ImportError as error:
        reason = str(error)

        def command() -> None:
            typer.echo(f"error: `wavepp {point.name}` cannot run here: {reason}", err=True)
            raise typer.Exit(1)

        command.__doc__ = f"Not usable here: {reason}."
    return command
