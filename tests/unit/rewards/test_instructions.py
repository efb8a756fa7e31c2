"""IFBench's verifier gives the strict score of the package whose checks it calls, and names what a row lacks."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from typing import Any

import pytest

from furlong.core.sample import Sample
from furlong.errors import ConfigError, DataError, RewardError
from furlong.rewards import verifiers
from furlong.rewards.group_reward import GroupReward
from furlong.rewards.verifiers import find_verifier, ifbench_score

INSTRUCTIONS: dict[str, list[dict[str, Any]]] = {  # those that need no data of NLTK
    "count:numbers": [{"N": 2}, {"N": 3}],
    "count:conjunctions": [{"small_n": 2}],
    "format:no_whitespace": [{}, {"N": None}],
    "format:newline": [{}],
    "words:no_consecutive": [{}],
    "format:list": [{"sep": "-"}],
    "words:vowel": [{}],
    "repeat:repeat_simple": [{}],
}
WORDS = ["one", "2", "and", "but", "cat", "-", "37", "yet\n", "or", "\n", "dog", "a"]


def row(*names: str, kwargs: Any = None, prompt: str = "Write a line.") -> dict[str, Any]:
    return {"instruction_id_list": list(names), "kwargs": kwargs, "prompt_text": prompt}


def test_the_score_is_the_strict_one_of_the_package() -> None:
    from if_verifiable.common import evaluate_instructions

    rng, scores = random.Random(3), []
    for _ in range(400):
        names = rng.sample(sorted(INSTRUCTIONS), rng.randint(1, 3))
        kwargs = [rng.choice(INSTRUCTIONS[name]) for name in names]
        response = rng.choice(["", " "]).join(rng.choices(WORDS, k=rng.randint(1, 8))).strip()  # as the package does
        _, expected = evaluate_instructions(response, names, kwargs, "p", dict(verifiers.instruction_checks()))
        scores.append(ifbench_score(response, None, row(*names, kwargs=kwargs)))
        assert scores[-1] == expected.binary_strict, (names, kwargs, response)
    assert 0.1 < sum(scores) / len(scores) < 0.9


def test_an_empty_response_follows_nothing() -> None:
    assert ifbench_score(" \n", None, row("format:no_whitespace")) == 0.0


def test_a_row_without_usable_instructions_is_named() -> None:
    cases = [
        ({}, "no list of instructions"), ({"instruction_id_list": "count:numbers"}, "no list of instructions"),
        (row("count:numbers", kwargs=[{}, {}]), "1 instructions and kwargs"),
        (row("count:numbers", kwargs=[3]), "1 instructions and kwargs"),
        (row("count:nonsense"), "'count:nonsense' is not one of"),
    ]  # fmt: skip
    for metadata, words in cases:
        with pytest.raises(DataError, match=words):
            ifbench_score("a", None, metadata)


def test_missing_data_of_nltk_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    class Check:
        def __init__(self, name: str) -> None: ...
        def build_description(self, **_: Any) -> None: ...
        def get_instruction_args(self) -> None: ...
        def check_following(self, response: str) -> bool:
            raise LookupError("Resource punkt_tab not found. Please use the NLTK Downloader")

    monkeypatch.setattr(verifiers, "instruction_checks", lambda: {"x": Check})
    with pytest.raises(RewardError, match=r"nltk\.downloader"):
        ifbench_score("a", None, row("x"))


def test_a_run_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find_verifier.cache_clear()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "furlong.config.checks.value_checks.find_spec",
        lambda name: None if name == "if_verifiable" else find_spec(name),
    )
    with pytest.raises(ConfigError, match="furlong-rl\\[ifbench\\]"):
        find_verifier("ifbench")
    find_verifier.cache_clear()


def test_the_sandbox_receives_the_row() -> None:
    async def run() -> list[Any]:
        reward = GroupReward(rm_type="ifbench", num_workers=1)
        try:
            samples = [
                Sample(index=i, response=text, label="", metadata=row("format:no_whitespace"))
                for i, text in enumerate(["ab", "a b"])
            ]
            return [outcome.reward for outcome in await reward(samples)]
        finally:
            await reward.close()

    assert asyncio.run(run()) == [1.0, 0.0]
