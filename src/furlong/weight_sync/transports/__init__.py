"""The weight transports. `core.transports` has a row for each."""
