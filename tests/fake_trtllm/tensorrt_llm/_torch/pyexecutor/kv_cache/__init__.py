"""Where the newer version has its cache managers."""

from ...._fake import knobs

if knobs.is_rc26():
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
