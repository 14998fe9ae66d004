"""`--rewrite` renews the golden output of the scenario texts; read the diff before committing it."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="renew the golden output of tests/scenario/*.txt")


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--rewrite", default=False))
