"""Offline tools: memory plan, bundles, comparisons, and tests of templates, rewards and weights."""
