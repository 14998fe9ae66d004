"""The contract of WavePP: messages, words, errors, limits and the rules both sides share."""

__version__ = "0.1.0"
