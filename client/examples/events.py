"""One request as it happens: where it waits, what the stages agreed on, how far it is."""

import asyncio

import wavepp


async def main() -> None:
    async with (
        wavepp.AsyncClient() as client,
        client.stream([1] * 1000, priority=3, deadline=30) as stream,
    ):
        print(f"request {stream.request_id}, trace {stream.trace_id}")
        async for event in stream:
            match event:
                case wavepp.Queued():
                    print(f"queued behind {event.position} requests")
                case wavepp.Admitted():
                    limit = "no stage" if event.limiting_stage is None else f"stage {event.limiting_stage}"
                    print(f"admitted: {event.endpoint} tokens reused, limited by {limit}")
                case wavepp.Progress():
                    print(f"{event.computed_tokens} of {event.prompt_tokens} tokens")
                case wavepp.Finished():
                    print(f"first token {event.first_token} after {event.waves} waves")


asyncio.run(main())
