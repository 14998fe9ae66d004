"""Device profiles that ship with WavePP, as JSON files beside this one, each with its provenance.

Owns finding them. A stage is given the file, not the name, as it does not know this package: `wavepp up` puts the file
into the preset (`in_preset`), and who starts stages by hand asks `wavepp profile path NAME`.
"""

from __future__ import annotations

from pathlib import Path

from wavepp_proto.errors import InvalidRequest
from wavepp_proto.profile import Profile

FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def path_of(profile: str) -> Path:
    """The file of a profile that is named, or is a path already. Raises InvalidRequest when there is no such file."""
    shipped = FOLDER / f"{profile}.json"
    path = shipped if profile in names() else Path(profile)
    try:
        found = path.is_file()
    except OSError:  # a name longer than any file's
        found = False
    if not found:
        raise InvalidRequest(
            f"no profile {profile!r}: neither a file nor one of {', '.join(names())}", field="profile", value=profile
        )
    return path


def in_preset(model: str) -> str:
    """An `emulated:profile=NAME,...` model with the file in the name's place; anything else as it is.

    Raises InvalidRequest when there is no such profile."""
    kind, colon, settings = model.partition(":")
    if kind != "emulated" or not colon:
        return model
    parts = (part.partition("=") for part in settings.split(","))
    return "emulated:" + ",".join(
        f"{key}={path_of(value)}" if key == "profile" and value else f"{key}{equals}{value}"
        for key, equals, value in parts
    )


def load(profile: str) -> Profile:
    """By name or path. Raises InvalidRequest naming what is wrong."""
    try:
        return Profile.from_json(path_of(profile).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {profile}: {error}", field="profile", value=profile) from error
