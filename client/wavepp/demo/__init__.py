"""The demo: a real model split over stage daemons, every answer compared with the unsplit model.

`python -m wavepp.demo` (scripts/demo) is its only caller. `story.py` is the order of things; the other
modules own one part each and know nothing of each other: the model folder, the prompts, the pool
sizes, the unsplit model, the verdict. torch and transformers are loaded in child processes only, so
that the process that drives the cluster takes no time from the stages.
"""
