"""Procedural tasks as prompt data: equal rows for equal settings, mixtures by weight, resumed streams, and errors."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.config.task_specs import TaskMixture, TaskSpec, parse_tasks, tasks_problem
from furlong.core.task_entries import ROWS_PER_SEED
from furlong.data.dataset import open_prompts
from furlong.data.prompt import PromptFormat
from furlong.rewards.verifiers import answers_from, task_score

FORMAT = PromptFormat(input_key="question", label_key="answer")
NAMES = ("chain_sum", "letter_counting", "gcd", "spell_backward", "leg_counting", "countdown")


def prompts_of(text: str, *, streaming: bool = False, prompt_format: PromptFormat = FORMAT) -> Any:
    return open_prompts(text, tokenizer=None, prompt_format=prompt_format, streaming=streaming, shuffle_buffer_size=4)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_the_package_s_and_its_answers_score_one(name: str) -> None:
    from reasoning_gym import create_dataset

    source = prompts_of(f"reasoning-gym:{name}?size=3&seed=7")
    source.begin(None)
    expected = create_dataset(name, size=3, seed=7 * ROWS_PER_SEED)
    rows = source.take(5)
    assert len(rows) == 3
    for row, entry in zip(rows, expected, strict=True):
        assert (row.text, row.label) == (entry["question"], entry["answer"])
        metadata = json.loads(json.dumps(row.metadata))  # as a dump stores it
        assert task_score(f"I think.\n<answer>{entry['answer']}</answer>", row.label, metadata) == 1.0
        assert task_score("<answer>nonsense 123456</answer>", row.label, metadata) < 0.2
        assert task_score("", row.label, metadata) == 0.0


@pytest.mark.parametrize("name", ["spell_backward", "countdown"])
def test_rows_of_two_seeds_differ(name: str) -> None:
    texts: list[set[str]] = []
    for seed in (0, 1):
        source = prompts_of(f"reasoning-gym:{name}?size=20&seed={seed}")
        source.begin(None)
        texts.append({row.text for row in source.take(20)})
    assert len(texts[0] & texts[1]) < 5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 40))
def test_a_mixture_has_the_shares_of_its_weights_at_every_row(weights: list[int], size: int) -> None:
    mixture = TaskMixture(tuple(TaskSpec(str(i), {}, weight) for i, weight in enumerate(weights)), size)
    counts: Counter[str] = Counter()
    for row in range(size):
        task, index = mixture.row(row)
        assert index == counts[task.name]  # every row of a task once, in order
        counts[task.name] += 1
        for i, weight in enumerate(weights):
            assert abs(counts[str(i)] - weight * (row + 1) / sum(weights)) < len(weights)


def test_a_stream_continues_where_it_was() -> None:
    text = "reasoning-gym:gcd?size=11&weight=2+chain_sum?seed=3"
    whole, first, second = (prompts_of(text, streaming=True) for _ in range(3))
    whole.begin(5)
    first.begin(5)
    rows = [(row.row, row.text, row.metadata) for row in whole.take(20)]
    taken = [(row.row, row.text, row.metadata) for row in first.take(6)]
    second.seek(5, json.loads(json.dumps(first.position())))
    assert taken + [(row.row, row.text, row.metadata) for row in second.take(20)] == rows
    assert sorted(row for row, _, _ in rows) == list(range(11))
    assert whole.settings() == second.settings()
    assert whole.settings() != prompts_of(text.replace("seed=3", "seed=4"), streaming=True).settings()


def test_a_slice_and_a_system_prompt() -> None:
    source = prompts_of(
        "reasoning-gym:gcd?size=9&system_prompt=direct@[2:4]",
        prompt_format=PromptFormat(input_key="question", keep_messages=True),
    )
    source.begin(None)
    rows = source.take(9)
    assert [row.row for row in rows] == [2, 3]
    assert [message["role"] for message in rows[0].text] == ["system", "user"]
    assert "<answer>" in rows[0].text[0]["content"]


def test_a_wrong_task_is_named_with_the_reason() -> None:
    for text, words in [
        ("chain_summ", "did you mean chain_sum"),
        ("", "nothing is not a task"),
        ("gcd+", "nothing is not a task"),
        ("gcd?min_number=2", "did you mean min_numbers"),
        ("gcd?min_numbers=two", "min_numbers=two is not a value of type"),
        ("gcd?min_numbers=2.5", "min_numbers=2.5 is not a value of type"),
        ("gcd?min_numbers=9", "change the options"),
        ("gcd?min_numbers", "key=value"),
        ("gcd?size=0", "size=0 must be a whole number"),
        ("gcd?size=-4", "size=-4 must be a whole number"),
        ("gcd?weight=0", "weight=0 must be a whole number"),
        ("gcd?seed=1+chain_sum?seed=2", "seed is given twice, 1 and 2"),
        ("gcd+gcd?weight=2", "twice with equal options"),
        ("gcd?system_prompt=mine", "system_prompt=mine is not one of"),
    ]:
        problem = tasks_problem("--prompt-data", f"reasoning-gym:{text}")
        assert problem is not None
        assert words in problem
        assert problem.startswith("--prompt-data reasoning-gym:")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "furlong.config.task_specs.find_spec", lambda name: None if name == "reasoning_gym" else find_spec(name)
    )
    parse_tasks.cache_clear()
    assert "furlong-rl[reasoning-gym]" in str(tasks_problem("--prompt-data", "reasoning-gym:gcd"))
    parse_tasks.cache_clear()


def test_answers_are_read_from_tags_boxes_or_the_end() -> None:
    for response, answers in [
        ("<think>1 or 2</think> <answer>3</answer> or <answer> 4 </answer>", ["4"]),
        ("so \\boxed{4}.", ["4"]),
        ("<think><answer>1</answer></think>\nThe sum:\n is **12**.", ["The sum:\n is **12**.", "is **12**.", "12"]),
        ("<think>never ends", ["<think>never ends", "ends"]),
        ("", []),
    ]:
        assert answers_from(response) == answers


def test_a_row_of_other_data_is_named() -> None:
    with pytest.raises(Exception, match="not of a task of reasoning-gym"):
        task_score("4", "4", {"index": 3})
