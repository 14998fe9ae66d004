"""Many prompts at once: outcomes in the order they complete, an error is the outcome of its own prompt."""

import asyncio

import wavepp


async def main() -> None:
    shared = list(range(1, 129))
    prompts = [[*shared, 200 + number] for number in range(6)] + [[]]
    async with wavepp.AsyncClient() as client:
        async for outcome in client.prefill_many(prompts, concurrency=4, deadline=30):
            if outcome.result:
                print(f"prompt {outcome.index}: {outcome.result.cached_tokens} tokens reused")
            else:
                print(f"prompt {outcome.index}: {outcome.error}")


asyncio.run(main())
