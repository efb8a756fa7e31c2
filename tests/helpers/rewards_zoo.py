"""Typical user reward functions. This module has few imports, since reward worker processes load it."""

from __future__ import annotations

import asyncio
import time


async def reward_group(args, samples, **kwargs):
    return [float(i) for i, _ in enumerate(samples)]


def reward_that_raises_at_times(args, sample, **kwargs):
    if sample.index % 4 == 0:
        raise ZeroDivisionError("verifier")
    return float(sample.index % 2)


async def reward_in_thousands(args, sample, **kwargs):
    return 10_000.0 * (sample.index % 2)


async def reward_of_index(args, sample, **kwargs):
    return float(sample.index % 2)


def reward_that_waits_for_a_server(args, sample, **kwargs):
    time.sleep(0.07)
    return float(sample.index % 2)


async def reward_that_awaits_a_server(args, sample, **kwargs):
    await asyncio.sleep(0.07)
    return float(sample.index % 2)


async def reward_of_0(args, sample, **kwargs):
    return 0.0
