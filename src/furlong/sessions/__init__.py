"""Sessions: conversations of an agent with the policy, as a tree of the exact token ids that the engine sampled."""
