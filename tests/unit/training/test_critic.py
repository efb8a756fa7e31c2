from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from backends import fsdp_backend
from furlong.algo.policy_loss import PolicyLoss
from furlong.algo.value_loss import ValueLoss
from furlong.config.sections import AlgoFlags, OptimFlags
from furlong.errors import ConfigError, TrainerError
from furlong.models import hf_model as hf
from furlong.training.hook_adapters import rollout_data
from furlong.training.packing import Packing
from furlong.training.settings import RoleSettings
from furlong.training.worker import RoleLoss, RoundHooks, RoundWorker
from models_zoo import family_config, random_batch

FLAGS = AlgoFlags(advantage_estimator="ppo", normalize_advantages=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    config = family_config("qwen3")
    config.tie_word_embeddings = True
    hf.save_model(hf.build_model(config, seed=0), path)
    return path


def build(folder, *, lr=3e-3, start=0, hooks=None, freeze=None, repeats=1, **more):
    trained = {"critic": RoleSettings(folder, OptimFlags(lr=lr), freeze)}
    backend = fsdp_backend(folder, optim=OptimFlags(lr=1e-2), trained=trained, **more)
    critic = RoleLoss("critic", ValueLoss(FLAGS.value_clip), weights="value_weights", repeats=repeats)
    losses = [critic, RoleLoss("actor", PolicyLoss(FLAGS), start=start)]
    return RoundWorker(backend, algo=FLAGS, losses=losses, packing=Packing(max_tokens=64), hooks=hooks)


def test_values_converge_to_the_probability_of_success(folder):
    """Responses of one token; the prompt decides which share of them has a reward of 1."""
    chances, samples = [0.25, 0.875], 16
    batch = random_batch(prompts=[3, 3], responses=[[1] * samples, [1] * samples], vocab=12)
    rewards = np.concatenate([np.arange(samples) < chance * samples for chance in chances]).astype(np.float32)
    batch = dataclasses.replace(batch, rewards=rewards, raw_rewards=rewards)
    worker, seen = build(folder, lr=1e-2, start=10**9), {}
    worker.hooks = RoundHooks(postprocess=lambda _, data: seen.update(data))
    for _ in range(40):
        metrics = worker.train(batch)
    values = torch.cat(seen["values"]).view(2, samples)
    assert values.mean(1).tolist() == pytest.approx(chances, abs=0.05)
    assert (values.std(1) < 1e-5).all()  # the value depends on the prompt only
    explained = 1 - sum(c * (1 - c) for c in chances) / 2 / rewards.var()  # by prompts, not by samples
    assert metrics["train/critic-explained_variance"].value == pytest.approx(explained, abs=0.02)


def test_advantages_of_a_function_need_the_targets_of_the_critic(folder):
    batch = random_batch(prompts=[5], responses=[[6, 2]], vocab=12)

    def only_advantages(data):
        data["advantages"] = [2 * values for values in data["values"]]

    def both(data):
        only_advantages(data)
        data["returns"] = [torch.ones_like(values) for values in data["values"]]

    with pytest.raises(TrainerError, match="only_advantages did not set returns"):
        build(folder, hooks=RoundHooks(advantages=only_advantages)).train(batch)
    metrics = build(folder, hooks=RoundHooks(advantages=both)).train(batch)
    assert metrics["rollout/returns"].value == 1.0
    assert "values" not in rollout_data(batch)


def test_a_model_that_shares_the_device_is_in_host_memory_while_the_other_runs(folder):
    worker = build(folder, shares_device=True)
    worker.train(random_batch(prompts=[5], responses=[[6, 2]], vocab=12))
    list(worker.backend.named_weights())  # for the engines
    sizes = {
        role: {each.untyped_storage().size() > 0 for each in model.module.parameters()}
        for role, model in worker.backend._models.built().items()
    }
    assert sizes == {"actor": {True}, "critic": {False}}
    worker.backend.offload()
    assert not any(each.untyped_storage().size() for each in worker.backend.actor.parameters())
    worker.backend.onload()
    assert all(each.untyped_storage().size() for each in worker.backend.actor.parameters())


def test_a_critic_may_take_its_steps_twice_and_keep_parts_frozen(folder):
    worker = build(folder, freeze=[r"\.self_attn\."], repeats=2)
    before = {name: tensor.clone() for name, tensor in worker.backend.named_weights(model="critic")}
    metrics = worker.train(random_batch(prompts=[5], responses=[[6, 2]], vocab=12))
    assert (metrics["train/critic-num_steps"].value, metrics["train/num_steps"].value) == (2, 1)
    after = dict(worker.backend.named_weights(model="critic"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if ".self_attn." in name}
    with pytest.raises(ConfigError, match="--critic-freeze-params-name-list: 'attn_bias' matches no parameter"):
        build(folder, freeze=["attn_bias"])
