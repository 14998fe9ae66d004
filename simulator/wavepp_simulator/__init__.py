"""Virtual-time simulator of WavePP (DESIGN.md section 3)."""
