"""The simulator itself: one seed is one history, violations are found, and the command says so."""

import json

import pytest
import typer.core
from typer.testing import CliRunner

from wavepp_proto.terms import PrefillRequest, RequestId
from wavepp_simulator import campaign, mishaps
from wavepp_simulator.__main__ import command
from wavepp_simulator.clients import prompt
from wavepp_simulator.console import Console
from wavepp_simulator.explore import explore
from wavepp_simulator.ledger import Violation
from wavepp_simulator.script import ScriptError, play
from wavepp_simulator.shrink import shrink
from wavepp_simulator.story import KINDS
from wavepp_simulator.world import Shape, World
from wavepp_stage.core.block_cache import BlockCache

REQUESTS = 12
SEEDS = 30
"""Seeds in one test."""
LOTS = 10


def serving() -> World:
    world = World(Shape())
    world.start()
    world.run(lambda: world.controller.formation > 0, 5.0)
    return world


def submit(world: World, name: str, length: int) -> None:
    world.clients.submit(PrefillRequest(RequestId(name), prompt("a", length)))


def settle(world: World) -> None:
    world.run(lambda: world.idle, 60.0)
    world.check_drained()


@pytest.mark.parametrize("first", range(0, LOTS * SEEDS, SEEDS))
def test_random_histories_break_no_invariant(first: int) -> None:
    totals, failure = campaign.play_lot(range(first, first + SEEDS), 25)
    assert failure is None
    assert totals.seeds == SEEDS
    assert totals.requests == totals.outcomes.total() >= SEEDS * 25, "bursts come on top"
    assert totals.reuse["equal"] > 0.9 * totals.reuse["admissions"]


def test_story_is_equal_byte_by_byte_when_the_seed_is_equal() -> None:
    def story(seed: int) -> str:
        return "\n".join(explore(seed, REQUESTS).world.story.lines(0, KINDS))

    assert story(3) == story(3)
    assert story(3) != story(4)


def test_scenario_of_a_plan_replays_the_same_events() -> None:
    history = explore(7, REQUESTS)
    console = Console()
    for line in history.plan.scenario("replayed").splitlines()[1:]:
        console.obey(line)
    assert list(console.world.story.lines(0, KINDS)) == list(history.world.story.lines(0, KINDS))


def test_one_campaign_adds_up_the_same_over_several_processes() -> None:
    assert campaign.run(0, 6, REQUESTS, jobs=2) == campaign.run(0, 6, REQUESTS, jobs=1)


def test_failing_plan_shrinks_to_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug leaks every hold: one request is enough, and no fault."""
    monkeypatch.setattr(BlockCache, "release", lambda self, key: None)
    failing = explore(5, REQUESTS)
    short = shrink(failing)
    assert short.violation is not None
    assert [act.line.split()[0] for act in short.plan.acts] == ["submit"]
    assert len(short.plan.options) < len(failing.plan.options)
    with pytest.raises(ScriptError):
        play(short.plan.scenario("leak"))


def test_prompts_share_their_prefix_when_described_alike() -> None:
    assert prompt("a*32+b", 48)[: 32 * 4] == prompt("a", 32)
    assert prompt("a*32+b", 48)[32 * 4 :] == prompt("b", 16)
    with pytest.raises(ValueError, match="does not describe 8 tokens"):
        prompt("a*9", 8)


def test_lost_stage_is_detected_within_two_seconds_when_it_falls_silent() -> None:
    world = serving()
    submit(world, "r1", 400)
    world.run(lambda: world.stages[1].executor.executing == 2, 5.0)
    stopped = world.agenda.now
    mishaps.pause_stage(world, 1)
    world.run(lambda: not world.clients.waiting, 2.0)
    assert world.clients.of(RequestId("r1")).outcome.error.reason == "STAGE_LOST"  # type: ignore[union-attr]
    assert 1.0 < world.agenda.now - stopped < 2.0


def obeyed(*commands: str) -> World:
    console = Console(kinds=frozenset())
    for line in commands:
        console.obey(line)
    return console.world


@pytest.mark.parametrize("seed", [77100049, 500235])
def test_round_that_is_sent_again_is_no_new_question(seed: int) -> None:
    """One seed by which its request had ended and was looked for, one by which rounds are counted anew, from 1."""
    assert explore(seed, 25).violation is None


def test_round_that_is_sent_again_keeps_the_truth_of_its_first_time() -> None:
    world = obeyed(
        *("cluster pools=32,32", "drop s0>c/rounds 1", "submit r1 len=40"),
        *("run until r1 preparing", "advance 1ms", "cut stage 0", "run until idle"),
    )
    assert world.controller.machine.status(requests=False).counters["streams_reopened"] == 1
    assert (world.omniscient.counts["held_to_truth"], world.omniscient.counts["admissions"]) == (1, 1)


@pytest.mark.parametrize("seed", [19, 26, 29, 33])
def test_streams_opened_again_are_watched_when_the_old_ones_speak_once_more(seed: int) -> None:
    """A stage that was stopped before its first word says it on the streams that were given up."""
    world = obeyed(
        f"cluster pools=7 block=2 latency_us=500 jitter=20 round_deadline_ms=200 seed={seed}",
        *("pause stage 0", "submit r1 len=2 deadline_ms=300", "advance 950ms"),
        *("resume stage 0", "submit r2 len=9", "run until idle", "advance 1s"),
    )
    assert world.controller.settled


def test_violation_is_found_when_a_core_publishes_what_was_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a whole prompt is published with its first wave."""
    honest = BlockCache.publish
    monkeypatch.setattr(
        BlockCache, "publish", lambda self, key, tokens: honest(self, key, self._ledger.hold(key).prompt_tokens)
    )
    world = serving()
    submit(world, "r1", 900)
    world.run(lambda: world.stages[2].executor.executing == 1, 5.0)
    world.clients.cancel(RequestId("r1"))
    world.run(lambda: world.idle, 60.0)
    submit(world, "r2", 900)
    with pytest.raises(Violation, match="I3"):
        world.run(lambda: world.idle, 60.0)


def test_violation_is_found_when_a_hold_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockCache, "release", lambda self, key: None)
    world = serving()
    submit(world, "r1", 100)
    with pytest.raises(Violation, match=r"core: s0: |I2: stage 0 still holds"):
        settle(world)


def test_script_error_names_its_line_when_an_expectation_fails() -> None:
    with pytest.raises(ScriptError, match="line 4: expect r1 CANCELLED: r1 is finished"):
        play("cluster pools=8,8\nsubmit r1 len=10\nrun until idle\nexpect r1 CANCELLED\n")


@pytest.mark.parametrize("line", ["dance", "cluster pools=x", "cluster silence=1", "submit r1 len=3 text=a*9"])
def test_script_error_is_raised_when_a_command_makes_no_sense(line: str) -> None:
    with pytest.raises(ScriptError, match="line 2"):
        play(f"# x\n{line}\n")


def test_every_option_of_the_command_has_its_twin() -> None:
    group = typer.main.get_command(command)
    assert isinstance(group, typer.core.TyperGroup)
    options = [option for made in group.commands.values() for option in made.params if option.opts[0].startswith("--")]
    twins = ["WAVEPP_" + option.opts[0].removeprefix("--").replace("-", "_").upper() for option in options]
    assert [option.envvar for option in options] == twins
    assert len(twins) >= 5


def test_command_reports_a_clean_exploration() -> None:
    result = CliRunner().invoke(command, ["faults", "--seeds", "2", "--requests", "5"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("2 seeds, ")


def test_command_totals_can_be_read_by_a_program() -> None:
    result = CliRunner().invoke(command, ["faults", "--seeds", "1", "--requests", "3", "--json"])
    totals = json.loads(result.output)
    assert (totals["seeds"], totals["violations"]) == (1, 0)
    assert sum(totals["outcomes"].values()) == totals["requests"] >= 3


def test_command_ends_1_with_the_seed_when_an_invariant_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockCache, "release", lambda self, key: None)
    result = CliRunner().invoke(command, ["faults", "--first-seed", "5", "--seeds", "1"])
    assert result.exit_code == 1
    assert "seed 5: " in result.output
    assert "wavepp simulate faults --first-seed 5 --seeds 1 --requests 25" in result.output
