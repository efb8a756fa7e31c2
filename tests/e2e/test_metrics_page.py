"""docs/reference/metrics.md describes every metric that runs record and that the code names."""

from __future__ import annotations

import ast
import re

import pytest

from runs import REPOSITORY, flags, rows, train, write_model, write_prompts

PAGE = REPOSITORY / "docs" / "reference" / "metrics.md"
PACKAGES = ("algo", "inference", "loop", "rollout", "training", "weight_sync", "wiring", "diagnosis/self_test.py")
SOURCES = [REPOSITORY / "src" / "furlong" / name for name in PACKAGES]
SECTIONS = ("rollout", "train", "perf", "eval", "passrate", "multi_turn", "engine", "memory", "selftest", "diagnosis")
NAME = re.compile(rf"({'|'.join(SECTIONS)})/[\w./@-]*\w(?<!_)")
PLACEHOLDERS = {r"<\w+>": r"[\\w.-]+", r"\bNAME\b": r"[\\w.-]+", r"\bID\b": r"[A-Z]+\\d+", r"@k\b": r"@\\d+"}


def described() -> list[re.Pattern[str]]:
    """Return a pattern for each name in the first column of the page's tables.

    `response_len/mean`, `max` in one cell are `response_len/mean` and `response_len/max`.
    """
    section, patterns = "", list[re.Pattern[str]]()
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = re.fullmatch(r"## `(\w+)/`", line)
            section = f"{heading[1]}/" if heading else ""
        if line.startswith("| `"):
            folder = ""
            for name in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                folder = name.rpartition("/")[0] if "/" in name else folder
                patterns.append(_pattern(section + (name if "/" in name or not folder else f"{folder}/{name}")))
    return patterns


def _pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name).replace(r"\*", r"[\w.-]+")
    for placeholder, pattern in PLACEHOLDERS.items():
        text = re.sub(placeholder, pattern, text)
    return re.compile(text)


def missing(names: set[str]) -> list[str]:
    patterns = described()
    return sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in patterns))


def test_a_name_that_is_not_on_the_page_is_noticed():
    names = {"rollout/response_len/median", "rollout/zero_std/count_0.5", "eval/held_out-pass@4", "diagnosis/REW02"}
    assert missing(names) == []
    assert missing({"rollout/nothing", "perf/median", "eval/held_out-pass@k"}) == [
        "eval/held_out-pass@k",
        "perf/median",
        "rollout/nothing",
    ]


def test_every_name_in_the_code_is_on_the_page():
    files = [file for source in SOURCES for file in ([source] if source.is_file() else source.rglob("*.py"))]
    names = {
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value)
    }
    assert len(names) > 30
    # prefixes of names, which the runs below complete
    assert missing(names) == ["perf/non_generation_time", "rollout/correct_response_len", "rollout/error_cat"]


RUNS = {
    "RL": {
        "use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01, "num_steps_per_rollout": 2,
        "ref_update_interval": 1, "use_tis": True, "tis_veto": 0.01, "use_opsm": True, "advantage_estimator": "grpo",
        "log_passrate": True, "log_multi_turn": True, "log_correct_samples": True, "async_buffer_size": 1,
        "eval_interval": 1, "n_samples_per_eval_prompt": 2, "rollout_max_context_len": 24,
    },
    "generate function": {
        "log_multi_turn": True, "log_reward_category": "kind", "reward_key": "score", "rm_type": None,
        "over_sampling_batch_size": 8, "partial_rollout": True,
    },
    "SFT": {
        "loss_type": "sft_loss", "rm_type": None, "n_samples_per_prompt": 1,
        "input_key": "messages", "label_key": None,
    },
    "servers": {"rollout_num_gpus": 2},
}  # fmt: skip
FUNCTIONS = """
from furlong import policy

async def generate(args, sample, sampling_params):
    turn = await policy().generate(sample.tokens, **sampling_params)
    if turn.finish_reason == "abort":
        sample.status = sample.Status.ABORTED
        return sample
    sample.append_response_tokens(tokens=turn.tokens, log_probs=turn.log_probs, text=turn.text, version=turn.versions)
    sample.metadata["round_number"] = 1
    sample.non_generation_time = 0.5
    sample.reward = {"score": float(sample.index % 2), "kind": "odd" if sample.index % 2 else "even"}
    return sample
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_every_metric_of_a_run_is_on_the_page(name, engines, tmp_path):
    changes = dict(RUNS[name])
    model, data = write_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl")
    if name == "RL":
        changes["eval_prompt_data"] = ["held_out", f"{data}@[0:4]"]
    if name == "generate function":
        (tmp_path / "functions.py").write_text(FUNCTIONS)
        changes["custom_generate_function_path"] = f"{tmp_path}/functions.py:generate"
    if name == "SFT":
        data = tmp_path / "chats.jsonl"
        data.write_text(
            '{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}\n' * 8
        )
    train(flags(model, data, tmp_path / "run", **changes))
    names = {name for row in rows(tmp_path / "run") for name in row} - {"step"}
    assert len(names) > 15
    assert missing(names) == []
