"""Sends the passes through the SDK and collects the answers.

Owns that a pass begins when the one before has ended, and the time they take. The first request that
fails ends the demo with its typed error. Called by `story.py` while the cluster stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

from wavepp import AsyncClient, Sampling
from wavepp.demo.prompts import DemoPrompt
from wavepp.demo.screen import Screen
from wavepp.demo.tokens import ModelText
from wavepp.demo.verdict import Answer


async def ask(
    client: AsyncClient,
    passes: Sequence[Sequence[DemoPrompt]],
    concurrency: int,
    text: ModelText,
    screen: Screen,
) -> tuple[list[Answer], float]:
    """The answers in the order of the prompts, and the wall time of all passes (seconds)."""
    answers: list[Answer] = []
    total_s = 0.0
    for number, prompts in enumerate(passes, start=1):
        began = time.monotonic()
        with screen.progress(f"pass {number}", len(prompts)) as done:
            found = await _ask_pass(client, number, prompts, concurrency, text, done)
        seconds = time.monotonic() - began
        tokens = sum(len(prompt.token_ids) for prompt in prompts)
        cached = sum(answer.result.cached_tokens for answer in found)
        screen.say(f"pass {number}: {len(prompts)} prompts, {tokens} tokens, {cached} of them reused, {seconds:.1f} s")
        answers += found
        total_s += seconds
    return answers, total_s


async def _ask_pass(
    client: AsyncClient,
    number: int,
    prompts: Sequence[DemoPrompt],
    concurrency: int,
    text: ModelText,
    done: Callable[[int], None],
) -> list[Answer]:
    answers: dict[int, Answer] = {}
    asked = (prompt.token_ids for prompt in prompts)
    async with aclosing(
        client.prefill_many(asked, concurrency=concurrency, sampling=Sampling(full_logits=True))
    ) as outcomes:
        async for outcome in outcomes:
            prompt, result = prompts[outcome.index], outcome.unwrap()
            first = text.text_after(prompt.token_ids, result.first_token)
            answers[outcome.index] = Answer(number, prompt, result, first)
            done(1)
    return [answers[index] for index in range(len(prompts))]
