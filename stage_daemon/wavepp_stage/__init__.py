"""Stage daemon of WavePP (DESIGN.md)."""
