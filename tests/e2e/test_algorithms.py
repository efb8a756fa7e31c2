"""Every algorithm and every flag that changes the loss trains from the command line and stays finite."""

from __future__ import annotations

import json

import pytest

from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config
from furlong.data.audit import audit
from furlong.inference.embedded import EmbeddedEngine
from furlong.tools.run_diff import DIGESTS, compare_runs
from furlong.training.fsdp.backend import FsdpBackend
from runs import flags, is_finite, reproducible, rows, train, write_prompts

WHITENED = {"normalize_advantages": True}
KL_LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.1}
ESTIMATORS = {
    "grpo": {},
    "gspo": {"eps_clip": 3e-4, "eps_clip_high": 4e-4},
    "cispo": {"eps_clip_high": 5},
    "reinforce_plus_plus": {**WHITENED, "kl_coef": 0.1, "gamma": 0.9},
    "reinforce_plus_plus_baseline": {**WHITENED, "kl_coef": 0.1},
    "rloo": {},
    "dr_grpo": {},
    "dapo": {"overlong_buffer_len": 4, "overlong_penalty_factor": 0.5},
    "ppo": {**WHITENED, "kl_coef": 0.1, "gamma": 0.99, "lambd": 0.95, "critic_lr": 1e-2},
    "vapo": {**WHITENED, "lambd_length_alpha": 1},
    "sao": {"lambd_length_alpha": 0, "n_samples_per_prompt": 1, "rollout_batch_size": 16, "async_buffer_size": 1},
}
VARIANTS = {
    "kl_k1": {**KL_LOSS, "kl_loss_type": "k1"},
    "kl_k2": {**KL_LOSS, "kl_loss_type": "k2"},
    "kl_k3_unbiased": {**KL_LOSS, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "kl_low_var": {**KL_LOSS, "kl_loss_type": "low_var_kl", "ref_update_interval": 1},
    "entropy": {"entropy_coef": 0.01, "use_rollout_entropy": True},
    "dual_clip": {"eps_clip_c": 3, "global_batch_size": 4},
    "critic_of_stale_samples": {"advantage_estimator": "ppo", "async_buffer_size": 1, "debug_determinism": True},
    "per_token": {"calculate_per_token_loss": True},
    "constant_len": {"loss_constant_len": 8},
    "no_std": {"disable_grpo_std_normalization": True},
    "no_baseline": {"disable_rewards_normalization": True},
    "tis": {"use_tis": True, "tis_clip": 1.5},
    "tis_sequence_mask_veto": {
        "use_tis": True, "tis_level": "sequence", "tis_mode": "mask", "tis_clip": 2, "tis_clip_low": 0.5,
        "tis_veto": 0.1,
    },
    "tis_geometric": {"use_tis": True, "tis_level": "geometric", "tis_clip": 1.1, "tis_clip_low": 0.9},
    "mismatch_only": {"get_mismatch_metrics": True},
    "engine_log_probs": {"use_rollout_logprobs": True, "global_batch_size": 8},
    "opsm": {"use_opsm": True, "global_batch_size": 4},
    "old_actor": {"keep_old_actor": True, "async_buffer_size": 1},
    "mask_truncated": {"mask_truncated": True},
    "one_sample_a_prompt": {
        "advantage_estimator": "reinforce_plus_plus", "n_samples_per_prompt": 1, "rollout_batch_size": 8, **WHITENED,
    },
    "micro_batches_by_samples": {"micro_batch_size": 4},
    "micro_batches_by_tokens": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_by_flops": True},
    "recompute": {"recompute_activations": True},
    "chunked_logits": {"log_probs_chunk_size": 7},
    "bfloat16": {"bf16": True},
    "sgd": {"optimizer": "sgd"},
    "fresh_optimizer": {"reset_optimizer_states": True},
    "stateless_adam": {"use_stateless_adam": True, "no_save_optim": True},
    "some_parameters": {"only_train_params_name_list": ["mlp"]},
    "frozen_parameters": {"freeze_params_name_list": ["embed_tokens"]},
    "schedule": {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 1, "global_batch_size": 4},
    "sampling": {
        "rollout_temperature": 0.7, "rollout_min_new_tokens": 2, "rollout_stop": ["7"], "rollout_stop_token_ids": [9],
    },
    "updated_every_other": {"async_buffer_size": 1, "update_weights_interval": 2},
    "held_in_flight": {"async_buffer_size": 2, "pause_mode": "hold"},
    "aborted_in_flight": {"async_buffer_size": 2, "pause_mode": "abort"},
    "few_slots": {"embedded_num_slots": 3},
    "engine_in_bfloat16": {"embedded_dtype": "bfloat16"},
    "digests": {"debug_determinism": True, "check_weight_update_equal": True, "debug_weight_sync": 1},
    "tensorboard": {"no_use_tensorboard": None, "use_tensorboard": True},
    "reported": {"log_passrate": True, "log_correct_samples": True, "log_multi_turn": True},
}  # fmt: skip


@pytest.fixture
def go(model, tmp_path):
    def run(folder="run", **changes):
        argv = flags(model, write_prompts(tmp_path / "prompts.jsonl"), tmp_path / folder, **changes)
        assert train(argv) == 2
        found = rows(tmp_path / folder)
        assert [row["step"] for row in found] == [1, 2]
        assert all(is_finite(row) for row in found), found
        assert audit(tmp_path / folder / "ledger.jsonl", finished=True).ok
        return found

    return run


def test_every_estimator_is_here():
    assert set(ESTIMATORS) == set(flag_specs(Config)["advantage_estimator"].choices or ())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator_trains(name, go):
    found = go(advantage_estimator=name, global_batch_size=8, **ESTIMATORS[name])
    assert all(row["train/grad_norm"] > 0 for row in found)
    assert ("rollout/kl" in found[0]) == ("kl_coef" in ESTIMATORS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_trains(name, go):
    found = go(**VARIANTS[name])
    assert found[0]["train/grad_norm"] > 0


def test_watching_the_mismatch_changes_nothing(go):
    plain, watched = go("plain"), go("watched", get_mismatch_metrics=True)
    extra = set(watched[0]) - set(plain[0])
    assert {"train/tis", "train/tis_abs", "train/tis_clipfrac"} <= extra
    for row, watched_row in zip(plain, watched, strict=True):
        seen = reproducible({k: v for k, v in watched_row.items() if k not in extra})
        assert seen["train/grad_norm"] == row["train/grad_norm"]
        # where a sum of 1e-14 lies in memory decides its last bits
        assert seen == pytest.approx(reproducible(row), rel=1e-6, abs=1e-12)


def test_packing_changes_only_the_last_bits(go):
    one, many = go("one", micro_batch_size=1), go("many", use_dynamic_batch_size=True, max_tokens_per_gpu=200)
    for a, b in zip(one, many, strict=True):
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-3)
        assert a["rollout/log_probs"] == pytest.approx(b["rollout/log_probs"], rel=1e-4)


@pytest.mark.nightly
def test_digests_of_equal_runs_are_equal_and_name_the_first_difference(go, tmp_path):
    for name, changes in {"a": {}, "b": {}, "c": {"lr": 1e-3}, "d": {"rollout_seed": 7}}.items():
        go(name, debug_determinism=True, **changes)
    assert (tmp_path / "a" / DIGESTS).read_bytes() == (tmp_path / "b" / DIGESTS).read_bytes()
    same = compare_runs(tmp_path / "a", tmp_path / "b")
    assert same.is_same
    assert same.num_stages == 2 * 7
    other_lr = compare_runs(tmp_path / "a", tmp_path / "c")
    assert (other_lr.difference.step, other_lr.difference.stage) == (1, "parameters")  # the gradients are equal
    assert other_lr.flags == {"--lr": (1e-2, 1e-3)}
    other_seed = compare_runs(tmp_path / "a", tmp_path / "d").difference
    assert (other_seed.step, other_seed.stage, other_seed.name) == (1, "rollout", "tokens")
    assert set(other_seed.samples) <= set(range(16))


def test_conversations_are_learned(model, tmp_path):
    data = tmp_path / "chats.jsonl"
    chats = [
        [{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}] * 2 for i in range(16)
    ]
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    argv = flags(
        model, data, tmp_path / "run", loss_type="sft_loss", input_key="messages", label_key=None, rm_type=None,
        n_samples_per_prompt=1, rollout_batch_size=8, num_rollout=None, num_epoch=3,
    )  # fmt: skip
    assert train(argv) == 6
    found = rows(tmp_path / "run")
    assert all(is_finite(row) for row in found)
    assert found[-1]["train/loss"] < found[0]["train/loss"]
    assert audit(tmp_path / "run" / "ledger.jsonl", finished=True).num_trained == 48


@pytest.mark.nightly
def test_prompts_with_labels_are_learned_and_evaluated(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 16)
    argv = flags(
        model, data, tmp_path / "run", loss_type="sft_loss", n_samples_per_prompt=1, rollout_batch_size=8,
        num_rollout=4, async_buffer_size=1, rm_type="math", eval_prompt_data=["sums", data], eval_interval=2,
    )  # fmt: skip
    assert train(argv) == 4
    found = rows(tmp_path / "run")
    assert found[-1]["train/loss"] < found[1]["train/loss"]
    assert ["eval/sums" in row for row in found] == [True, False, True, False, True]


@pytest.mark.parametrize("has_own_folder", [False, True])
def test_the_reference_is_loaded_before_anything_is_generated(has_own_folder, model, data, tmp_path, monkeypatch):
    seen = []
    load, generate = FsdpBackend._load, EmbeddedEngine.generate

    def loading(backend, folder, *, is_trained=False, **how):
        if not is_trained:
            seen.append("loaded")
        return load(backend, folder, is_trained=is_trained, **how)

    async def generating(engine, *args, **kwargs):
        seen.append("generated")
        return await generate(engine, *args, **kwargs)

    monkeypatch.setattr(FsdpBackend, "_load", loading)
    monkeypatch.setattr(EmbeddedEngine, "generate", generating)
    own = {"ref_load": model} if has_own_folder else {}
    assert train(flags(model, data, tmp_path / "run", num_rollout=1, **KL_LOSS, **own)) == 1
    assert seen.count("loaded") == 1
    assert seen[0] == "loaded"
    assert "generated" in seen


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_rollout_without_trained_tokens_is_reported_and_gives_no_gradient_when_whitened(
    estimator, model, data, tmp_path
):
    words = {"rollout_max_response_len": 1, "mask_truncated": True, "advantage_estimator": estimator}
    assert train(flags(model, data, tmp_path / "run", normalize_advantages=True, **words)) == 2
    assert [row["train/grad_norm"] for row in rows(tmp_path / "run")] == [0.0, 0.0]
    assert "rollout 0: all 16 response tokens are masked" in (tmp_path / "run" / "run.log").read_text()
