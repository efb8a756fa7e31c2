"""Teachers that score samples during the rollout, in whole runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fakes_engine import reference_log_probs
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


def own_log_probs(folder, sample, prompt=None):
    """Log-probs of the response by a model's own forward pass."""
    prompt = sample.tokens[: sample.prompt_length] if prompt is None else prompt
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return reference_log_probs(model, prompt, sample.tokens[sample.prompt_length :]).numpy()


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
