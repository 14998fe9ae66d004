"""`wavepp bench`: load on a running pipeline, and what came of it.

Speaks to the pipeline through the public SDK alone, so that any engine on any hosts can be measured. Which prompts
are asked is `wavepp_proto.workload`'s to say; `cells.py` names what is measured, `run.py` measures it, one cell
after the other, `report.py` and `plots.py` show it. Started by `commands/bench.py`.
"""
