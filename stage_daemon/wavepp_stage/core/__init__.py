"""Pure stage daemon: cache, holds and wave order."""
