"""The SDK's public face is a list that grows by decision, and costs nothing to import."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys

import pytest

import wavepp
import wavepp.errors
import wavepp.testing
import wavepp_proto
from wavepp_proto.errors import BY_REASON

PUBLIC = [
    "Admitted",
    "AsyncClient",
    "Client",
    "ClientSecurity",
    "ClusterStatus",
    "Description",
    "Finished",
    "PrefillOutcome",
    "PrefillResult",
    "PrefillStream",
    "Progress",
    "Queued",
    "RequestOptions",
    "RetryPolicy",
    "Sampling",
    "Timings",
    "TraceSettings",
    "WaveppError",
    "errors",
]
OF_THE_WIRE = {
    "Admitted",
    "ClientSecurity",
    "Finished",
    "Progress",
    "Queued",
    "Sampling",
    "Timings",
    "TraceSettings",
    "WaveppError",
}
"""Defined in wavepp_proto, where the controller finds them too."""
ASYNC_ONLY = {"__aenter__", "__aexit__"}
SYNC_ONLY = {"__enter__", "__exit__"}


def test_public_names_are_frozen() -> None:
    assert wavepp.__all__ == PUBLIC
    assert sorted(PUBLIC) == PUBLIC


def test_public_names_exist_and_are_listed_by_dir() -> None:
    assert all(hasattr(wavepp, name) for name in PUBLIC)
    assert set(PUBLIC) <= set(dir(wavepp))
    assert wavepp.__version__ == wavepp_proto.__version__


@pytest.mark.parametrize("name", ["Admitted", "Finished", "Progress", "Queued", "Sampling", "Timings"])
def test_class_says_what_it_is_when_asked_for_help(name: str) -> None:
    """A dataclass without words of its own would show its signature."""
    assert not (getattr(wavepp, name).__doc__ or f"{name}(").startswith(f"{name}(")


def test_unknown_name_is_refused_when_asked_for() -> None:
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = wavepp.Nonsense


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - OF_THE_WIRE - {"errors"}))
def test_class_shows_its_public_home_when_defined_by_the_sdk(name: str) -> None:
    assert getattr(wavepp, name).__module__ == "wavepp"


def test_error_names_are_all_errors_of_the_contract() -> None:
    assert set(wavepp.errors.__all__) == {cls.__name__ for cls in BY_REASON.values()} | {"BY_REASON"}
    assert all(getattr(wavepp.errors, cls.__name__) is cls for cls in BY_REASON.values())


def test_testing_names_are_frozen() -> None:
    assert wavepp.testing.__all__ == ["Answer", "FakeController", "Gate", "Outcome", "Received", "Step"]


def test_blocking_client_has_every_method_of_the_asyncio_client() -> None:
    def methods(cls: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in vars(cls).items()
            if inspect.isfunction(member) and (not name.startswith("_") or name.endswith("__"))
        }

    blocking, asyncio_ = methods(wavepp.Client), methods(wavepp.AsyncClient)
    del blocking["__init__"], asyncio_["__init__"]
    assert blocking.keys() - SYNC_ONLY == asyncio_.keys() - ASYNC_ONLY
    assert all(blocking[name] == asyncio_[name] for name in blocking.keys() - SYNC_ONLY)


def test_blocking_client_takes_every_setting_of_the_asyncio_client() -> None:
    from wavepp._client import ClientOptions

    settings = set(inspect.signature(wavepp.AsyncClient).parameters) - {"address"}
    assert set(ClientOptions.__annotations__) == settings


def test_options_are_those_that_a_request_understands() -> None:
    from wavepp._request import checked

    parameters = inspect.signature(checked).parameters.values()
    keywords = {parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    annotated = set(wavepp.RequestOptions.__annotations__)
    assert annotated == keywords


def test_outcome_survives_pickling_when_sent_to_another_process() -> None:
    outcome = wavepp.PrefillOutcome(3, error=wavepp.errors.QueueFull("full", field="queue", value=9, retry_after_ms=5))
    back = pickle.loads(pickle.dumps(outcome))  # noqa: S301  our own bytes
    assert type(back.error) is wavepp.errors.QueueFull
    assert (back.index, back.error.fields, back.error.retry_after_ms) == (3, {"field": "queue", "value": "9"}, 5)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import wavepp", {"grpc", "google.protobuf", "numpy", "asyncio"}),
        (
            "import wavepp; wavepp.errors; wavepp.PrefillResult; wavepp.RetryPolicy",
            {"grpc", "google.protobuf", "numpy"},
        ),
        ("import wavepp; wavepp.AsyncClient; wavepp.Client", {"numpy"}),
    ],
    ids=["package", "values", "clients"],
)
def test_import_brings_in_nothing_heavy_when_not_needed(code: str, absent: set[str]) -> None:
    heavy = absent | {"torch", "transformers", "tokenizers", "opentelemetry", "etcd3", "typer", "rich"}
    script = f"{code}\nimport sys\nprint(sorted({heavy!r} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"


def test_errors_show_the_module_that_users_import() -> None:
    assert {cls.__module__ for cls in BY_REASON.values()} == {"wavepp.errors"}
