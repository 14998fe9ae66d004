"""Shell pieces that both sides share: channels, membership store, tracing, logs."""
