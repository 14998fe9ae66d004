"""Settings of an emulated model, `key=value,...`: their names, forms and ranges.

Owns the check that stages and `wavepp up` share, so that a preset which every stage would refuse starts no process.
What the values do is the emulated engine's business. Reads no profile: that is a file of the stage's host.
"""

from __future__ import annotations

import math
from typing import Any

from wavepp_proto import limits
from wavepp_proto.errors import WaveppError
from wavepp_proto.profile import MAX_LAYERS

_COUNTS = {
    "layers": (1, MAX_LAYERS),
    "attention_every": (0, MAX_LAYERS),
    "vocabulary": (2, limits.MAX_VOCABULARY),
    "window": (1, limits.MAX_PROMPT_TOKENS),
    "nan_token": (0, limits.MAX_VOCABULARY - 1),
    "nan_layer": (0, MAX_LAYERS - 1),
}
_TIMES = frozenset({"token_us", "wave_us", "copy_us"})
_WITH_PROFILE = frozenset({"profile", "vocabulary", "speedup", "cache_thread", "hang"})
_KNOWN = frozenset({*_COUNTS, *_TIMES, *_WITH_PROFILE})
_MAX_DIGITS = 20
"""More are beyond every range, and Python converts no number of thousands."""


def values_of(settings: str, refused: type[WaveppError]) -> dict[str, Any]:
    """Every setting as a value of its type; empty text has none. Raises `refused` naming the key, its value and the
    limit."""
    texts: dict[str, str] = {}
    for setting in settings.split(",") if settings else ():
        key, equals, value = setting.partition("=")
        if key not in _KNOWN:
            known = ", ".join(sorted(_KNOWN))
            raise refused(f"unknown setting {key!r} of an emulated model; known: {known}", field=key, value=value)
        if not equals or key in texts:
            raise refused(f"{key} needs exactly one value", field=key, value=value)
        texts[key] = value
    for key in texts if "profile" in texts else ():
        if key not in _WITH_PROFILE:
            raise refused(f"the profile says {key}: leave it out", field=key, value=texts[key])
    return {key: _value(key, value, refused) for key, value in texts.items()}


def _value(key: str, value: str, refused: type[WaveppError]) -> Any:
    if key in _COUNTS:
        return _count(key, value, refused)
    if key in _TIMES:
        micros = _number(value)
        if not 0.0 <= micros < math.inf:
            raise refused(f"{key} must be microseconds, 0 or more, not {value!r}", field=key, value=value, limit=0)
        return micros
    if key == "speedup":
        factor = _number(value)
        if not 0.0 < factor < math.inf:
            raise refused(f"{key} must be a number above 0, not {value!r}", field=key, value=value, limit=0)
        return factor
    if key == "cache_thread" and value not in ("any", "engine"):
        raise refused(f"{key} must be any or engine, not {value!r}", field=key, value=value, limit="any engine")
    return value


def _count(key: str, value: str, refused: type[WaveppError]) -> int:
    low, high = _COUNTS[key]
    plain = value.isascii() and value.isdecimal() and len(value.lstrip("0")) <= _MAX_DIGITS
    if not (plain and low <= int(value) <= high):
        message = f"{key} must be a whole number from {low} to {high}, not {value!r}"
        raise refused(message, field=key, value=value, limit=high)
    return int(value)


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan
