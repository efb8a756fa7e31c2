"""The HTTP server of sessions, in its own process, so that no client can hold the event loop of the run."""
