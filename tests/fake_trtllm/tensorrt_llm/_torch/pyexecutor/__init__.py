"""The executor and its parts."""
