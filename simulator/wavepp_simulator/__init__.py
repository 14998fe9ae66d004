"""Virtual-time simulator of WavePP (DESIGN.md)."""
