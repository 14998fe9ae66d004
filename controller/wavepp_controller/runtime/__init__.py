"""asyncio, gRPC and etcd around the controller core."""
