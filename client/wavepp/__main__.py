"""The `wavepp` command, from the first moment.

Owns what Ctrl-C does while modules are loaded (half a second): it ends the process with status 130 and no word.
Hence nothing heavy is imported above. The commands are in `commands/gathered.py`.
"""

from __future__ import annotations

import os
import signal

_INTERRUPTED = 130
"""As `process.EXIT_INTERRUPTED`, which would bring in asyncio."""


def main() -> None:
    """Run the command that the process's arguments name, then exit."""
    # gRPC writes raw lines of its own beside the one that says what is wrong, nine for a wrong CA.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Not by KeyboardInterrupt: imports run callbacks that print one and go on. Ignored signals (nohup) stay so.
    watched = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if watched:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from wavepp.commands.gathered import build_app
    from wavepp_proto.runtime.command_line import run_app

    app = build_app()
    if watched:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_app(app)


if __name__ == "__main__":
    main()
