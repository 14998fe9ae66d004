"""Every story in this folder, played in virtual time by both real cores, against its golden text.

Invariants are checked after every event. Bounds such as "lost within 2 s" are `expect` lines in the
stories: they hold whatever the golden output says.
"""

from pathlib import Path

import pytest

from wavepp_simulator.script import ScriptError, play

STORIES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("story", STORIES, ids=lambda path: path.stem)
def test_story_is_told_as_written(story: Path, rewrite: bool) -> None:
    written = story.read_text()
    try:
        told = play(written)
    except ScriptError as error:
        pytest.fail(error.text, pytrace=False)
    if rewrite and told != written:
        story.write_text(told)
        return
    assert told.splitlines() == written.splitlines()


def test_every_story_says_what_it_proves() -> None:
    assert [path.stem for path in STORIES if not path.read_text().startswith("# ")] == []


def test_a_story_is_the_same_when_played_twice() -> None:
    text = STORIES[0].read_text()
    assert play(text) == play(text)
