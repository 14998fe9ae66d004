"""What a machine lacks for the trtllm engine: `python -m wavepp_stage.engine.trtllm`, for `wavepp doctor`.

Prints a JSON list of findings. A process of its own, because importing TensorRT-LLM takes long, prints what it likes
and may end the interpreter; the SDK, which asks for it, imports no stage code.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict

from wavepp_stage.engine.trtllm.inspection import inspect_machine


def main() -> None:
    with redirect_stdout(sys.stderr):
        findings = inspect_machine()
    print(json.dumps([asdict(finding) for finding in findings]))  # noqa: T201


if __name__ == "__main__":
    main()
