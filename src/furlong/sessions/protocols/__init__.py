"""Protocols of sessions: each reads a request to a `ClientCall`, and writes the replies, whole or as a stream."""
