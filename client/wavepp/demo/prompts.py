"""Two dozen prompts that share a long system prompt and six documents, in three passes of eight.

Owns the questions and their order; the prose lies in texts/. A pass begins when the one before has
ended, because reuse is of what was computed before: the first asks once about everything, the second
comes back to every document, newest first, the third asks some things again, word for word.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

from wavepp.demo.tokens import ModelText
from wavepp_proto.errors import InvalidRequest


class Question(NamedTuple):
    text: str
    begun: str
    """How the answer begins: the token after it is a word that stands in the text, so a person can judge it."""


ABOUT: dict[str, tuple[Question, ...]] = {
    "lighthouse": (
        Question("The post is turning dim. How long before the fog horn has pressure?", "The compressor needs"),
        Question("How do I top up the oil bath, and from which can?", "Add half a litre from the"),
        Question(
            "The mains went an hour ago. What is started next?",
            "After the first hour without mains the second starts the",
        ),
    ),
    "ships_log": (
        Question("How did the engineer get the sounder to work again?", "He dried the connector on the galley"),
        Question("Why is the starboard winch not to be used?", "Because the lining of its"),
        Question("Where should the Skerry buoy go?", "It should be moved 600 metres to the"),
    ),
    "bakery": (
        Question("A customer must not eat egg. Is the rye safe?", "Careful: on Saturdays it is mixed in the same"),
        Question(
            "On which deck of the oven is the sailor's plait baked?", "It is baked for twenty-eight minutes on the"
        ),
        Question("How long do the oat biscuits keep?", "They keep for"),
    ),
    "greenhouse": (
        Question("The red lamp on the boiler burns. What do I do first?", "Shut the chip"),
        Question("Why may Pump 3 not run on 20 May?", "It may not run between 1 May and 15 June, when the"),
    ),
    "council": (
        Question("How did the council vote on the bridge?", "The council decided by four votes to"),
        Question("What may cross the bridge from tomorrow?", "No vehicle heavier than 3"),
        Question("Why did Mr Okafor vote against?", "He thinks that the other three inner"),
    ),
    "incident": (
        Question("Why did Chill 2 not take over?", "Its selector had been left on"),
        Question("What halves the heat if the room passes 35 degrees?", "Shutting down Tern and"),
    ),
}
TO_ANYBODY = (
    Question("Somebody reports a smell of ammonia near the quay. What should they do?", "Ring the harbour"),
    Question("Can you order forty sacks of flour for Friday?", "No: I do not change schedules or order"),
    Question("What do you do when two passages of a document disagree?", "I quote both and say which one is"),
)
ALONE = (
    Question("Where does the sun rise?", "The sun rises in the"),
    Question("What is the capital of France?", "The capital of France is"),
)


class Asked(NamedTuple):
    """A question by its place above. `about`: a document, `anybody` (only the system prompt is shared) or `alone`."""

    about: str
    number: int


PASSES: tuple[tuple[Asked, ...], ...] = (
    (
        Asked("lighthouse", 1), Asked("ships_log", 1), Asked("bakery", 1), Asked("greenhouse", 1),
        Asked("council", 1), Asked("incident", 1), Asked("anybody", 1), Asked("alone", 1),
    ),
    (
        Asked("incident", 2), Asked("council", 2), Asked("greenhouse", 2), Asked("bakery", 2),
        Asked("ships_log", 2), Asked("lighthouse", 2), Asked("anybody", 2), Asked("alone", 2),
    ),
    (
        Asked("lighthouse", 2), Asked("ships_log", 3), Asked("anybody", 3), Asked("bakery", 3),
        Asked("lighthouse", 3), Asked("council", 3), Asked("ships_log", 2), Asked("alone", 1),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    title: str
    """Such as "bakery 2"; a prompt asked again has the same title."""
    token_ids: tuple[int, ...]
    asked_before: bool
    """An exact copy ran in an earlier pass."""


def build_passes(model: ModelText) -> tuple[tuple[DemoPrompt, ...], ...]:
    """The passes as token ids. Raises InvalidRequest when the model's window is too short for them."""
    seen: set[Asked] = set()
    passes = []
    for asked_now in PASSES:
        passes.append(tuple(_prompt(model, asked, asked in seen) for asked in asked_now))
        seen.update(asked_now)
    longest = max(len(prompt.token_ids) for prompts in passes for prompt in prompts)
    if longest > model.window:
        raise InvalidRequest(
            f"the demo's prompts have up to {longest} tokens with this model, its window holds {model.window}",
            field="model", value=longest, limit=model.window,
        )  # fmt: skip
    return tuple(passes)


def _prompt(model: ModelText, asked: Asked, asked_before: bool) -> DemoPrompt:
    title = f"{asked.about} {asked.number}"
    questions = {"alone": ALONE, "anybody": TO_ANYBODY}.get(asked.about) or ABOUT[asked.about]
    question = questions[asked.number - 1]
    system = "" if asked.about == "alone" else _text("system")
    document = f"{_text(asked.about)}\n\nQuestion: " if asked.about in ABOUT else ""
    return DemoPrompt(title, model.encode(system, document + question.text, question.begun), asked_before)


def _text(name: str) -> str:
    return files("wavepp.demo").joinpath(f"texts/{name}.txt").read_text(encoding="utf-8").strip()
