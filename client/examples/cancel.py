"""Two ways to stop: leave the stream, or cancel by id from anywhere. Nothing stays held on any stage."""

import asyncio

import wavepp


async def main() -> None:
    async with wavepp.AsyncClient() as client:
        async with client.stream([1] * 1000) as stream:
            print(f"left after {type(await anext(stream)).__name__}")

        stream = client.stream([1] * 1000)
        try:
            async for _ in stream:
                await client.cancel(stream.request_id)
            print("finished before it could be cancelled")
        except wavepp.errors.Cancelled as error:
            print(f"cancelled: {error}")


asyncio.run(main())
