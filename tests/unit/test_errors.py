"""The error tree: the drawing in errors.py, the classes and what crosses the wire agree."""

from __future__ import annotations

import grpc
import pytest

from wavepp_proto import convert, errors
from wavepp_proto.errors import WaveppError
from wavepp_proto.terms import ErrorInfo


def drawn() -> dict[str, tuple[str, str, str, bool]]:
    """Class name to (parent, code, reason, retryable), read from the module's drawing."""
    assert errors.__doc__ is not None
    found: dict[str, tuple[str, str, str, bool]] = {}
    path: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        words = line.split()
        depth = len(line) - len(line.lstrip())
        if depth < 4 or not words[0].isidentifier():
            continue
        while path and path[-1][0] >= depth:
            path.pop()
        if len(words) > 1:
            found[words[0]] = (path[-1][1], words[1], words[2], {"yes": True, "no": False}[words[3]])
        path.append((depth, words[0]))
    return found


def classes(root: type[WaveppError] = WaveppError) -> list[type[WaveppError]]:
    return [leaf for child in root.__subclasses__() for leaf in (child, *classes(child))]


def test_drawing_equals_the_classes_when_read() -> None:
    coded = {cls.__name__: (cls.__bases__[0].__name__, cls.code, cls.reason, cls.retryable) for cls in classes()}
    assert drawn() == coded


def test_reasons_are_unique_and_codes_known_when_walked() -> None:
    reasons = [WaveppError.reason, *(cls.reason for cls in classes())]
    assert len(set(reasons)) == len(reasons)
    assert set(errors.BY_REASON) == set(reasons)
    assert {cls.code for cls in classes()} <= {code.name for code in grpc.StatusCode}


@pytest.mark.parametrize("cls", [WaveppError, *classes()], ids=lambda cls: cls.__name__)
def test_error_is_the_same_when_rebuilt_from_its_data(cls: type[WaveppError]) -> None:
    error = cls("needs 51 blocks", retry_after_ms=5, needed_blocks=51, stage=None, pool_blocks=49)
    assert error.fields == {"needed_blocks": "51", "pool_blocks": "49"}
    again = errors.from_info(error.info())
    assert type(again) is cls
    assert (again.message, str(again)) == ("needs 51 blocks", "needs 51 blocks")
    assert again.info() == error.info()


def test_error_can_be_sent_and_printed_when_it_quotes_what_is_no_utf_8() -> None:
    error = errors.InvalidRequest("no \udcff", field="pipeline", value="\ud800x")
    assert (str(error), error.message) == ("no \\udcff", "no \\udcff")
    assert error.fields == {"field": "pipeline", "value": "\\ud800x"}
    assert convert.error_from_pb(convert.error_to_pb(error.info())) == error.info()


def test_unknown_reason_becomes_the_base_class_when_a_newer_peer_sends_it() -> None:
    error = errors.from_info(ErrorInfo("FROM_THE_FUTURE", "m", (("a", "b"),)))
    assert type(error) is WaveppError
    assert (error.message, error.fields, error.retryable) == ("m", {"a": "b"}, False)
