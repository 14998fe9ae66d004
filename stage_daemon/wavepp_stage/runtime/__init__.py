"""asyncio, gRPC and threads around the stage core and its engine."""
