"""Device profiles that ship with WavePP, as JSON files beside this one, each with its provenance.

Owns finding them. A stage is given the file (`wavepp profile path NAME`), not the name: it does not know this package.
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


def load(profile: str) -> Profile:
    """By name or path. Raises InvalidRequest naming what is wrong."""
    try:
        return Profile.from_json(path_of(profile).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {profile}: {error}", field="profile", value=profile) from error
