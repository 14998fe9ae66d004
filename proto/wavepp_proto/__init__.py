"""The contract of WavePP: messages, words, errors, limits and the rules both sides share."""

__version__ = "0.1.0"

import os

# Read by gRPC when it is first imported: its fork handlers give up where its threads are at work, and leave the child
# to crash. Without them a forked child runs, and `runtime.channels` refuses gRPC in it by name (grpc#13464).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
