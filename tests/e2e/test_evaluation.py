"""Evaluation sets with separate prompts, sampling and rewards, during training or alone."""

from __future__ import annotations

import pytest
import yaml

from furlong.files.sample_file import load_samples
from furlong.models.tokenizer import load_tokenizer
from runs import flags, is_finite, reproducible, rows, train, write_prompts


@pytest.fixture
def files(tmp_path):
    return (
        write_prompts(tmp_path / "train.jsonl"),
        write_prompts(tmp_path / "a.jsonl", 5),
        write_prompts(tmp_path / "b.jsonl", 3),
    )


def test_sets_are_scored_by_interval_with_pass_at_k(model, files, tmp_path):
    data, a, b = files
    train(
        flags(
            model, data, tmp_path / "run", num_rollout=3, eval_prompt_data=["a", a, "b", b], eval_interval=2,
            n_samples_per_eval_prompt=4, log_passrate=True,
        )
    )  # fmt: skip
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found if "eval/a" in row] == [0, 2, 3]
    assert all(is_finite(row) for row in found)
    names = {name for name in found[0] if name.startswith("eval/")}
    assert {"eval/a", "eval/b", "eval/a-pass@1", "eval/a-pass@2", "eval/a-pass@4", "eval/b-truncated_ratio"} <= names
    assert found[0]["eval/a-pass@1"] == pytest.approx(found[0]["eval/a"])
    assert "passrate/pass@4" in found[1]


def test_sampling_of_evaluations_is_their_own(model, files, tmp_path):
    data, a, _ = files
    train(
        flags(
            model, data, tmp_path / "run", num_rollout=1, eval_prompt_data=["a", a], eval_interval=1,
            n_samples_per_eval_prompt=2, eval_temperature=0, eval_max_response_len=3,
            save_debug_rollout_data=tmp_path / "dump_{rollout_id}",
        )
    )  # fmt: skip
    groups = load_samples(tmp_path / "dump_eval_0").groups
    assert all(one.tokens == two.tokens for one, two in (group.samples for group in groups))  # greedy
    assert max(s.response_length for group in groups for s in group.samples) == 3
    assert rows(tmp_path / "run")[1]["rollout/response_len/max"] == 8


def test_file_of_sets_gives_each_its_own_settings(model, files, tmp_path):
    data, a, b = files
    config = {
        "eval": {
            "defaults": {"n_samples_per_eval_prompt": 2, "rm_type": "random"},
            "datasets": [
                {"name": "a", "path": str(a), "max_response_len": 2},
                {"name": "b", "path": f"{b}@[0:2]", "rm_type": "math", "n_samples_per_eval_prompt": 1},
            ],
        }
    }
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(config))
    train(
        flags(
            model, data, tmp_path / "run", num_rollout=1, eval_config=tmp_path / "eval.yaml", eval_interval=1,
            save_debug_rollout_data=tmp_path / "dump_{rollout_id}",
        )
    )  # fmt: skip
    dump = load_samples(tmp_path / "dump_eval_1")
    assert dump.names == ["a"] * 5 + ["b"] * 2
    assert [len(group) for group in dump.groups] == [2] * 5 + [1] * 2
    assert max(s.response_length for group in dump.groups[:5] for s in group.samples) == 2
    found = rows(tmp_path / "run")[0]
    assert found["eval/b"] == 0
    assert "eval/b-pass@1" not in found


def test_zero_rollouts_only_evaluate(model, files, tmp_path):
    _, a, _ = files
    argv = flags(model, None, tmp_path / "run", num_rollout=0, eval_prompt_data=["a", a], eval_interval=1)
    assert train(argv) == 0
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == [0]
    assert "eval/a" in found[0]


def test_first_evaluation_can_be_left_out(model, files, tmp_path):
    data, a, _ = files
    train(
        flags(
            model, data, tmp_path / "run", num_rollout=2, eval_prompt_data=["a", a], eval_interval=1,
            skip_eval_before_train=True,
        )
    )  # fmt: skip
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


def test_evaluation_does_not_change_training(model, files, tmp_path):
    data, a, _ = files

    def run(name, **changes):
        train(flags(model, data, tmp_path / name, num_rollout=3, **changes))
        found = [row for row in rows(tmp_path / name) if row["step"]]
        return [{k: v for k, v in reproducible(row).items() if not k.startswith("eval/")} for row in found]

    evaluated = {"eval_prompt_data": ["a", a], "eval_interval": 1}
    assert run("plain") == run("evaluated", **evaluated)
    assert run("ahead", async_buffer_size=1) == run("ahead_evaluated", async_buffer_size=1, **evaluated)


@pytest.mark.parametrize("changes", [{"async_buffer_size": 1}, {"async_buffer_size": 2, "update_weights_interval": 2}])
def test_evaluation_during_training_uses_the_weights_of_its_step(changes, model, files, tmp_path):
    data, a, _ = files
    train(
        flags(
            model, data, tmp_path / "run", num_rollout=4, eval_prompt_data=["a", a], eval_interval=2,
            save_debug_rollout_data=tmp_path / "dump_{rollout_id}", **changes,
        )
    )  # fmt: skip
    for step in (0, 2, 4):
        samples = [s for group in load_samples(tmp_path / f"dump_eval_{step}").groups for s in group.samples]
        assert {version for s in samples for version in s.token_versions} == {step}
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2, 3, 4]


def test_text_of_an_evaluation_keeps_special_tokens_as_in_training(model, files, tmp_path):
    data, a, _ = files
    train(
        flags(
            model, data, tmp_path / "run", num_rollout=1, eval_prompt_data=["a", a], eval_interval=1,
            n_samples_per_eval_prompt=8, save_debug_rollout_data=tmp_path / "{rollout_id}.safetensors",
        )
    )  # fmt: skip
    tokenizer = load_tokenizer(model)
    for name in ("0", "eval_0"):
        samples = [s for group in load_samples(tmp_path / f"{name}.safetensors").groups for s in group.samples]
        for s in samples:
            response = s.tokens[-s.response_length :] if s.response_length else []
            assert s.response == tokenizer.decode(response, skip_special_tokens=False)
        assert any("<|" in s.response for s in samples)
