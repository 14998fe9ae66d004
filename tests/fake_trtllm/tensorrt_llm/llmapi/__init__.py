"""The user's configuration."""
