"""Pure controller: events in, actions out."""
