"""Every example runs, as a user would run it, and prints what it promises."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from wavepp.testing import Answer, FakeController, Gate, Step
from wavepp_proto.terms import StageIndex

EXAMPLES = Path(__file__).parents[2] / "client" / "examples"
RUN_S = 60
ANSWER = Answer(
    first_token=2, cached_tokens=64, candidate=128, limiting_stage=StageIndex(3), progress=(512, 1000), waves=2
)


async def run(name: str, controller: FakeController) -> list[str]:
    """Lines that the example printed; it must end with 0 and say nothing on stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / name),
        env=os.environ | {"WAVEPP_CONTROLLER": controller.address, "GRPC_VERBOSITY": "NONE"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), RUN_S)
    assert (process.returncode, err.decode()) == (0, "")
    return out.decode().splitlines()


def test_every_example_is_tested() -> None:
    tested = {"cancel.py", "events.py", "hello.py", "many.py", "threads.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


async def test_hello_prints_text_when_the_model_folder_is_here(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(["[UNK]", "The", "Paris", "capital", "of", "France", "is"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    async with FakeController(answer=ANSWER) as controller:
        controller.description = replace(controller.description, model_path=str(tmp_path))
        assert await run("hello.py", controller) == ["' Paris': 64 of 5 tokens were reused"]


async def test_many_prints_each_outcome_when_one_prompt_is_wrong() -> None:
    async with FakeController(answer=ANSWER) as controller:
        printed = await run("many.py", controller)
        reused = [f"prompt {index}: 64 tokens reused" for index in range(6)]
        assert sorted(printed) == [*reused, "prompt 6: the prompt has no tokens"]


async def test_events_prints_each_step_when_it_happens() -> None:
    async with FakeController(answer=ANSWER) as controller:
        printed = await run("events.py", controller)
        assert printed[1:] == [
            "queued behind 0 requests",
            "admitted: 64 tokens reused, limited by stage 3",
            "512 of 1000 tokens",
            "1000 of 1000 tokens",
            "first token 2 after 2 waves",
        ]
        assert printed[0].startswith(f"request {controller.requests[0].request.request_id}, trace ")


async def test_cancel_prints_how_each_request_ended_when_stopped() -> None:
    held = Answer(gates={Step.FINISHED: Gate()})
    async with FakeController(answer=held) as controller:
        printed = await run("cancel.py", controller)
        second = controller.requests[1].request.request_id
        assert printed == ["left after Queued", f"cancelled: request {second} was cancelled"]
        # Once for each event that came before the cancellation did.
        assert set(controller.cancelled_ids) == {second}


async def test_threads_prints_every_result_when_one_client_is_shared() -> None:
    async with FakeController(answer=ANSWER) as controller:
        printed = await run("threads.py", controller)
        assert [line.split(" in ")[0] for line in printed] == [f"{99 + n} tokens: first token 2" for n in range(4)]
