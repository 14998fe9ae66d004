"""The shortest use: one prompt in, its first token out."""

import os

import wavepp

with wavepp.Client(os.environ.get("WAVEPP_CONTROLLER", "127.0.0.1:7411")) as client:
    result = client.prefill("The capital of France is")
    print(f"{result.first_text!r}: {result.cached_tokens} of {result.prompt_tokens} tokens were reused")
