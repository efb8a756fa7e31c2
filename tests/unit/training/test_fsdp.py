from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from transformers import PhimoeConfig

from backends import fsdp_backend
from furlong.algo.policy_loss import CustomLoss, PolicyLoss
from furlong.config.sections import AlgoFlags, OptimFlags
from furlong.core.batch import pack_micro_batch
from furlong.errors import CheckpointError, ConfigError, TrainerError
from furlong.models import hf_model as hf
from models_zoo import VOCAB, family_config, plain_log_probs, random_batch
from ranks_cases import resident

BATCH = random_batch(prompts=[5, 3], responses=[[6, 2, 9], [4, 7]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    hf.save_model(hf.build_model(family_config("qwen3"), seed=0), path)
    return path


def build(folder, **options):
    optim = OptimFlags(**{"lr": 1e-2, **options.pop("optim", {})})
    return fsdp_backend(folder, optim=optim, **options)


def micro(advantages=None):
    count = len(BATCH.loss_masks)
    weights = np.full(count, 1 / count, np.float32)
    values = torch.linspace(-1, 1, count) if advantages is None else advantages
    return pack_micro_batch(BATCH, range(len(BATCH)), weights).with_columns(advantages=values)


def loss(**flags):
    return PolicyLoss(AlgoFlags(**flags))


def grads(backend):
    return {n: p.grad.clone() for n, p in backend.actor.model.named_parameters() if p.grad is not None}


def test_log_probs_are_of_the_tempered_policy(folder):
    model = hf.load_model(folder)
    model.set_attn_implementation("eager")
    hot = build(folder, temperature=0.5).log_probs(micro()).log_probs_R
    cold = build(folder).log_probs(micro()).log_probs_R
    torch.testing.assert_close(cold, plain_log_probs(model, BATCH), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(hot, cold, atol=1e-3)


def test_a_reference_is_built_at_the_start_and_not_while_an_engine_generates(folder, monkeypatch):
    backend = build(folder, role_folders={"ref": folder}, dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "set_default_dtype", lambda dtype: pytest.fail(f"all threads have {dtype} now"))
    for role in ("ref", "actor"):
        assert backend.log_probs(micro(), model=role).log_probs_R.dtype == torch.float32
    backend.copy_weights("actor", "old_actor")


def test_activation_recomputation_changes_no_gradient(folder):
    plain, recomputed = build(folder), build(folder, recompute_activations=True)
    calls = []
    recomputed.actor.model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    for backend in (plain, recomputed):
        backend.forward_backward(micro(), loss())
    assert len(calls) == 2
    want = grads(plain)
    for name, grad in grads(recomputed).items():
        torch.testing.assert_close(grad, want[name], rtol=1e-6, atol=1e-8)


def test_activation_recomputation_leaves_routers_that_are_random_in_training_alone(tmp_path):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    config = PhimoeConfig(vocab_size=VOCAB, num_key_value_heads=4, num_local_experts=4, **shape, **ends)
    hf.save_model(hf.build_model(config, seed=0), tmp_path)
    plain, recomputed = build(tmp_path), build(tmp_path, recompute_activations=True)
    assert any(module.training for module in recomputed.actor.model.modules())
    want, got = (backend.log_probs(micro()).log_probs_R for backend in (plain, recomputed))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_chunked_log_probs_change_no_gradient(folder):
    whole, chunked = build(folder), build(folder, log_probs_chunk_size=5)
    for backend in (whole, chunked):
        backend.forward_backward(micro(), loss(entropy_coef=0.1))
    want = grads(whole)
    for name, grad in grads(chunked).items():
        torch.testing.assert_close(grad, want[name], rtol=1e-4, atol=1e-7)


def test_only_matching_parameters_are_trained(folder):
    backend = build(folder, only_train_params_name_list=["mlp", "norm"], freeze_params_name_list=[r"layers\.0\."])
    before = {n: p.detach().clone() for n, p in backend.actor.model.named_parameters()}
    backend.forward_backward(micro(), loss())
    backend.optim_step()
    changed = {n for n, p in backend.actor.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if ("mlp" in n or "norm" in n) and "layers.0." not in n}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only_train_params_name_list": ["nothing"]}, "'nothing' matches no parameter"),
        ({"freeze_params_name_list": ["("]}, "not a regular expression"),
        ({"freeze_params_name_list": ["."]}, "no parameter is trained"),
        ({"dtype": torch.float16}, "--bf16"),
    ],
)
def test_settings_that_cannot_train_are_errors(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        build(folder, **options)


def test_a_checkpoint_of_megatron_lm_is_refused_with_the_two_ways_to_use_it(folder, tmp_path):
    (tmp_path / ".metadata").touch()
    for changes, flag in (
        ({"initial_weights": tmp_path}, "--load"),
        ({"role_folders": {"ref": tmp_path}}, "--ref-load"),
    ):
        with pytest.raises(ConfigError, match=f"{flag} .*furlong convert megatron-to-hf.*--train-backend megatron"):
            build(folder, **changes)


def test_a_process_group_of_other_ranks_is_refused(folder, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(ConfigError, match=r"has 4 ranks.* 1;"):
        build(folder)


def test_a_loss_that_is_not_finite_names_the_bad_parameter_and_the_rows(folder):
    backend = build(folder)
    with torch.no_grad():
        backend.actor.model.model.layers[1].mlp.up_proj.weight[0, 0] = math.inf
    with pytest.raises(TrainerError, match=r"layers\.1\.mlp\.up_proj\.weight is not finite.*rows \[0, 1, 2, 3, 4\]"):
        backend.forward_backward(micro(), loss())


def test_without_the_check_a_non_finite_step_is_skipped_and_the_next_one_runs(folder):
    backend = build(folder, check_finite=False)
    bad = torch.full((len(BATCH.loss_masks),), math.nan)
    before = [t.clone() for _, t in backend.named_weights()]
    backend.forward_backward(micro(), loss())
    backend.forward_backward(micro(bad), loss())
    report = backend.optim_step()
    assert "loss nan" in report.skipped
    assert backend.optimizer.num_steps == 0
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, backend.named_weights(), strict=True))
    assert backend.weights_are_views
    given = {tensor.data_ptr() for _, tensor in backend.named_weights()}
    assert given <= {parameter.data_ptr() for parameter in backend.actor.model.parameters()}
    backend.forward_backward(micro(), loss())
    assert not backend.optim_step().skipped
    assert backend.optimizer.num_steps == 1


def test_a_custom_loss_gets_tempered_logits_with_their_gradient(folder):
    seen = {}

    def nll(part, stats):
        seen["logits"] = stats.logits_RV
        targets = part.tokens_T[part.response_pos_R]
        value = -stats.logits_RV.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        return (value * part.weight_R).sum(), {}

    backend = build(folder, temperature=0.7)
    metrics = backend.forward_backward(micro(), CustomLoss(nll, needs_logits=True))
    assert seen["logits"].shape == (len(BATCH.loss_masks), 40)
    want = -(backend.log_probs(micro()).log_probs_R * micro().weight_R).sum()
    assert metrics["loss"].value == pytest.approx(float(want), rel=1e-5)
    assert grads(backend)


def test_bfloat16_keeps_float32_master_weights_and_learns(folder):
    backend = build(folder, dtype=torch.bfloat16, optim={"lr": 1e-3})
    assert all(m.dtype == torch.float32 for m in backend.optimizer.master_weights)
    part = micro(torch.ones(len(BATCH.loss_masks)))
    before = float(backend.log_probs(part).log_probs_R.mean())
    for _ in range(20):
        backend.forward_backward(part, loss())
        backend.optim_step()
    assert float(backend.log_probs(part).log_probs_R.mean()) > before + 0.5
    for weight in backend.optimizer.weights:
        assert torch.equal(weight.parameter, weight.master.to(torch.bfloat16))


@pytest.mark.parametrize("since", ["started", "stepped", "loaded", "continued"])
def test_offload_drops_rounded_parameters_and_onload_restores_their_bits_from_master_weights(since, folder, tmp_path):
    options = {"dtype": torch.bfloat16, "freeze_params_name_list": ["layers.0"], "optim": {"lr": 1e-3}}
    backend = build(folder, **options)
    part = micro(torch.ones(len(BATCH.loss_masks)))
    if since != "started":
        backend.copy_weights("actor", "ref")
        backend.forward_backward(part, loss())
        backend.optim_step()
    if since in ("loaded", "continued"):
        backend.save(tmp_path)
        backend = build(folder, initial_weights=tmp_path if since == "continued" else None, **options)
        if since == "loaded":
            backend.load(tmp_path)
            for kept in backend.optimizer.optimizer.state.values():  # on a CPU what was read is the file's memory
                kept |= {name: tensor.clone() for name, tensor in kept.items()}
    params = dict(backend.actor.model.named_parameters())
    frozen = [name for name in params if "layers.0." in name]
    before = {"resident": [each.clone() for each in resident(backend)], "params": list(params.values())}
    before["params"] = [each.detach().clone() for each in before["params"]]
    moved = backend.offload().num_bytes
    assert not any(each.untyped_storage().size() for each in resident(backend))
    trained = sum(parameter.nbytes for name, parameter in params.items() if name not in frozen)
    assert moved == sum(each.nbytes for each in before["resident"]) - trained
    backend.onload()
    assert all(torch.equal(a, b) for a, b in zip(before["resident"], resident(backend), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before["params"], params.values(), strict=True))
    backend.forward_backward(part, loss())
    assert math.isfinite(backend.optim_step().grad_norm)


def test_random_states_are_restored_from_a_checkpoint(folder, tmp_path):
    backend = build(folder)
    torch.rand(3), random.random(), np.random.rand(2)
    backend.save(tmp_path)
    want = (torch.rand(4), random.random(), np.random.rand(3), random.gauss(0, 1))
    backend.load(tmp_path)
    got = (torch.rand(4), random.random(), np.random.rand(3), random.gauss(0, 1))
    assert torch.equal(got[0], want[0])
    assert got[1] == want[1]
    assert got[2].tolist() == want[2].tolist()
    assert got[3] == want[3]


def test_the_schedule_continues_from_the_checkpoint(folder, tmp_path):
    optim = {"lr": 1.0, "lr_decay_style": "linear", "lr_decay_iters": 10}
    backend = build(folder, optim=optim)
    for _ in range(3):
        backend.optim_step()
    backend.save(tmp_path)
    resumed = build(folder, optim=optim)
    resumed.load(tmp_path)
    assert resumed.optim_step().lr == pytest.approx(0.7)


def test_a_checkpoint_without_moments_logs_a_warning(folder, tmp_path, caplog):
    backend = build(folder, no_save_optim=True)
    backend.save(tmp_path)
    assert not (tmp_path / "trainer_optimizer.safetensors").exists()
    build(folder).load(tmp_path)
    assert "--no-save-optim" in caplog.text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: (path / "trainer_weights.safetensors").unlink(),
            "trainer_weights.safetensors: it does not exist",
        ),
        (
            lambda path: (path / "trainer_optimizer.safetensors").write_bytes(b"xx"),
            "trainer_optimizer.safetensors: its 2 bytes",
        ),
        (lambda path: (path / "trainer.json").write_text(json.dumps({"format": 99})), "format 99"),
    ],
)
def test_a_damaged_checkpoint_is_an_error(folder, tmp_path, damage, message):
    build(folder).save(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        build(folder).load(tmp_path)


def test_a_checkpoint_of_another_model_is_an_error(folder, tmp_path):
    other = tmp_path / "other"
    hf.save_model(hf.build_model(family_config("llama"), seed=0), other)
    build(folder).save(tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        build(other).load(tmp_path)
