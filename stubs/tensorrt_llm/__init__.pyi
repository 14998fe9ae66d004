# Written by hand, from public documentation and source: only what wavepp's adapter touches.
__version__: str
