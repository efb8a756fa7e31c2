"""Model families that Megatron-core trains: one file for each, found by `family.family_of`."""
