"""Teachers that score samples during the rollout, in whole runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from furlong.errors import ConfigError, RolloutError
from furlong.files.batch_file import load_batch
from furlong.files.sample_file import load_samples
from furlong.models.tokenizer import load_tokenizer
from runs import flags, rows, train, write_model
from served_engine import served_folder
from teachers_zoo import BRANCHES, SPELLING, all_log_probs, own_log_probs

ZOO = Path(__file__).parents[1] / "helpers" / "slime_zoo.py"
SLIME = "slime.rollout.on_policy_distillation"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("teacher") / "model", seed=7)


@pytest.fixture(scope="module")
def url(teacher):
    with served_folder(teacher) as url:
        yield url


@pytest.fixture
def go(model, data, tmp_path):
    """Train two rollouts; returns the rows, and samples and batch of each rollout."""

    def run(folder="run", **changes):
        values = {
            "use_opd": True,
            "rm_type": None,
            "save_debug_train_data": f"{tmp_path}/{folder}-batches/{{rollout_id}}",
            "save_debug_rollout_data": f"{tmp_path}/{folder}-samples/{{rollout_id}}.safetensors",
        }
        assert train(flags(model, data, tmp_path / folder, **values | changes)) == 2
        batches = [load_batch(path) for path in sorted((tmp_path / f"{folder}-batches").glob("*"))]
        dumps = [load_samples(path) for path in sorted((tmp_path / f"{folder}-samples").glob("*"))]
        shown = [row for row in rows(tmp_path / folder) if row["step"]]
        return shown, [[s for group in dump.groups for s in group.samples] for dump in dumps], batches

    return run


def parts_of(batch, name):
    return np.split(batch.columns[name], batch.response_starts[1:-1])


@pytest.mark.parametrize(
    ("reward", "process"),
    [(f"{SLIME}.reward_func", f"{SLIME}.post_process_rewards"), (f"{ZOO}:ask_teacher", f"{ZOO}:keep_teacher")],
    ids=["slime", "own copy"],
)
def test_slimes_functions_and_copies_of_them_set_the_teachers_log_probs(go, teacher, url, reward, process):
    shown, samples, batches = go(
        custom_rm_path=reward, custom_reward_post_process_path=process, rm_url=f"{url}/generate", label_key=None
    )
    for of_rollout, batch in zip(samples, batches, strict=True):
        for sample, log_probs in zip(of_rollout, parts_of(batch, "teacher_log_probs"), strict=True):
            np.testing.assert_allclose(log_probs, own_log_probs(teacher, sample), atol=1e-5)
    assert [row["rollout/raw_reward"] for row in shown] == [0, 0]
    assert [row["rollout/rewards"] for row in shown] == [0, 0]


def test_each_sample_is_scored_by_its_teacher_at_the_likeliest_tokens(go, model, teacher, url, data, tmp_path):
    """One teacher is a server, the other the start model in this process; a replay has the same columns.

    Miles's functions leave the samples to teachers by name.
    """
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    rows_of = [row | {"metadata": {"opd_teacher": ("far", "self")[i % 2]}} for i, row in enumerate(lines)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of))
    choice = {"opd_teacher_urls": [f"far={url}/generate", f"self={model}"], "opd_loss": "topk", "opd_log_prob_top_k": 3}
    miles = "miles.rollout.on_policy_distillation"
    choice |= {
        "custom_rm_path": f"{miles}.reward_func",
        "custom_reward_post_process_path": f"{miles}.post_process_rewards",
    }
    shown, samples, batches = go(prompt_data=tmp_path / "rows.jsonl", **choice)
    folders = {"far": teacher, "self": model}
    for sample in samples[0]:
        name = sample.metadata["opd_teacher"]
        np.testing.assert_allclose(sample.teacher_log_probs, own_log_probs(folders[name], sample), atol=1e-5)
        ids = all_log_probs(model, sample).topk(3).indices.numpy()
        np.testing.assert_array_equal(sample.teacher_top_ids, ids)
        values = np.take_along_axis(all_log_probs(folders[name], sample).numpy(), ids, 1)
        np.testing.assert_allclose(sample.teacher_top_log_probs, values, atol=1e-5)
        if name == "self":  # the policy before its first update
            np.testing.assert_allclose(sample.teacher_log_probs, sample.rollout_log_probs, atol=1e-5)
    assert abs(shown[0]["rollout/opd_teacher/self_kl"]) < 1e-5 < abs(shown[0]["rollout/opd_teacher/far_kl"])
    assert shown[0]["perf/teacher_time"] > 0
    dump = f"{tmp_path}/run-samples/{{rollout_id}}.safetensors"
    _, _, again = go("replay", prompt_data=None, load_debug_rollout_data=dump, save_debug_rollout_data=None, **choice)
    for batch, replayed in zip(batches, again, strict=True):
        for name in ("teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs"):
            np.testing.assert_array_equal(batch.columns[name], replayed.columns[name])


ENVIRONMENT = {"environment": SPELLING, "max_turns": 3, "label_key": None}
AGENT = {"agent_function_path": BRANCHES, "rm_type": "random"}


@pytest.mark.parametrize("agent", [ENVIRONMENT, AGENT], ids=["environment", "agent"])
@pytest.mark.parametrize(
    ("way", "loss"),
    [("trainer", "topk"), ("trainer", "full"), ("url", "topk"), ("folder", "sampled"), ("slime", "sampled")],
)
def test_samples_of_agents_are_scored_where_they_are_trained(go, agent, way, loss, teacher, url):
    """Each leaf in its own context; texts of the environment are scored but not trained."""
    functions = {"custom_rm_path": f"{SLIME}.reward_func", "rm_url": f"{url}/generate", "rm_type": None}
    functions |= {"custom_reward_post_process_path": f"{SLIME}.post_process_rewards"}
    given = {
        "trainer": {"opd_teacher_load": teacher},
        "url": {"opd_teacher_urls": f"t={url}"},
        "folder": {"opd_teacher_urls": f"t={teacher}"},
        "slime": functions,
    }
    shown, samples, batches = go(**agent | given[way], opd_loss=loss, calculate_per_token_loss=True)
    assert len(samples[0]) == 16 * (3 if agent is AGENT else 1)
    for sample, log_probs in zip(samples[0], parts_of(batches[0], "teacher_log_probs"), strict=True):
        np.testing.assert_allclose(log_probs, own_log_probs(teacher, sample), atol=1e-5)
    masks = np.concatenate([sample.loss_mask for sample in samples[0]])
    assert 0 < masks.mean() < 1
    np.testing.assert_array_equal(batches[0].loss_masks, masks)
    if loss == "sampled":
        kl = batches[0].columns["opd_reverse_kl"]
        assert not kl[masks == 0].any()
        assert shown[0]["train/opd_reverse_kl"] == pytest.approx(kl[masks == 1].mean(), rel=1e-3)
    assert min(row["train/grad_norm"] for row in shown) > 0


@pytest.mark.parametrize("loss", ["sampled", "topk", "full"])
@pytest.mark.parametrize("agent", [ENVIRONMENT, AGENT], ids=["environment", "agent"])
def test_an_agent_has_nothing_to_learn_from_itself(go, model, agent, loss):
    shown, _, _ = go(**agent, opd_teacher_load=model, opd_loss=loss, opd_task_reward_coef=0.0, weight_decay=0.0)
    assert [(row["train/opd_reverse_kl"], row["train/grad_norm"]) for row in shown] == [(0.0, 0.0)] * 2


def test_a_privileged_prompt_replaces_the_first_one_only(go, model, data, tmp_path):
    """What an agent's leaf has before its first trained token stays; so does the prompt of another conversation."""
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    hinted = [row | {"metadata": {"hint": f"{row['input']}{row['label']}"}} for row in lines]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in hinted))
    _, samples, _ = go(
        **AGENT, opd_teacher_urls=f"t={model}", opd_teacher_prompt_key="hint", prompt_data=tmp_path / "rows.jsonl"
    )
    tokenizer, num_replaced = load_tokenizer(model), 0
    for sample in samples[0]:
        first = sample.metadata["session_prompt_ids"]
        begin = tokenizer.encode(sample.metadata["hint"]) if first else []
        scored = dataclasses.replace(sample, tokens=begin + sample.tokens[first:])
        np.testing.assert_allclose(sample.teacher_log_probs, own_log_probs(model, scored), atol=1e-5)
        num_replaced += first > 0
        is_second = sample.metadata["messages"][-2]["content"] == "2="
        assert (sample.prompt_length > first > 0) == is_second
    assert num_replaced == 32


def test_a_reply_about_one_leaf_is_not_taken_for_others(go, url):
    own = {"custom_rm_path": f"{ZOO}:ask_teacher", "custom_reward_post_process_path": f"{ZOO}:keep_teacher"}
    with pytest.raises(RolloutError, match=r"the reply to the last leaf .* --opd-teacher-urls"):
        go(**AGENT | own | {"rm_type": None, "rm_url": f"{url}/generate"})


def test_samples_that_are_too_long_for_the_teacher_fail_for_that_reason(go, tmp_path):
    short = write_model(tmp_path / "short", max_position_embeddings=8)
    with pytest.raises(RolloutError, match=r"\[OPD01\] .* 16x teacher: prompt and response have \d+ tokens, and its"):
        go(opd_teacher_urls=f"t={short}", rm_type="random")


def test_a_teacher_that_does_not_answer_is_an_error_before_the_run(go):
    with pytest.raises(ConfigError, match=r"no engine answers at http://127\.0\.0\.1:9 "):
        go(opd_teacher_urls="http://127.0.0.1:9/generate")
