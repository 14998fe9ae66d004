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

ABOUT: dict[str, tuple[str, ...]] = {
    "lighthouse": (
        "The post on the breakwater is turning dim. What do I start now, and how long before it is ready?",
        "Which can do I use to top up the oil bath, and how much do I add?",
        "The mains went an hour ago. What does the second do next?",
    ),
    "ships_log": (
        "What is the least depth on the ridge once the tide correction is applied?",
        "Which winch must not be used for the towed gear, and why?",
        "How far and in which direction should the Skerry buoy be moved?",
    ),
    "bakery": (
        "A customer must not eat egg. Is the harbour rye safe on a Saturday?",
        "At what temperature and for how long is the sailor's plait baked, and on which deck?",
        "How long do the oat biscuits keep, and how are they packed?",
    ),
    "greenhouse": (
        "The red lamp on the boiler burns. Tell me the steps in order.",
        "May Pump 3 draw from the mill stream on 20 May?",
    ),
    "council": (
        "What did the council decide about the bridge, and by how many votes?",
        "What weight may cross the bridge, and from when?",
        "Which course would let the ambulance cross, and what does each cost?",
    ),
    "incident": (
        "Why did Chill 2 not take over when Chill 1 stopped?",
        "In which order were the machines started again, and why is Heron last?",
    ),
}
TO_ANYBODY = (
    "It is 03:15 and somebody reports a smell of ammonia near the quay. What do you tell them?",
    "Can you order forty sacks of flour for Friday?",
    "What do you do when two passages of a document disagree?",
)
ALONE = (
    "Name one reason why a lighthouse lamp turns instead of blinking. Answer in a single sentence.",
    "A bus leaves at 08:40 and the ride takes 95 minutes. When does it arrive?",
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
    if asked.about == "alone":
        return DemoPrompt(title, model.encode("", ALONE[asked.number - 1]), asked_before)
    if asked.about == "anybody":
        user = TO_ANYBODY[asked.number - 1]
    else:
        user = f"{_text(asked.about)}\n\nQuestion: {ABOUT[asked.about][asked.number - 1]}"
    return DemoPrompt(title, model.encode(_text("system"), user), asked_before)


def _text(name: str) -> str:
    return files("wavepp.demo").joinpath(f"texts/{name}.txt").read_text(encoding="utf-8").strip()
