"""What a machine lacks for the trtllm engine: `python -m wavepp_stage.engine.trtllm`, for `wavepp doctor`.

Prints a JSON list of findings and nothing else: what the package prints goes to stderr. A process of its own, because
importing TensorRT-LLM takes long and may end the interpreter; the SDK, which asks for it, imports no stage code.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from wavepp_stage.engine.trtllm.inspection import inspect_machine


def main() -> None:
    # Native code writes to descriptor 1 itself, and child processes inherit it: the answer has a descriptor of its own.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        answer.write(json.dumps([asdict(finding) for finding in inspect_machine()], allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
