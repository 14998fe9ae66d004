"""Stage daemon of WavePP (DESIGN.md section 3)."""
