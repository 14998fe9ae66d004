"""A store that others serve: its answers, its errors, and that nobody hangs when it is silent."""

from __future__ import annotations

import threading

import pytest

from tests.harness.plain_store import PlainStore
from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.bounded_store import BoundedStore

SHORT_S, LONG_S = 0.05, 60.0


class SilentStore(PlainStore):
    """Answers nothing until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        assert self.may_go_on.wait(LONG_S)
        return super().check(keys)


def test_store_answers_as_the_one_behind_it_does() -> None:
    store = BoundedStore(PlainStore(), LONG_S)
    store.set("a", "1")
    assert store.add("n", 2) == 2
    assert (store.check(["a", "n"]), store.check(["a", "b"])) == (True, False)
    assert (store.compare_set("w", "", "go"), store.compare_set("w", "", "over")) == (b"go", b"go")
    assert store.get("a") == b"1"
    assert (store.delete_key("a"), store.delete_key("a")) == (True, False)
    store.close()


def test_error_of_the_store_is_raised_where_it_was_asked() -> None:
    store = BoundedStore(PlainStore(), LONG_S)
    with pytest.raises(KeyError):
        store.get("nothing")
    store.set("a", "1")
    assert store.get("a") == b"1"
    store.close()


def test_silent_store_is_a_typed_fault_and_is_not_asked_again() -> None:
    silent = SilentStore()
    store = BoundedStore(silent, SHORT_S)
    for question in (lambda: store.check(["a"]), lambda: store.get("a"), lambda: store.check(["b"])):
        with pytest.raises(EngineFault) as caught:
            question()
        assert caught.value.fields["field"] == "store"
    assert silent.asked == 1
    silent.may_go_on.set()
    store.close()
