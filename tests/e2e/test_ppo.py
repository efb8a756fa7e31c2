"""Runs with a critic: value warm-up, exports, role settings, memory hand-over and errors."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification

from furlong.config import parse
from furlong.config.critic import critic_settings, role_overrides
from furlong.core.batch import pack_micro_batch
from furlong.errors import CheckpointError, ConfigError
from furlong.files.batch_file import load_batch
from furlong.files.sample_file import load_samples
from furlong.models.value_head import load_value_model
from models_zoo import random_batch
from runs import flags, rows, train, write_model
from served_engine import LogRecords

PPO = {"advantage_estimator": "ppo", "critic_lr": 1e-2, "normalize_advantages": True, "global_batch_size": 8}
CRITIC = {f"train/critic-{name}" for name in ("value_loss", "value_clipfrac", "explained_variance", "grad_norm")}


def trainer_files(folder, step):
    return {path.stem: load_file(path) for path in (folder / f"iter_{step:07d}" / "trainer").glob("*.safetensors")}


@pytest.fixture(scope="module")
def trained(model, data, tmp_path_factory):
    """Two rollouts that train only the critic, then one that trains both; a checkpoint and an export of each."""
    folder = tmp_path_factory.mktemp("ppo")
    more = {"save": folder / "save", "save_interval": 1, "critic_save": f"{folder}/critic_{{rollout_id}}"}
    assert train(flags(model, data, folder / "run", num_rollout=3, num_critic_only_steps=2, **PPO, **more)) == 3
    return folder


def test_rollouts_of_the_warm_up_leave_the_bits_of_the_policy(trained, model):
    start = load_file(model / "model.safetensors")
    after = [trainer_files(trained / "save", step) for step in (1, 2, 3)]
    for files in after[:2]:
        assert files["trainer_optimizer"] == {}
        assert all(torch.equal(tensor, files["trainer_weights"][name]) for name, tensor in start.items())
    assert not all(torch.equal(tensor, after[2]["trainer_weights"][name]) for name, tensor in start.items())
    critics = [files["trainer_critic"] for files in after]
    assert not torch.equal(critics[0]["lm_head.weight"], critics[1]["lm_head.weight"])
    assert critics[0]["lm_head.weight"].shape[0] == critics[0]["lm_head.bias"].shape[0] == 1
    warm_up, both = rows(trained / "run")[1], rows(trained / "run")[2]
    assert warm_up.keys() >= CRITIC | {"rollout/values", "rollout/returns", "perf/critic_train_time"}
    assert "train/loss" not in warm_up
    assert both.keys() >= CRITIC | {"train/loss", "train/pg_loss", "perf/actor_train_time", "perf/values_time"}


def test_the_export_of_the_critic_is_a_model_of_transformers_with_its_values(trained):
    exported = trained / "critic_3"
    theirs, info = AutoModelForTokenClassification.from_pretrained(
        exported, local_files_only=True, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    reported = LogRecords()  # transformers would report that the head of a language model is missing
    logging.getLogger("transformers.modeling_utils").addHandler(reported)
    ours = load_value_model(exported, seed=1)
    logging.getLogger("transformers.modeling_utils").removeHandler(reported)
    assert reported.lines == []
    batch = random_batch(prompts=[5], responses=[[6]], vocab=12)
    micro = pack_micro_batch(batch, np.arange(1))
    with torch.no_grad():
        logits = theirs(micro.tokens_T[None]).logits[0, :, 0]
        head = ours.get_output_embeddings()
        hidden = theirs.model(micro.tokens_T[None]).last_hidden_state[0]
        torch.testing.assert_close(logits, torch.nn.functional.linear(hidden, head.weight, head.bias)[:, 0])


def test_a_value_model_as_the_policy_is_an_error(trained, data, tmp_path):
    with pytest.raises(CheckpointError, match=r"critic_3 is a value model or a classifier.*to --critic-load"):
        train(flags(trained / "critic_3", data, tmp_path / "run", num_rollout=1))


@pytest.mark.parametrize(
    ("weight", "bias"), [("score.weight", "score.bias"), ("v_head.summary.weight", None), ("value_head.weight", None)]
)
def test_value_heads_of_other_programs_are_read(trained, tmp_path, weight, bias):
    source = trained / "critic_3"
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    head = {"weight": tensors.pop("score.weight"), "bias": tensors.pop("score.bias")}
    save_file(
        tensors | {weight: head["weight"]} | ({bias: head["bias"]} if bias else {}), tmp_path / "model.safetensors"
    )
    loaded = load_value_model(tmp_path, seed=1).get_output_embeddings()
    assert torch.equal(loaded.weight, head["weight"])
    assert torch.equal(loaded.bias, head["bias"] if bias else torch.zeros(1))


def test_a_head_with_two_labels_is_refused(trained, tmp_path):
    source = trained / "critic_3"
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["score.weight"] = tensors["score.weight"].repeat(2, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"score.weight has shape \(2, \d+\).*one label"):
        load_value_model(tmp_path, seed=1)


@pytest.mark.parametrize("start", ["export", "checkpoint"])
def test_a_critic_starts_from_an_export_or_a_checkpoint(trained, model, data, tmp_path, start):
    folder = trained / ("critic_3" if start == "export" else "save")
    argv = flags(model, data, tmp_path / "run", num_rollout=1, critic_load=folder, save=tmp_path / "save", **PPO)
    assert train([*argv, "--critic-lr", "0"]) == 1
    want, have = (
        trainer_files(path, step)["trainer_critic"] for path, step in ((trained / "save", 3), (tmp_path / "save", 1))
    )
    assert all(torch.equal(want[name], have[name]) for name in want)


def test_a_run_without_a_critic_continues_from_the_policy_and_one_with_it_needs_its_critic(
    trained, model, data, tmp_path, caplog
):
    assert train(flags(model, data, tmp_path / "a", num_rollout=4, load=trained / "save", global_batch_size=8)) == 4
    assert "has a trained critic, which this run does not train: ignored" in caplog.text
    plain = tmp_path / "plain"
    assert train(flags(model, data, tmp_path / "b", num_rollout=1, save=plain)) == 1
    with pytest.raises(CheckpointError, match=r"has no critic.*--finetune"):
        train(flags(model, data, tmp_path / "c", num_rollout=2, load=plain, **PPO))
    assert train(flags(model, data, tmp_path / "d", "--finetune", num_rollout=1, load=plain, **PPO)) == 1


def test_the_learning_rate_of_a_critic_that_trains_twice_decays_over_the_whole_run(model, data, tmp_path):
    more = {"lr_decay_style": "linear", "num_rollout": 4, "critic_steps_per_rollout": 2}
    assert train(flags(model, data, tmp_path / "run", **PPO, **more)) == 4
    steps = [row for row in rows(tmp_path / "run") if row["step"]]
    for prefix, num_steps in (("train/", 2), ("train/critic-", 4)):  # of a rollout, whose last one is recorded
        rates = [1e-2 * (1 - (num_steps * (n + 1) - 1) / (4 * num_steps)) for n in range(4)]
        assert [row[f"{prefix}lr-pg_0"] for row in steps] == pytest.approx(rates)


def test_policy_and_critic_that_share_the_device_train_as_when_both_stay(trained, model, data, tmp_path, monkeypatch):
    monkeypatch.setattr("furlong.wiring.training.shares_device", lambda context: True)
    save = tmp_path / "save"
    assert train(flags(model, data, tmp_path / "run", num_rollout=3, num_critic_only_steps=2, save=save, **PPO)) == 3
    want, have = trainer_files(trained / "save", 3), trainer_files(save, 3)
    for name in ("trainer_weights", "trainer_critic", "trainer_critic_optimizer"):
        assert all(torch.equal(want[name][key], have[name][key]) for key in want[name])


SPELLING = """
from furlong.environments import Step

class Spelling:
    def reset(self, task, seed):
        self.turns = 0
        return "a="

    def step(self, message):
        self.turns += 1
        return Step(f"{self.turns}=", reward=len(set(message["content"])) / 8, done=self.turns == 3)
"""


@pytest.mark.parametrize("estimator", ["ppo", "sao"])
def test_an_agent_of_several_turns_learns_from_the_rewards_of_its_turns(model, data, tmp_path, estimator):
    (tmp_path / "spelling.py").write_text(SPELLING)
    changes = PPO | {
        "advantage_estimator": estimator,
        "environment": f"{tmp_path / 'spelling.py'}:Spelling",
        "rm_type": None,
        "return_level": "turn",
        "gamma": 0.5,
        "lambd": 0.25,
        "max_turns": 3,
        "num_rollout": 1,
        "save_debug_train_data": tmp_path / "{rollout_id}_{rank}",
        "save_debug_rollout_data": tmp_path / "samples_{rollout_id}.safetensors",
    }
    changes.pop("normalize_advantages")
    assert train(flags(model, data, tmp_path / "run", **changes)) == 1
    batch = load_batch(tmp_path / "0_0")
    samples = {
        sample.index: sample
        for group in load_samples(tmp_path / "samples_0.safetensors").groups
        for sample in group.samples
    }
    is_adaptive = estimator == "sao"
    for row, start in enumerate(batch.response_starts[:-1]):
        part = slice(start, batch.response_starts[row + 1])
        mask, values = batch.loss_masks[part], batch.columns["values"][part].astype(float)
        turns = np.flatnonzero((mask > 0) & (np.append(mask[1:], 0) == 0))
        rewards = samples[int(batch.sample_ids[row])].metadata["step_rewards"]
        assert len(turns) == len(rewards) == 3
        assert mask.min() == 0
        by_length = max(0.0, 1 - 1 / (0.05 * mask.sum()))  # counts between tokens, too
        within_and_after = {
            "advantages": (by_length, by_length) if is_adaptive else (1.0, 0.25),
            "returns": (1.0, 1.0) if is_adaptive else (1.0, 0.25),
        }
        for column, decays in within_and_after.items():
            value = advantage = 0.0
            for t in np.flatnonzero(mask)[::-1]:
                is_last = t in turns
                earned = rewards[list(turns).index(t)] if is_last else 0.0
                discount = 0.5 if is_last else 1.0
                advantage = earned + discount * value - values[t] + discount * decays[is_last] * advantage
                value = values[t]
                want = advantage + value * (column == "returns")
                assert batch.columns[column][part][t] == pytest.approx(want, abs=1e-5), (row, column, t)


def test_stale_samples_have_values_of_the_present_critic_and_advantages_with_kl_over_the_whole_rollout(
    model, data, tmp_path
):
    changes = PPO | {
        "async_buffer_size": 2,
        "kl_coef": 0.1,
        "gamma": 0.9,
        "lambd": 0.8,
        "num_rollout": 4,
        "save": tmp_path / "save",
        "save_interval": 1,
        "critic_save": f"{tmp_path}/critic_{{rollout_id}}",
        "save_debug_train_data": tmp_path / "{rollout_id}_{rank}",
    }
    assert train(flags(model, data, tmp_path / "run", **changes)) == 4
    batch = load_batch(tmp_path / "3_0")
    assert batch.columns["token_versions"].max() < 3  # the weights after fewer than three rollouts
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic_3", local_files_only=True)
    kept, raw = batch.loss_masks > 0, np.zeros(len(batch.loss_masks))
    for row, start in enumerate(batch.response_starts[:-1]):
        part = slice(start, batch.response_starts[row + 1])
        tokens = torch.from_numpy(batch.tokens[batch.starts[row] : batch.starts[row + 1]]).long()
        with torch.no_grad():
            values = critic(tokens[None]).logits[0, :, 0].numpy()
        values = values[-batch.response_lengths[row] - 1 : -1]
        np.testing.assert_allclose(batch.columns["values"][part], values, atol=1e-5)
        kl = (batch.columns["old_log_probs"] - batch.columns["ref_log_probs"])[part]
        next_value = advantage = 0.0
        for t in range(len(values))[::-1]:
            reward = -0.1 * kl[t] + (batch.rewards[row] if t == len(values) - 1 else 0.0)
            advantage = reward + 0.9 * next_value - values[t] + 0.9 * 0.8 * advantage
            raw[start + t], next_value = advantage, values[t]
            assert batch.columns["returns"][start + t] == pytest.approx(advantage + values[t], abs=1e-5)
    assert np.abs(batch.columns["ref_log_probs"] - batch.columns["old_log_probs"]).max() > 1e-3
    white = (raw - raw[kept].mean()) / raw[kept].std(ddof=1)
    np.testing.assert_allclose(batch.columns["advantages"][kept], white[kept], atol=1e-4)


ROLES = """
megatron:
  - {name: default, role: critic, overrides: {lr: 1e-5, clip_grad: 0.5, tensor_model_parallel_size: 1, num_nodes: 4}}
  - {name: default, role: actor, args: {lr: 2e-6}}
"""


def test_role_settings_of_slimes_file_override_those_of_the_command_line(tmp_path):
    (tmp_path / "roles.yaml").write_text(ROLES)
    words = ["--advantage-estimator", "ppo", "--megatron-config-path", str(tmp_path / "roles.yaml"), "--critic-lr", "7"]
    config = parse(words).config
    assert config.optim.lr == 2e-6
    critic = critic_settings(config).optim
    assert (critic.lr, critic.clip_grad, critic.adam_beta2) == (1e-5, 0.5, config.optim.adam_beta2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "is not YAML"),
        ("megatron: [{role: critic, overrides: [lr]}]", r"overrides of the critic are \['lr'\], expected a mapping"),
        (
            "megatron: [{role: critic, overrides: {optimizer: rmsprop}}]",
            "optimizer of the critic: got 'rmsprop', expected one",
        ),
        ("megatron: [{role: critic, overrides: {clip_grad: yes}}]", "clip_grad of the critic: got True"),
        ("critic: {lr: 1}", "has no list 'megatron'"),
        ("megatron: [{role: judge}]", "role 'judge' is unknown"),
        ("megatron: [{role: critic}, {role: critic}]", "2 entries with role critic"),
        ("megatron: [{role: critic, overrides: {pipeline_model_parallel_size: 2}}]", "differs from the run's 1"),
        ("megatron: [{role: critic, overrides: {num_layers: 2}}]", "num_layers of the critic cannot be overridden"),
        ("megatron: [{role: critic, overrides: {lr: fast}}]", "lr of the critic: got 'fast'.*expected a number"),
        ("megatron: [{role: critic, overrides: {lr: -1}}]", r"outside of \[0, 10\]"),
    ],
)
def test_an_unusable_file_of_role_settings_is_one_problem(text, problem, tmp_path):
    (tmp_path / "roles.yaml").write_text(text)
    config = parse(["--advantage-estimator", "ppo", "--megatron-config-path", str(tmp_path / "roles.yaml")]).config
    with pytest.raises(ConfigError, match=problem):
        role_overrides(config, "critic")


def test_flags_that_contradict_a_critic_are_refused(model, data, tmp_path):
    (tmp_path / "roles.yaml").write_text("megatron: [{role: actor, overrides: {lr: 1e-3}}]")
    write_model(tmp_path / "small", vocab_size=40)
    (tmp_path / "saved.yaml").write_text(f"megatron: [{{role: critic, overrides: {{save: {tmp_path}/c}}}}]")
    ppo = ("--advantage-estimator", "ppo")
    cases = {
        (*ppo, "--critic-load", data): "is a file; give the directory that contains config.json",
        (*ppo, "--critic-load", tmp_path / "small"): "vocabulary of 40, the policy 56; .* same tokenizer",
        (*ppo, "--save", tmp_path, "--critic-save", tmp_path): "one would overwrite the other; use another folder",
        (*ppo, "--megatron-config-path", tmp_path / "saved.yaml"): "written with checkpoints only; add --save",
        (*ppo, "--critic-lr-warmup-iters", 9, "--lr-decay-style", "linear"): "of a critic, --critic-lr-warmup-iters",
        (*ppo, "--critic-freeze-params-name-list", "."): "or for a critic --critic-freeze-params-name-list",
        ("--value-clip", "0.5"): "--value-clip",
        ("--advantage-estimator", "vapo"): "lambda is 0 for responses of up to 20 tokens",
        ("--advantage-estimator", "ppo", "--disable-compute-advantages-and-returns"): "learns to predict the returns",
        ("--advantage-estimator", "ppo", "--critic-lr", "1e-6", "--min-lr", "1e-4"): "is below --min-lr",
        ("--advantage-estimator", "ppo", "--megatron-config-path", tmp_path / "roles.yaml"): "gives the actor lr 0.001",
    }
    for words, problem in cases.items():
        with pytest.raises(ConfigError, match=problem):
            train(flags(model, data, tmp_path / "run", *words))
