"""Offline tools: memory plan, bundles, run comparison, and checks of templates, rewards and weights."""
