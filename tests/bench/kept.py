"""Results of benches that are kept between runs, one JSON file each.

Owns that a file is there whole or not at all, whenever its writer is killed, and that one which is damaged all the same
is told of and measured again. What is in it is its bench's. Called by `paper`, `paper_real_all` and `bars`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Kept = dict[str, Any]


def read_kept(path: Path, *needed: str) -> Kept | None:
    """None if there is none, or none with all of `needed`."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        found = error
    if isinstance(found, dict) and found.keys() >= set(needed):
        return found
    print(f"{path} is damaged and counts as not measured: {found}"[:200], file=sys.stderr)
    return None


def write_kept(path: Path, result: Mapping[str, Any], indent: int | None = None) -> None:
    """All of it, or nothing."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=indent))
    os.replace(partial, path)
