"""Subcommands of `wavepp` that belong to the client package."""
