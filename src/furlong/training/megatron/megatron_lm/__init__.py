"""Megatron-LM's checkpoint format."""
