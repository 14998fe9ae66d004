"""The part of the package below the executor."""
