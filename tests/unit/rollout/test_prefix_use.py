"""Prompt tokens that turns repeat, and those of them that the engine had cached."""

from __future__ import annotations

from furlong.core.metric import values
from furlong.interfaces import Completion
from furlong.rollout.episode_load import EpisodeLoad
from furlong.rollout.prefix_use import PrefixUse


def answer(version: int, cached: int, end: int | None = None) -> Completion:
    return Completion([7], [-1.0], [version if end is None else end], "stop", cached_tokens=cached)


def test_turns_repeat_the_prompt_before_under_the_same_weights():
    use = PrefixUse()
    assert use.add([1, 2, 3], answer(4, 0)) == (0, 0)
    assert use.add([1, 2, 3, 7, 8], answer(4, 3)) == (3, 3)
    assert use.add([1, 2, 3, 7, 8, 9], answer(5, 0)) == (0, 0)  # new weights
    assert use.add([1, 2, 3, 7, 8, 9, 10], answer(5, 2)) == (6, 2)
    assert (use.repeated, use.cached) == (9, 5)


def test_branches_repeat_the_prompt_that_shares_most():
    use = PrefixUse()
    use.add([1, 2, 3, 4], answer(0, 0))
    assert use.add([1, 9, 9], answer(0, 1)) == (1, 1)
    assert use.add([1, 2, 3, 4, 5], answer(0, 4)) == (4, 4)
    assert use.add([1, 9, 9, 9], answer(0, 3)) == (3, 3)
    assert use.add([1, 9, 9, 9], answer(0, 4)) == (3, 3)  # the last token is computed for its logits
    assert use.add([2], Completion([], [], [], "abort")) == (0, 0)


def test_the_fraction_is_that_of_all_episodes_since_the_last_step():
    load = EpisodeLoad()
    load.prefixes(10, 10)
    load.prefixes(30, 0)
    assert values(load.take())["rollout/prefix_cache_hit_frac"] == 0.25
    assert "rollout/prefix_cache_hit_frac" not in load.take()
