"""Faults in real runs: each is injected, reported with its values and a fix, and gone once fixed."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import faulty_hooks
import rewards_zoo
from diagnosed_runs import arithmetic, events, run, told
from faults_marker import fault
from furlong.cli import main_train
from furlong.core.weights import checksum
from furlong.data.audit import audit
from furlong.diagnosis.monitors import MONITORS
from furlong.diagnosis.monitors.monitor import MonitorSuite, RunFacts
from furlong.files.batch_file import load_batch
from furlong.inference.embedded import EmbeddedEngine
from furlong.quickstart.quickstart import model_folder
from furlong.training.fsdp import backend as fsdp
from furlong.training.fsdp.backend import FsdpBackend
from runs import rows


def hook(function) -> str:
    return f"{inspect.getsourcefile(function)}:{function.__name__}"


@fault("STOP02")
def test_an_unknown_end_of_turn(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(model_folder(), model)
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        content = json.loads((model / name).read_text())
        content |= {"eos_token": "<|unk|>"} if "tokenizer" in name else {"eos_token_id": 2}
        (model / name).write_text(json.dumps(content))
    code, found = run(tmp_path / "run", hf_checkpoint=model, num_rollout=1)
    assert (code, list(found)) == (0, ["STOP02"])
    event = found["STOP02"]
    assert event["evidence"]["truncated_ratio"] == rows(tmp_path / "run")[0]["rollout/truncated_ratio"] >= 0.9
    assert event["evidence"]["max_response_len"] == 8
    assert all(value in event["finding"] for value in ("<|im_start|> (2), <|unk|> (4)", "<|im_end|> (3)"))
    assert "--rollout-stop-token-ids 3;" in event["remedy"]
    assert rows(tmp_path / "run")[0]["diagnosis/STOP02"] == 1
    assert "[STOP02] step 1: " in (tmp_path / "run" / "run.log").read_text()
    assert run(tmp_path / "mended", hf_checkpoint=model, num_rollout=1, rollout_stop_token_ids=[3, 1]) == (0, {})


@fault("STOP02")
def test_a_limit_below_what_answers_need(tmp_path):
    code, found = run(tmp_path / "run", num_rollout=1, rollout_max_response_len=1)
    assert (code, list(found)) == (0, ["STOP02"])
    assert "<|im_end|> (3), <|endoftext|> (1)" in found["STOP02"]["finding"]
    assert "--rollout-max-response-len" in found["STOP02"]["remedy"]
    assert run(tmp_path / "mended", num_rollout=1) == (0, {})


def test_a_reward_that_training_broke_is_not_blamed_on_the_label():
    suite, row = MonitorSuite(MONITORS, RunFacts()), {"rollout/zero_std_frac": 1.0, "rollout/raw_reward": 0.0}
    assert suite.step(1, row | {"rollout/zero_std_frac": 0.2, "rollout/raw_reward": 0.6}) == []
    (found,) = [d for step in (2, 3, 4) for d in suite.step(step, row)]
    assert (found.id, found.evidence) == ("REW02", {"step": 4, "best": 0.6, "last": 0.0})
    assert ("--lr" in found.remedy, "--label-key" in found.remedy) == (True, False)


@fault("NUM01")
@pytest.mark.nightly
def test_a_reference_that_is_computed_otherwise(tmp_path, monkeypatch):
    log_probs = FsdpBackend.log_probs

    def less_exact(self, micro, *, model="actor", **options):
        stats = log_probs(self, micro, model=model, **options)
        if model != "ref":
            return stats
        return dataclasses.replace(stats, log_probs_R=stats.log_probs_R + 0.1 * torch.sin(7 * stats.log_probs_R))

    monkeypatch.setattr(FsdpBackend, "log_probs", less_exact)
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3", "num_rollout": 1}
    code, found = run(tmp_path / "run", **kl)
    assert (code, list(found)) == (0, ["NUM01"])
    event = found["NUM01"]
    assert (event["severity"], 1e-4 < event["evidence"]["kl"] < 1) == ("warning", True)
    assert "--fp32" in event["remedy"]
    monkeypatch.undo()
    assert run(tmp_path / "mended", **kl) == (0, {})


@fault("NUM01")
@pytest.mark.nightly
def test_a_reference_of_another_model(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model_folder(), other)
    weights = load_file(other / "model.safetensors")
    torch.manual_seed(0)
    save_file(
        {name: w + 0.3 * w.std() * torch.randn_like(w) if w.dim() == 2 else w for name, w in weights.items()},
        other / "model.safetensors",
        {"format": "pt"},
    )
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3", "num_rollout": 1}
    code, found = run(tmp_path / "run", **kl, ref_load=other)
    assert (code, list(found)) == (0, ["NUM01"])
    event = found["NUM01"]
    assert event["evidence"]["kl"] > 1e-2
    assert str(other) in event["finding"]
    assert "--ref-load" in event["remedy"]
    assert run(tmp_path / "mended", **kl) == (0, {})


@fault("NUM02")
@pytest.mark.nightly
def test_log_probs_that_the_engine_did_not_compute(tmp_path):
    code, found = run(
        tmp_path / "run", num_rollout=2, custom_generate_function_path=hook(faulty_hooks.generate_with_flat_log_probs)
    )
    assert (code, list(found)) == (0, ["NUM02"])
    event = found["NUM02"]
    assert event["severity"] == "error"
    assert event["evidence"]["mean_abs_diff"] == rows(tmp_path / "run")[0]["train/train_rollout_logprob_abs_diff"] > 0.1
    assert len(events(tmp_path / "run", "diagnosis")) == 1  # not told again: it did not get worse
    mended = {"custom_generate_function_path": hook(faulty_hooks.generate)}
    assert run(tmp_path / "mended", num_rollout=1, **mended) == (0, {})


@fault("NUM02")
@pytest.mark.parametrize(
    ("faulty", "cause", "word"),
    [
        (faulty_hooks.generate_at_other_temperature, "sampling_transform", "--rollout-temperature"),
        (faulty_hooks.generate_with_flat_log_probs, "flat", "--check-weight-update-equal"),
        (faulty_hooks.generate_with_shifted_log_probs, "unexplained", "--custom-generate-function-path"),
    ],
)
@pytest.mark.nightly
def test_the_gap_has_its_cause(faulty, cause, word, tmp_path):
    settings = {"num_rollout": 1, "rollout_temperature": 0.6}
    _, found = run(tmp_path / "run", **settings, custom_generate_function_path=hook(faulty))
    shares = found["NUM02"]["evidence"]["shares"]
    assert max(shares, key=shares.get) == cause
    assert sum(shares.values()) == pytest.approx(1)
    assert word in found["NUM02"]["remedy"]
    assert run(tmp_path / "mended", **settings, custom_generate_function_path=hook(faulty_hooks.generate)) == (0, {})


@pytest.mark.nightly
def test_the_self_test_compares_the_first_batches_and_can_be_left_out(tmp_path):
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3", "global_batch_size": 16}
    assert run(tmp_path / "run", **kl) == (0, {})
    first, second, third = rows(tmp_path / "run")
    assert first["selftest/ref_kl"] == 0
    assert max(first["selftest/logp_max_diff"], second["selftest/logp_max_diff"]) < 1e-4
    assert not [name for name in third if name.startswith("selftest/")]
    assert (tmp_path / "run" / "run.log").read_text().count("forward_logp_max_diff") == 2
    assert run(tmp_path / "without", **kl, skip_self_test=True) == (0, {})
    assert not [name for row in rows(tmp_path / "without") for name in row if name.startswith("selftest/")]


@fault("NUM02")
def test_an_engine_that_shifts_its_log_probs_ends_the_run_if_asked(tmp_path, monkeypatch, capsys):
    generate = EmbeddedEngine.generate

    async def shifted(self, *args, **kwargs):
        answer = await generate(self, *args, **kwargs)
        answer.log_probs[:] = [value - 0.2 for value in answer.log_probs]
        return answer

    monkeypatch.setattr(EmbeddedEngine, "generate", shifted)
    asked = {"on_diagnosis": "stop", "save": tmp_path / "save", "num_rollout": 5}
    code, found = run(tmp_path / "run", **asked)
    assert (code, list(found)) == (1, ["NUM02"])
    assert [row["step"] for row in rows(tmp_path / "run")] == [1]
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    assert events(tmp_path / "run")[-1]["event"] == "stopped"
    message = capsys.readouterr().err.split("furlong: DiagnosisError")[1]
    assert all(value in message for value in ("--on-diagnosis", "step 1", "[NUM02]"))
    monkeypatch.undo()
    assert run(tmp_path / "run", **asked | {"num_rollout": 2, "load": tmp_path / "save"})[0] == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "state"),
    [({}, "dropped"), ({"save_interval": 9}, "saved"), ({"save_interval": 1}, "saved")],
    ids=["nothing_is_saved", "saved_at_the_end", "saved_before"],
)
@pytest.mark.nightly
def test_groups_that_were_ahead_of_a_run_that_a_diagnosis_ends_are_accounted_for(changes, state, tmp_path):
    """Its reward is 0 for 3 steps, which ends the run."""
    faulty = {"rm_type": None, "custom_rm_path": hook(rewards_zoo.reward_of_0), "async_buffer_size": 2} | changes
    faulty |= {"num_rollout": 9, "on_diagnosis": "strict"}
    if state == "saved":
        faulty |= {"save": tmp_path / "save", "load": tmp_path / "save"}
    code, found = run(tmp_path / "run", **faulty)
    assert (code, list(found)) == (1, ["REW02"])
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    result = audit(tmp_path / "run" / "ledger.jsonl", finished=True)
    assert result.ok, result.summary()
    assert (result.num_trained, result.num_dropped, result.in_flight) == (
        (24, 0, {"saved": 16}) if state == "saved" else (24, 16, {})
    )
    if state == "saved":
        assert run(tmp_path / "run", **faulty | {"on_diagnosis": "warn"})[0] == 0
        result = audit(tmp_path / "run" / "ledger.jsonl", finished=True)
        assert (result.ok, result.num_trained) == (True, 72)


@fault("NUM03")
@pytest.mark.nightly
def test_rewards_that_make_a_huge_gradient(tmp_path):
    faulty = {"rm_type": None, "disable_grpo_std_normalization": True, "num_rollout": 1}
    code, found = run(tmp_path / "run", **faulty, custom_rm_path=hook(rewards_zoo.reward_in_thousands))
    assert (code, list(found)) == (0, ["NUM03"])
    assert found["NUM03"]["evidence"]["value"] == rows(tmp_path / "run")[0]["train/grad_norm"] > 100
    assert "--disable-grpo-std-normalization" in found["NUM03"]["remedy"]
    assert run(
        tmp_path / "divided",
        **faulty | {"disable_grpo_std_normalization": None},
        custom_rm_path=hook(rewards_zoo.reward_in_thousands),
    ) == (0, {})
    assert run(tmp_path / "mended", **faulty, custom_rm_path=hook(rewards_zoo.reward_of_index)) == (0, {})


@fault("NUM04")
@pytest.mark.nightly
def test_a_learning_rate_that_makes_the_loss_nan(tmp_path, capsys):
    fast = {"clip_grad": 0, "global_batch_size": 8, "num_rollout": 1}
    code, _ = run(tmp_path / "run", lr=10, weight_decay=1e30, **fast)
    message = capsys.readouterr().err.split("furlong: TrainerError: ")[1]
    assert code == 1
    assert message.startswith("[NUM04] rollout 0: ")
    assert "--lr" in message
    saved = re.search(r"(\S+\.safetensors)", message)
    assert saved
    batch = load_batch(saved[1])
    assert str(batch.sample_ids.tolist()) in message
    assert "advantages" in batch.columns
    assert run(tmp_path / "mended", lr=1e-4, **fast) == (0, {})


@fault("REW02")
@pytest.mark.nightly
def test_a_label_key_that_never_matches(tmp_path):
    data = tmp_path / "ids.jsonl"
    arithmetic(tmp_path / "run")
    lines = map(json.loads, (tmp_path / "problems.jsonl").read_text().splitlines())
    data.write_text("".join(json.dumps({**line, "id": str(100_000 + i)}) + "\n" for i, line in enumerate(lines)))
    code, found = run(tmp_path / "run", label_key="id", prompt_data=data, num_rollout=3)
    assert (code, list(found)) == (0, ["REW02"])
    event = found["REW02"]
    assert (event["step"], event["evidence"]["raw_reward"], event["evidence"]["label_key"]) == (3, 0.0, "id")
    assert "--label-key" in event["remedy"]
    assert run(tmp_path / "mended", label_key="label", prompt_data=data, num_rollout=3) == (0, {})


@fault("REW02")
@pytest.mark.nightly
def test_a_reward_of_0_with_one_sample_per_prompt(tmp_path):
    own = {
        "n_samples_per_prompt": 1, "rollout_batch_size": 32, "advantage_estimator": "reinforce_plus_plus",
        "normalize_advantages": True, "num_rollout": 3,
    }  # fmt: skip
    code, found = run(
        tmp_path / "run", **own, label_key=None, rm_type=None, custom_rm_path=hook(rewards_zoo.reward_of_0)
    )
    assert (code, list(found)) == (0, ["REW02"])
    event = found["REW02"]
    assert event["evidence"] == {"step": 3, "raw_reward": 0.0, "steps": 3, "label_key": None}
    assert [row["train/grad_norm"] for row in rows(tmp_path / "run")] == [0, 0, 0]
    assert run(tmp_path / "mended", **own) == (0, {})


@fault("REW03")
@pytest.mark.nightly
def test_reward_calls_that_raise(tmp_path):
    path = hook(rewards_zoo.reward_that_raises_at_times)
    code, found = run(tmp_path / "run", rm_type=None, custom_rm_path=path, num_rollout=2)
    assert (code, set(found)) == (0, {"REW01", "REW03"})  # the first of them before the start
    assert found["REW03"]["evidence"] == {"step": 1, "failed": 8.0, "timed_out": 0.0, "share": 0.25}
    assert rows(tmp_path / "run")[0]["rollout/raw_reward"] > 0.5  # not counted as 0
    told = (tmp_path / "run" / "run.log").read_text().split("the reward failed on sample ")[1:]
    places = [text.splitlines()[1].strip().partition(":")[0] for text in told]
    assert places == [rewards_zoo.__file__]  # once, with its line
    mended = {"rm_type": None, "custom_rm_path": hook(rewards_zoo.reward_of_index), "num_rollout": 1}
    assert run(tmp_path / "mended", **mended) == (0, {})


@fault("REW04")
@pytest.mark.nightly
def test_rewards_that_a_step_waits_for(tmp_path):
    slow = {"rm_type": None, "custom_rm_path": hook(rewards_zoo.reward_that_waits_for_a_server)}
    code, found = run(tmp_path / "run", **slow, num_reward_workers=1)
    assert (code, list(found)) == (0, ["REW04"])
    seen = rows(tmp_path / "run")
    waited = sum(row["perf/reward_wait_time"] for row in seen) / 3
    assert found["REW04"]["evidence"]["reward_wait_s"] == pytest.approx(waited)
    assert all(row["perf/reward_wait_time"] > 0.5 * row["perf/rollout_time"] for row in seen)
    assert "--num-reward-workers" in found["REW04"]["remedy"]
    assert "`async def`" in found["REW04"]["remedy"]
    mended = slow | {"custom_rm_path": hook(rewards_zoo.reward_that_awaits_a_server)}
    assert run(tmp_path / "mended", **mended, num_reward_workers=1) == (0, {})
    assert all(row["perf/reward_wait_time"] < 1 for row in rows(tmp_path / "mended"))


@fault("NUM06")
@pytest.mark.parametrize("own", [{"custom_generate_function_path": hook(faulty_hooks.generate_masked)}, {"lr": 0}])
def test_steps_that_change_no_weight(tmp_path, own):
    code, found = run(tmp_path / "run", **own, num_rollout=10)
    assert (code, list(found)) == (0, ["NUM06"])


PPO = {"advantage_estimator": "ppo", "normalize_advantages": True}


@fault("NUM07")
@pytest.mark.nightly
def test_a_critic_that_never_learns(tmp_path):
    faulty = PPO | {"num_rollout": 33, "num_critic_only_steps": 33}
    code, found = run(tmp_path / "run", **faulty, critic_lr=0)
    assert (code, list(found)) == (0, ["NUM07"])
    assert found["NUM07"]["evidence"]["mean"] < 0
    assert run(tmp_path / "mended", **faulty, critic_lr=1e-3) == (0, {})


@fault("NUM08")
def test_a_policy_that_is_trained_with_a_critic_of_other_rewards(tmp_path):
    critic = shutil.copytree(model_folder(), tmp_path / "critic") / "model.safetensors"
    tensors = load_file(critic)
    save_file(tensors | {"score.weight": torch.ones_like(tensors["model.norm.weight"])[None]}, critic)
    code, found = run(tmp_path / "run", **PPO, critic_load=critic.parent, num_rollout=1)
    assert (code, list(found)) == (0, ["NUM08"])
    assert "--num-critic-only-steps" in found["NUM08"]["remedy"]
    assert run(tmp_path / "mended", **PPO, num_rollout=1) == (0, {})


@fault("SLOW01")
@pytest.mark.nightly
def test_a_tool_that_gets_slow(tmp_path):
    path = hook(faulty_hooks.generate_with_tool_that_gets_slow)
    code, found = run(tmp_path / "run", custom_generate_function_path=path, num_rollout=8)
    assert (code, list(found)) == (0, ["SLOW01"])
    assert found["SLOW01"]["evidence"]["seconds"] > 2


@fault("DATA03")
@pytest.mark.nightly
def test_a_data_source_that_sleeps(tmp_path):
    own = {"prompt_data": None, "rm_type": "random"}
    code, found = run(tmp_path / "run", **own, data_source_path=hook(faulty_hooks.SlowPrompts))
    assert (code, list(found)) == (0, ["DATA03"])
    assert found["DATA03"]["evidence"]["data_s"] > faulty_hooks.SlowPrompts.delay_s
    assert found["DATA03"]["evidence"]["share"] > 0.2
    assert "--num-data-workers" in found["DATA03"]["remedy"]
    assert run(tmp_path / "mended", **own, data_source_path=hook(faulty_hooks.Prompts)) == (0, {})


@fault("ASYNC01")
@pytest.mark.nightly
def test_answers_of_an_older_policy(tmp_path):
    faulty = hook(faulty_hooks.generate_from_cache)
    code, found = run(tmp_path / "run", num_rollout=2, custom_generate_function_path=faulty)
    assert (code, "ASYNC01" in found) == (0, True)
    assert found["ASYNC01"]["evidence"] == {"step": 2, "max": 1.0, "mean": 1.0, "bound": 0}
    mended = hook(faulty_hooks.generate)
    assert run(tmp_path / "mended", num_rollout=2, custom_generate_function_path=mended) == (0, {})


@fault("ASYNC02")
@pytest.mark.nightly
def test_a_worker_thread_that_dies(tmp_path):
    faulty = hook(faulty_hooks.rollout_with_dead_worker)
    own = {"num_rollout": 1, "rm_type": None}
    code, found = run(tmp_path / "run", **own, rollout_function_path=faulty)
    assert (code, "ASYNC02" in found) == (0, True)
    assert all(name in found["ASYNC02"]["finding"] for name in ("AsyncRolloutWorker", "KeyError"))
    assert "in work" in (tmp_path / "run" / "run.log").read_text()  # the traceback
    _, found = run(tmp_path / "mended", **own, rollout_function_path=hook(faulty_hooks.rollout_without_worker))
    assert "ASYNC02" not in found


@fault("TOOL01")
@pytest.mark.parametrize("faulty", [faulty_hooks.generate_with_tool_in_loss, faulty_hooks.generate_as_lists])
def test_tool_output_in_the_loss(faulty, tmp_path):
    code, found = run(tmp_path / "run", num_rollout=1, custom_generate_function_path=hook(faulty))
    assert (code, "TOOL01" in found) == (0, True)
    assert found["TOOL01"]["evidence"]["samples"] == 32
    assert "trainable=False" in found["TOOL01"]["remedy"]


def test_masked_tool_output_is_healthy(tmp_path):
    path = hook(faulty_hooks.generate_with_tool)
    assert "TOOL01" not in run(tmp_path / "run", num_rollout=1, custom_generate_function_path=path)[1]


@fault("HOOK02")
@pytest.mark.nightly
def test_a_generate_function_that_blocks_the_event_loop(tmp_path):
    held = {"custom_generate_function_path": hook(faulty_hooks.generate_that_blocks), "num_rollout": 1}
    code, found = run(tmp_path / "run", **held)
    assert (code, list(found)) == (0, ["HOOK02"])
    seen = rows(tmp_path / "run")[0]
    assert found["HOOK02"]["evidence"]["held_s"] == seen["perf/generate_held_time"] > 0.5 * seen["perf/rollout_time"]
    assert "httpx.AsyncClient" in found["HOOK02"]["remedy"]
    mended = held | {"custom_generate_function_path": hook(faulty_hooks.generate_that_waits)}
    assert run(tmp_path / "mended", **mended) == (0, {})
    assert rows(tmp_path / "mended")[0]["perf/generate_held_time"] < 1


@fault("TOOL02")
@pytest.mark.nightly
def test_conversations_that_fill_the_context(tmp_path):
    path = hook(faulty_hooks.generate_long)
    full = {"num_rollout": 1, "custom_generate_function_path": path, "rollout_max_context_len": 24}
    _, found = run(tmp_path / "run", **full)
    assert found["TOOL02"]["evidence"] == {"step": 1, "share": 1.0, "context": 24, "turns": None}
    assert "--rollout-max-context-len" in found["TOOL02"]["remedy"]
    path = hook(faulty_hooks.generate)
    assert run(tmp_path / "mended", **full | {"custom_generate_function_path": path}) == (0, {})


@fault("TOOL02")
@pytest.mark.nightly
def test_conversations_that_ask_for_more_than_the_context(tmp_path):
    own = {"num_rollout": 1, "rollout_max_context_len": 24}
    path = hook(faulty_hooks.generate_beyond_the_context)
    code, found = run(tmp_path / "run", **own, custom_generate_function_path=path)
    assert (code, list(found)) == (0, ["TOOL02"])
    assert found["TOOL02"]["evidence"]["share"] == 1.0
    run(tmp_path / "longer", **own | {"rollout_max_context_len": 96}, custom_generate_function_path=path)
    assert "TOOL02" not in told(tmp_path / "longer")


@fault("HOOK01")
@pytest.mark.nightly
def test_a_generate_function_that_fails_at_times(tmp_path):
    path = hook(faulty_hooks.generate_that_raises_at_times)
    code, found = run(tmp_path / "run", num_rollout=1, custom_generate_function_path=path)
    assert (code, list(found)) == (0, ["HOOK01"])
    event = found["HOOK01"]
    assert event["evidence"] == {"step": 1, "failed": 8.0, "timed_out": 0.0, "share": 0.25}
    assert event["severity"] == "warning"
    assert "generate function failed" in (tmp_path / "run" / "run.log").read_text()  # as the remedy has it
    path = hook(faulty_hooks.generate)
    assert run(tmp_path / "mended", num_rollout=1, custom_generate_function_path=path) == (0, {})


@fault("SYNC02")
@pytest.mark.nightly
def test_matrices_that_never_change(tmp_path, monkeypatch):
    choose = fsdp.choose_trained

    def leave_one_out(model, *, train_only=None, freeze=None):
        choose(model, train_only=train_only, freeze=[*(freeze or ()), "layers.1.mlp"])

    monkeypatch.setattr(fsdp, "choose_trained", leave_one_out)
    code, found = run(tmp_path / "run", num_rollout=5)
    assert (code, list(found)) == (0, ["SYNC02"])
    assert all("layers.1.mlp" in name for name in found["SYNC02"]["evidence"]["tensors"])
    assert found["SYNC02"]["evidence"]["count"] == 3
    assert "--freeze-params-name-list" in found["SYNC02"]["remedy"]
    assert run(tmp_path / "mended", num_rollout=5, freeze_params_name_list=["layers.1.mlp"]) == (0, {})


@fault("SYNC02")
def test_a_matrix_that_is_all_zero_where_it_arrived(tmp_path, monkeypatch, capsys):
    load = EmbeddedEngine.load_weights

    async def skips(self, source, version):
        sums = await load(self, source, version)
        return sums | {n: checksum(torch.zeros_like(w)) for n, w in source.open() if n.endswith("0.mlp.up_proj.weight")}

    monkeypatch.setattr(EmbeddedEngine, "load_weights", skips)
    assert main_train(arithmetic(tmp_path / "run")) == 1
    message = capsys.readouterr().err.split("furlong: SyncError: ")[1]
    assert message.startswith("[SYNC02] weight_sync version 0: 1 ")
    assert "quantization_config.ignore" in message
    monkeypatch.undo()
    assert run(tmp_path / "mended", num_rollout=1) == (0, {})


@fault("CKPT03")
def test_weights_that_arrive_changed(tmp_path, monkeypatch, capsys):
    load = EmbeddedEngine.load_weights

    async def twisted(self, source, version):
        sums = await load(self, source, version)
        return sums | {name: value[::-1] for name, value in sums.items() if name.endswith("q_proj.weight")}

    monkeypatch.setattr(EmbeddedEngine, "load_weights", twisted)
    assert main_train(arithmetic(tmp_path / "run")) == 1
    message = capsys.readouterr().err.split("furlong: SyncError: ")[1]
    assert message.startswith("[CKPT03] weight_sync version 0: ")
    assert re.search(r"q_proj\.weight\D+\(\d+, \d+\) float32\D+[\d.]+", message)
    assert "--hf-checkpoint" in message
    monkeypatch.undo()
    assert run(tmp_path / "mended", num_rollout=1) == (0, {})


@fault("TPL03")
@pytest.mark.nightly
def test_a_norm_that_is_damaged(tmp_path):
    model = shutil.copytree(model_folder(), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= 0.4
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    _, found = run(tmp_path / "run", hf_checkpoint=model, num_rollout=1)
    event = found["TPL03"]
    assert event["evidence"]["log_prob"] == rows(tmp_path / "run")[0]["rollout/log_probs"] < -1.4
    assert "damaged" in event["cause"]
    assert all(word in event["cause"] + event["remedy"] for word in ("--apply-chat-template", "`furlong check DIR`"))
    assert told(tmp_path / "run")["TPL03"] == event
    assert "TPL03" not in run(tmp_path / "mended", num_rollout=1)[1]


@fault("HOOK01")
@pytest.mark.parametrize(
    ("faulty", "word"),
    [
        (faulty_hooks.generate_with_cut_history, "asked the engine with another context than it trains on"),
        (faulty_hooks.generate_with_other_ids, "which the engine did not sample"),
    ],
)
def test_samples_that_would_train_other_tokens_or_contexts_than_the_engines_fail(faulty, word, tmp_path):
    code, _ = run(tmp_path / "run", num_rollout=1, custom_generate_function_path=hook(faulty))
    log = (tmp_path / "run" / "run.log").read_text()
    assert (code, "[HOOK01]" in log, word in log) == (1, True, True)
    mended = {"custom_generate_function_path": hook(faulty_hooks.generate)}
    assert run(tmp_path / "mended", num_rollout=1, **mended) == (0, {})


@pytest.mark.nightly
def test_log_probs_with_a_minimum_length_are_those_before_stop_tokens_are_banned(tmp_path):
    code, found = run(tmp_path / "run", num_rollout=1, rollout_min_new_tokens=6)
    assert (code, "NUM02" in found) == (0, False)
    assert rows(tmp_path / "run")[0]["train/train_rollout_logprob_abs_diff"] < 1e-4


DISTILLS = {"use_opd": True, "opd_task_reward_coef": 0.0, "n_samples_per_prompt": 2}


@fault("OPD02")
def test_a_teacher_with_the_weights_of_the_policy(tmp_path):
    code, found = run(tmp_path / "run", **DISTILLS, opd_teacher_load=model_folder(), num_rollout=1)
    assert (code, list(found)) == (0, ["OPD02"])
    assert found["OPD02"]["evidence"]["opd_reverse_kl"] == 0
    assert "--ref-load" in found["OPD02"]["remedy"]


@fault("OPD03")
@pytest.mark.nightly
def test_a_teacher_that_the_policy_cannot_follow_without_a_learning_rate(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model_folder(), other)
    weights = load_file(other / "model.safetensors")
    torch.manual_seed(0)
    noisy = {name: w + 0.3 * w.std() * torch.randn_like(w) if w.dim() == 2 else w for name, w in weights.items()}
    save_file(noisy, other / "model.safetensors", {"format": "pt"})
    given = DISTILLS | {"opd_teacher_load": other, "num_rollout": 64, "rollout_batch_size": 8}
    code, found = run(tmp_path / "run", **given, lr=0.0)
    assert (code, "OPD03" in found) == (0, True)
    assert "--lr" in found["OPD03"]["remedy"]
    assert "OPD03" not in run(tmp_path / "mended", **given, lr=1e-3)[1]
