"""Controller of WavePP (DESIGN.md section 3)."""
