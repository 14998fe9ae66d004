"""Settings of the whole test run: hypothesis profiles, tests that take turns, namespace tests that must not be skipped.

Fixtures belong to the folder that uses them, or to tests/harness when several do.
"""

import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.harness import variant

# A shared machine stalls a draw for seconds at will: no deadline, and slowness alone is no failure.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# In CI the same examples every time: a red run there can be repeated anywhere.
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", choices=variant.ENGINES, help="engine that the whole system is tested with")


def pytest_configure(config: pytest.Config) -> None:
    if chosen := config.getoption("--engine"):
        os.environ[variant.SETTING] = chosen


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out, with its reason, what cannot be said of the engine that was chosen."""
    for item in items:
        only = item.get_closest_marker("engines")
        if only is not None and variant.chosen_engine() not in only.args:
            item.add_marker(pytest.mark.skip(reason=f"not with {variant.chosen_engine()}: {only.kwargs['why']}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped namespace test into a failure where WAVEPP_REQUIRE_NAMESPACES=1 says that it must run."""
    report = yield
    if report.skipped and "namespaces" in item.keywords and os.environ.get("WAVEPP_REQUIRE_NAMESPACES") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped, but WAVEPP_REQUIRE_NAMESPACES=1: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let tests marked `processes` take turns across pytest workers: two of them on few cores miss each other's beats.

    Outermost, so that waiting does not count against the test's time limit. xdist's own groups have no effect on
    pytest 9.2: its test ids no longer carry them.
    """
    if "processes" not in item.keywords or "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)
