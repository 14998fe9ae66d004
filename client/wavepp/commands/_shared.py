"""Options and error output of the client's commands."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from wavepp_proto.errors import WaveppError
    from wavepp_proto.runtime.channels import ClientSecurity

T = TypeVar("T")

Controller = Annotated[
    str | None,
    typer.Option(
        "--controller",
        envvar="WAVEPP_CONTROLLER",
        help="host:port of the controller; by default the only cluster that `wavepp up` runs here.",
    ),
]

Proxy = Annotated[
    str | None,
    typer.Option(
        "--proxy",
        envvar="WAVEPP_PROXY",
        help="http://host:port on the way to the controller; none is taken from the environment.",
    ),
]


class _Way:
    """Where this command's calls go, for `explain`: one process runs one command."""

    address: str | None = None
    security: ClientSecurity | None = None


def address_of(controller: str | None) -> str:
    """The controller named, else the one found here, which is said on stderr. Raises InvalidRequest if there are
    several."""
    from wavepp._discovery import choose

    if controller:
        _Way.address = controller
        return controller
    found = choose()
    _Way.address = found.address
    console().print(f"controller {found.address} ({found.why})", highlight=False, markup=False, soft_wrap=True)
    return found.address


def security(ca: Path | None, cert: Path | None, key: Path | None, server_name: str) -> ClientSecurity:
    """How a command reaches its controller. Raises InvalidRequest if that would not be what the options ask for."""
    from wavepp._security import check_tls
    from wavepp_proto.runtime.channels import ClientSecurity

    asked = check_tls(ClientSecurity(ca, cert, key, server_name), _option)
    _Way.security = asked
    asked.credentials()  # reads the files: a missing one is told now, not by a connection that fails
    return asked


def _option(name: str) -> str:
    return f"--tls-{name.replace('_', '-')}"


def console() -> Console:
    """Progress and talk go to stderr; stdout is for results."""
    from rich.console import Console

    return Console(stderr=True)


def explain(error: WaveppError) -> str:
    """One line for a person, with what to do where the error alone does not say."""
    from wavepp._security import why_unreachable
    from wavepp._tokenizer import GIVE_PATH, SEND_IDS
    from wavepp_proto.errors import ControllerUnavailable, DeadlineExpired, TokenizerUnavailable, describe

    said = describe(error)
    if isinstance(error, ControllerUnavailable):
        look = why_unreachable(_Way.address, _Way.security, _option) if _Way.address and _Way.security else None
        if look is None or look.startswith("nothing"):
            said += "; start a cluster with `wavepp up`, or name its controller with --controller"
        said = f"{said.partition(chr(10))[0]}; {look}" if look else said
    if isinstance(error, TokenizerUnavailable):
        said = said.replace(GIVE_PATH, "give --tokenizer PATH").replace(SEND_IDS, "give --tokens 1,2,3")
    state = error.fields.get("state", "")
    if isinstance(error, DeadlineExpired) and state:
        said = said.replace(f" was {state} when ", f" was {state_in_words(state)} when ")
    return said


def state_in_words(state: str) -> str:
    """A request's state as a person would say it; `hinted` names what the controller did, not what is awaited."""
    return "waiting for its turn" if state == "hinted" else state


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; a typed error becomes one line on stderr and exit status 1."""
    import asyncio

    from wavepp_proto.errors import WaveppError
    from wavepp_proto.runtime.process import EXIT_INTERRUPTED

    try:
        return asyncio.run(work)
    except WaveppError as error:
        typer.echo(explain(error), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
