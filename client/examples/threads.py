"""A blocking client shared by threads: one channel, one retry budget."""

from concurrent.futures import ThreadPoolExecutor

import wavepp

with (
    wavepp.Client(deadline=30) as client,
    ThreadPoolExecutor(4) as threads,
):
    prompts = [list(range(1, 100 + number)) for number in range(4)]
    for result in threads.map(client.prefill, prompts):
        print(f"{result.prompt_tokens} tokens: first token {result.first_token} in {result.elapsed_ms:.1f} ms")
