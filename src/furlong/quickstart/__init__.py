"""The quickstart: reinforcement learning teaches a tiny model to carry when adding numbers, on a CPU."""
