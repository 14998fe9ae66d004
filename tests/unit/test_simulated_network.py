"""Wires and calls of the simulator: order, and everything that can happen to a message."""

from functools import partial
from random import Random

import pytest

from wavepp_proto.errors import WaveppError
from wavepp_simulator.agenda import Agenda
from wavepp_simulator.network import HOLD_BACK_S, Network, Wire
from wavepp_simulator.process import Process
from wavepp_simulator.wire_faults import Strike

LATENCY_S = 0.001


class Rig:
    """Two processes, a wire from the controller to stage 1, and what arrived on it."""

    def __init__(self) -> None:
        self.agenda = Agenda()
        self.told: list[str] = []
        self.network = Network(self.agenda, LATENCY_S, 0.0, Random(1), self.told.append)
        self.controller, self.stage = Process("c", self.agenda), Process("s1", self.agenda)
        self.wire = Wire(self.network, "c>s1/rounds", self.stage)
        self.arrived: list[int] = []

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.wire.send(partial(self.arrived.append, number), faulty=True)

    def settle(self) -> None:
        while self.agenda.next_at is not None:
            self.agenda.step()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_messages_arrive_in_order_when_nothing_is_wrong(rig: Rig) -> None:
    rig.network.slow["c>s1"] = 0.5
    rig.send(1)
    rig.network.slow.clear()
    rig.send(2)
    rig.settle()
    assert rig.arrived == [1, 2]


@pytest.mark.parametrize(
    ("strike", "arrived"),
    [(Strike.DROP, [2, 3]), (Strike.DUPLICATE, [1, 1, 2, 3]), (Strike.REORDER, [2, 1, 3])],
)
def test_next_message_alone_is_struck_when_the_rule_counts_one(rig: Rig, strike: Strike, arrived: list[int]) -> None:
    rig.network.faults.set("c>s1", strike, count=1)
    rig.send(1, 2, 3)
    rig.settle()
    assert rig.arrived == arrived
    assert len(rig.told) == 1
    assert not rig.network.faults.active


def test_message_held_back_goes_alone_when_nothing_overtakes_it(rig: Rig) -> None:
    rig.network.faults.set("c>s1/rounds", Strike.REORDER, count=1)
    rig.send(1)
    rig.settle()
    assert rig.arrived == [1]
    assert rig.agenda.now == HOLD_BACK_S + LATENCY_S


def test_other_wires_are_spared_when_one_is_struck(rig: Rig) -> None:
    rig.network.faults.set("c>s11", Strike.DROP, chance=1.0)
    rig.network.faults.set("c>s1/waves", Strike.DROP, chance=1.0)
    rig.send(1)
    rig.settle()
    assert rig.arrived == [1]


def test_rule_by_chance_ends_when_it_is_set_to_nothing(rig: Rig) -> None:
    rig.network.faults.set("c>s1", Strike.DROP, chance=1.0)
    rig.send(1)
    rig.network.faults.set("c>s1", Strike.DROP)
    rig.send(2)
    rig.settle()
    assert rig.arrived == [2]


def test_messages_wait_in_order_when_their_wire_is_partitioned(rig: Rig) -> None:
    rig.send(1)
    rig.network.silence("c>s1")
    rig.send(2, 3)
    rig.settle()
    assert rig.arrived == [1]
    assert rig.network.partitioned
    rig.network.heal("c>s1")
    rig.send(4)
    rig.settle()
    assert rig.arrived == [1, 2, 3, 4]


def test_nothing_arrives_when_the_wire_was_cut_under_way(rig: Rig) -> None:
    rig.send(1)
    rig.wire.cut()
    rig.send(2)
    rig.settle()
    assert rig.arrived == []


def test_call_is_answered_once_when_the_network_repeats_it(rig: Rig) -> None:
    asked: list[int] = []
    answers: list[str | WaveppError] = []
    rig.network.faults.set("c>s1/control", Strike.DUPLICATE, count=1)

    def ask(answer: object) -> None:
        asked.append(1)
        answer(f"answer {len(asked)}")  # type: ignore[operator]

    rig.network.call(rig.controller, lambda: rig.stage, "c>s1/control", ask, answers.append, 1.0)
    rig.settle()
    assert (len(asked), answers) == (2, ["answer 1"])


@pytest.mark.parametrize("lost", ["c>s1/control", "s1>c/control"])
def test_call_fails_at_its_deadline_when_either_way_loses_it(rig: Rig, lost: str) -> None:
    answers: list[str | WaveppError] = []
    rig.network.faults.set(lost, Strike.DROP, count=1)
    rig.network.call(rig.controller, lambda: rig.stage, "c>s1/control", lambda answer: answer("x"), answers.append, 1.0)
    rig.settle()
    (error,) = answers
    assert isinstance(error, WaveppError)
    assert rig.agenda.now == 1.0
