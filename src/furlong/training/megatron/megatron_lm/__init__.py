"""Megatron-LM's own checkpoint formats."""
