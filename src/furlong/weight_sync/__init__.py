"""Sends weights from the trainer to the engines and verifies that they arrived. `transports/` has the ways to send."""
