"""The HTTP server of sessions, in a process of its own, so that no client can hold the event loop of the run."""
