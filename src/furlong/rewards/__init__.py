"""Verifiers, custom reward functions, and the sandbox that limits the time and memory of user code."""
