"""Controller of WavePP (DESIGN.md)."""
