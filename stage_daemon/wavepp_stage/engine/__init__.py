"""Stage engines and activation links."""
