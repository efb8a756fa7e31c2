"""Teachers that score samples during the rollout, in whole runs."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fakes_engine import reference_log_probs
from furlong.errors import ConfigError
from furlong.files.batch_file import load_batch
from furlong.files.sample_file import load_samples
from runs import flags, rows, train, write_model
from served_engine import served_folder

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


@functools.cache
def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def own_log_probs(folder, sample):
    """Log-probs of the response by a model's own forward pass."""
    prompt, response = sample.tokens[: sample.prompt_length], sample.tokens[sample.prompt_length :]
    return reference_log_probs(loaded(folder), prompt, response).numpy()


def all_log_probs(folder, sample):
    with torch.no_grad():
        logits = loaded(folder)(torch.tensor([sample.tokens])).logits[0].float()
    return logits[sample.prompt_length - 1 : -1].log_softmax(-1).numpy()


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
        ids = torch.from_numpy(all_log_probs(model, sample)).topk(3).indices.numpy()
        np.testing.assert_array_equal(sample.teacher_top_ids, ids)
        values = np.take_along_axis(all_log_probs(folders[name], sample), ids, 1)
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


def test_a_teacher_that_does_not_answer_is_an_error_before_the_run(go):
    with pytest.raises(ConfigError, match=r"no engine answers at http://127\.0\.0\.1:9 "):
        go(opd_teacher_urls="http://127.0.0.1:9/generate")
