"""Exchange with Megatron-LM: its checkpoints (torch_dist) are read, resumed from and written. See README.md."""
