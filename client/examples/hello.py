"""The shortest use: one prompt in, its first token out."""

import wavepp

with wavepp.Client() as client:
    result = client.prefill("The capital of France is")
    print(f"{result.first_text!r}: {result.cached_tokens} of {result.prompt_tokens} tokens were reused")
