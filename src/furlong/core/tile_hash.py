"""The constants of the tiles' hash that `core.device_checksum` defines, for its two ways of computing it."""

from __future__ import annotations

TILE_WORDS = 8192
WORD = (1 << 32) - 1
FMIX = (0x85EBCA6B, 0xC2B2AE35)
SEEDS = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & WORD)
STEPS = (0x27D4EB2D, 0x165667B1)  # factors of the index
TURNS = (15, 13)  # bits by which the index is rotated
