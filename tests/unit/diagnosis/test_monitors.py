"""Monitors on handwritten rows and events: values on both sides of each threshold."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import orjson
import pytest

from furlong.catalogue import CATALOGUE, Diagnosis
from furlong.config import parse
from furlong.config.command_line import config_from_values
from furlong.diagnosis.monitors import MONITORS
from furlong.diagnosis.monitors.monitor import Alert, EventMonitor, MonitorSuite, RunFacts, RunMonitor, StepMonitor
from furlong.errors import ENGINE_HANGS, ENGINE_UNANSWERED
from furlong.tracking.run_files import EventLog, read_steps

GAP = "train/train_rollout_logprob_abs_diff"
ENGINE_KEEPS, TRAINER_TAKES = "memory/engine_kept_frac", "memory/trainer_peak_frac"


CUSTOM = "own.py:generate"


SMALL_MODEL = {"has_chat_template": True, "vocab_size": 49_152, "num_parameters": 134_500_000}
LARGE_MODEL = SMALL_MODEL | {"vocab_size": 151_936, "num_parameters": 8_000_000_000}


def suite(
    *, has_chat_template: bool = False, vocab_size: int = 0, num_parameters: int = 0, **flags: Any
) -> MonitorSuite:
    return MonitorSuite(MONITORS, RunFacts(config_from_values(flags), has_chat_template, vocab_size, num_parameters))


def diagnose(*rows: dict[str, float], first: int = 1, **flags: Any) -> list[Diagnosis]:
    """Diagnoses of these steps, in order."""
    monitors = suite(**flags)
    return [d for step, row in enumerate(rows, first) for d in monitors.step(step, row)]


def read(*rows: dict[str, float], first: int = 1, **flags: Any) -> list[str]:
    """Ids of the diagnoses of these steps, in order."""
    return [d.id for d in diagnose(*rows, first=first, **flags)]


def diagnose_events(*events: dict[str, Any], **flags: Any) -> list[Diagnosis]:
    monitors = suite(**flags)
    return [d for event in events for d in monitors.event(event)]


def test_every_monitor_has_a_row_of_the_catalogue_for_running_runs() -> None:
    assert {monitor.id for monitor in MONITORS} <= {id for id, row in CATALOGUE.items() if "R" in row.moments}


@pytest.mark.parametrize(
    ("id", "bad", "good", "flags"),
    [
        ("STOP02", {"rollout/truncated_ratio": 0.9}, {"rollout/truncated_ratio": 0.89}, {}),
        ("NUM01", {"train/kl_loss": -2e-4}, {"train/kl_loss": 9e-5}, {}),
        ("NUM01", {"rollout/kl": 2.0}, {"rollout/kl": 0.0}, {"num_steps_per_rollout": 4}),
        ("NUM02", {GAP: 0.031}, {GAP: 0.029}, {}),
        ("NUM02", {GAP: 0.2, "rollout/staleness/max": 0.0}, {GAP: 0.2, "rollout/staleness/max": 1.0}, {}),
        ("NUM03", {"train/grad_norm": 101.0}, {"train/grad_norm": 99.0}, {}),
        ("NUM03", {"train/ppo_kl": 0.02}, {"train/ppo_kl": 1e-3}, {}),
        ("NUM05", {"train/routing_agreement": 0.89}, {"train/routing_agreement": 0.91}, {}),
        ("TPL03", {"rollout/log_probs": -4.6}, {"rollout/log_probs": -4.5}, SMALL_MODEL),
        ("TPL03", {"rollout/log_probs": -0.81}, {"rollout/log_probs": -0.79}, LARGE_MODEL),
        ("REW03", {"rollout/reward_timed_out": 1.0}, {"rollout/reward_timed_out": 0.0}, {"rollout_batch_size": 64}),
        (
            "ASYNC01",
            {"rollout/staleness/max": 3.0, "rollout/staleness/mean": 1.0},
            {"rollout/staleness/max": 2.0, "rollout/staleness/mean": 2.0},
            {"async_buffer_size": 2},
        ),
        ("TOOL01", {"rollout/env_tokens_in_loss": 1.0}, {}, {}),
        (
            "TOOL02",
            {"rollout/context_full_frac": 0.1},
            {"rollout/context_full_frac": 0.09},
            {"custom_generate_function_path": CUSTOM},
        ),
        ("MEM03", {ENGINE_KEEPS: 0.083, TRAINER_TAKES: 0.89}, {ENGINE_KEEPS: 0.084, TRAINER_TAKES: 0.869}, {}),
        ("MEM03", {"memory/trainer_kept_frac": 0.051}, {"memory/trainer_kept_frac": 0.049}, {}),
    ],
)
def test_values_beyond_a_threshold_are_reported(id: str, bad: dict[str, float], good: dict[str, float], flags):
    assert read(bad, **flags) == [id]
    assert read(good, **flags) == []


@pytest.mark.parametrize(
    ("row", "flags"),
    [
        ({"train/kl_loss": 0.5}, {"num_steps_per_rollout": 2}),  # a mean over steps that move the policy
        ({"rollout/log_probs": -9.0}, {"vocab_size": 49_152}),  # no chat format
        ({"rollout/log_probs": -2.0}, SMALL_MODEL),  # SmolLM2-135M-Instruct in its own format
        ({"rollout/log_probs": -9.0}, SMALL_MODEL | {"rollout_temperature": 1.5}),
        ({GAP: 0.5, "rollout/staleness/max": 1.0}, {"async_buffer_size": 1}),
        ({GAP: 0.5}, {"use_rollout_logprobs": True, "num_steps_per_rollout": 2}),
        ({"train/ppo_kl": 0.5}, {"num_steps_per_rollout": 2}),
        ({"train/ppo_kl": 0.5}, {"keep_old_actor": True}),
        ({"rollout/context_full_frac": 1.0}, {}),
        (
            {"rollout/staleness/max": 9.0, "rollout/staleness/mean": 1.5},
            {"partial_rollout": True, "async_buffer_size": 1},
        ),
        ({GAP: math.nan, "train/grad_norm": math.inf}, {}),
    ],
)
def test_values_that_flags_explain_are_not_reported(row: dict[str, float], flags: dict[str, Any]) -> None:
    assert read(row, **flags) == []


def test_a_resumed_run_has_no_first_step() -> None:
    row = {"train/kl_loss": 2.0, "rollout/log_probs": -6.0, "rollout/truncated_ratio": 1.0}
    assert read(row, first=7, **SMALL_MODEL) == []
    assert read(row, first=7, start_rollout_id=6, **SMALL_MODEL) == ["TPL03", "NUM01"]  # which may be why none ends


def test_kl_between_two_models_is_an_info(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    warm = {"hf_checkpoint": "a", "load": str(tmp_path)}
    finetuned, other = warm | {"load": "saved", "finetune": True}, {"hf_checkpoint": "a", "ref_load": "b"}
    for flags, start in ((warm, str(tmp_path)), (finetuned, "saved"), (other, "a")):
        [found] = diagnose({"train/kl_loss": 1.5}, **flags)
        assert (found.severity, f"starts from {start}," in found.cause) == ("info", True)
    [found] = diagnose({"train/kl_loss": 1.5}, **warm, ref_load=str(tmp_path))  # the reference is the start
    assert found.severity == "error"
    [found] = diagnose({"train/kl_loss": 1.5}, hf_checkpoint="a", load="saved")  # the first start of a resumable run
    assert found.severity == "error"


def test_a_gradient_is_compared_with_those_before_it() -> None:
    usual = [{"train/grad_norm": 0.5 + 0.1 * (i % 3)} for i in range(12)]
    assert read(*usual, {"train/grad_norm": 20.0}) == ["NUM03"]
    assert read(*usual, {"train/grad_norm": 9.0}) == []
    assert read(*usual[:5], {"train/grad_norm": 20.0}) == []  # too few to compare with
    assert read(*[{"train/grad_norm": 0.0}] * 12, {"train/grad_norm": 1.0}) == []


def test_rewards_without_spread_are_reported_after_three_steps_and_again_after_twelve() -> None:
    flat = {"rollout/raw_reward": 0.0, "rollout/zero_std_frac": 1.0}
    assert read(flat, flat, {"rollout/raw_reward": 0.1, "rollout/zero_std_frac": 0.9}, flat, flat) == []
    assert read(*[flat] * 11) == ["REW02"]
    assert read(*[flat] * 12) == ["REW02"] * 2
    [found] = diagnose(*[flat] * 3, label_key="answer")
    assert found.evidence == {"step": 3, "raw_reward": 0.0, "steps": 3, "label_key": "answer"}
    assert "every reward is 0" in found.finding
    assert "--label-key answer" in found.cause


def test_rewards_without_signal_refer_to_what_was_reported_before() -> None:
    flat = {"rollout/raw_reward": 0.0, "rollout/zero_std_frac": 1.0, "rollout/reward_range": 0.0}
    for severity, expected in (("warning", True), ("info", False)):
        monitors = suite()
        monitors.event({"event": "diagnosis", "id": "TPL01", "severity": severity, "evidence": {}})
        [found] = [d for step in range(1, 5) for d in monitors.step(step, flat)]
        assert ("TPL01" in found.cause, "TPL01" in found.remedy) == (expected, expected)
    rows = [flat | {"rollout/truncated_ratio": 1.0}] * 6
    assert read(*rows) == ["STOP02"]  # which is why no answer is right
    learned = {"rollout/raw_reward": 0.5, "rollout/zero_std_frac": 0.5, "rollout/reward_range": 1.0}
    falls = [learned | {"rollout/truncated_ratio": 0.0}] * 5
    assert read(*falls, *[flat | {"rollout/truncated_ratio": 0.0}] * 3, *rows) == ["REW02"]


def test_failures_of_samples_have_their_first_reason() -> None:
    monitors = suite(rollout_batch_size=8)
    monitors.event({"event": "sample_failed", "stage": "reward", "reason": "RuntimeError: 429\n  own.py:3 in f: f()"})
    [found] = monitors.step(1, {"rollout/reward_failed": 1.0})
    assert "first: RuntimeError: 429)" in found.finding
    [found] = suite(rollout_batch_size=8).step(
        1, {"rollout/reward_failed": 8.0, "rollout/dynamic_filter/drop_all_failed": 1.0}
    )
    assert "8 of about 72 reward calls" in found.finding


@pytest.mark.parametrize(("compares", "n"), [(True, 1), (False, 1), (False, 4)])  # 4: no baseline of a group
def test_one_reward_for_all_samples_is_reported_where_groups_are_not_compared(compares: bool, n: int) -> None:
    flags = {"rewards_normalization": compares, "n_samples_per_prompt": n, "rollout_batch_size": 16 // n}
    of_groups = {"rollout/zero_std_frac": 1.0} if n > 1 else {}
    flat = of_groups | {"rollout/raw_reward": 0.0, "rollout/reward_range": 0.0}
    assert read(*[flat] * 3, **flags) == []  # 48 samples: a hard task
    assert read(*[flat] * 4, **flags) == ["REW02"]
    assert read(*[flat] * 3, **flags | {"rollout_batch_size": 64 // n}) == ["REW02"]
    assert read(*[flat | {"rollout/reward_range": 1.0}] * 9, **flags) == []  # prompts differ, -0.5 and 0.5
    assert read(*[flat, flat, flat | {"rollout/raw_reward": 1.0}] * 9, **flags) == []


@pytest.mark.parametrize("reward", [0.5, 1.0, -0.1])
def test_any_reward_that_all_samples_have_is_named(reward: float) -> None:
    row = {"rollout/raw_reward": reward, "rollout/reward_range": 0.0}
    for of_groups in ({}, {"rollout/zero_std_frac": 1.0}):
        [found] = diagnose(*[row | of_groups] * 3, rollout_batch_size=64, rewards_normalization=bool(of_groups))
        assert f"every reward is {reward:g} for 3 steps" in found.finding
        assert "the same reward to any answer" in found.cause


def test_rewards_whose_mean_is_0_are_not_all_0() -> None:
    row = {"rollout/raw_reward": 0.0, "rollout/zero_std_frac": 1.0, "rollout/reward_range": 2.0}
    [found] = diagnose(*[row] * 3)
    assert "every reward is" not in found.finding


def test_another_kind_of_alert_of_the_same_row_is_reported_even_if_not_worse() -> None:
    flat = {"rollout/raw_reward": 0.0, "rollout/zero_std_frac": 1.0}
    learned = {"rollout/raw_reward": 0.5, "rollout/zero_std_frac": 0.5}
    solved = flat | {"rollout/raw_reward": 1.0}
    found = diagnose(*[flat] * 10, learned, *[solved] * 4)
    assert [(d.evidence["raw_reward"], d.evidence["step"]) for d in found] == [(0.0, 3), (1.0, 14)]
    kl, gradient = {"train/ppo_kl": 5.0}, {"train/grad_norm": 200.0}
    assert read(gradient, gradient | kl) == ["NUM03"] * 2


def test_a_reward_that_collapses_is_reported() -> None:
    good = [{"rollout/raw_reward": 0.5 + 0.1 * (i % 2), "rollout/zero_std_frac": 0.5} for i in range(15)]
    bad = [{"rollout/raw_reward": 0.01, "rollout/zero_std_frac": 0.5}] * 6
    assert read(*good, *bad) == ["REW02"]
    assert read(*good, *bad[:2], *good) == []


def test_slow_data_weight_updates_and_engines_are_reported_after_several_steps() -> None:
    data = {"perf/data_time": 0.5, "perf/step_time": 2.0, "perf/wait_time_ratio": 0.6}
    assert read(data, data) == []
    assert read(data, data, data) == ["DATA03"]
    assert read(*[data | {"perf/wait_time_ratio": 0.1}] * 4) == []  # training does not wait for it
    assert read(*[data | {"perf/data_time": 0.3}] * 4) == []
    stalled = {"perf/data_time": 0.06, "perf/step_time": 0.1}  # once, by the collection of garbage or a busy machine
    quick = data | {"perf/data_time": 0.001, "perf/step_time": 0.05}
    assert read(quick, quick | stalled, quick, quick) == []
    assert read(*[quick | stalled] * 3) == []  # less than a tenth of a second
    assert read(quick, quick | {"perf/data_time": 1.5, "perf/step_time": 1.6}, quick) == ["DATA03"]
    slow = {"perf/update_weights_time": 11.0, "perf/step_time": 20.0}
    assert read(slow, slow, slow) == ["SYNC01"]
    assert read(*[slow | {"perf/step_time": 30.0}] * 3) == []
    load = {"engine/requests/max": 21.0, "engine/requests/mean": 10.0}
    assert read(*[load] * 5) == ["ENG04"]
    assert read(*[load | {"engine/requests/max": 19.0}] * 5) == []


@pytest.mark.parametrize(
    ("transport", "present", "absent"),
    [
        ("nccl broadcast", "NCCL_SOCKET_IFNAME `ibstat` --colocate", "NCCL_TIMEOUT GLOO_ --update-weight-buffer-size"),
        ("gloo broadcast", "GLOO_SOCKET_IFNAME --colocate", "NCCL ibstat"),
        ("ipc", "--update-weight-buffer-size", "NCCL GLOO_ ibstat --colocate network"),
        ("disk", "--update-weight-disk-dir --update-weight-mode", "NCCL GLOO_ ibstat --colocate network"),
        ("disk delta", "--update-weight-disk-dir", "NCCL GLOO_ ibstat --colocate --update-weight-mode network"),
    ],
)
def test_weights_that_do_not_arrive_have_the_remedies_of_their_transport(transport, present, absent) -> None:
    event = {"event": "weight_update_timeout", "version": 1, "seconds": 3, "bucket": 0, "missing": ["http://x"]}
    [found] = diagnose_events(event | {"transport": transport})
    assert all(value in found.finding for value in ("version 1", transport, "bucket 0", "3 s", "http://x"))
    text = f"{found.cause} {found.remedy}"
    assert "(--update-weight-timeout)" in text
    assert [word for word in present.split() if word not in text] == []
    assert [word for word in absent.split() if word in text] == []
    flags = {"update_weight_transport": transport.removesuffix(" broadcast")}
    if transport == "disk delta":
        flags = {"update_weight_transport": "disk", "update_weight_mode": "delta"}
    [earlier] = diagnose_events(event | {"group": "furlong-1"}, **flags)
    assert (earlier.cause, earlier.remedy) == (found.cause, found.remedy)  # events of versions without `transport`


def test_slow_weight_updates_and_hangs_name_what_their_transport_depends_on() -> None:
    slow = {"perf/update_weights_time": 11.0, "perf/step_time": 20.0}

    def remedies(**flags: Any) -> tuple[str, str]:
        [found] = diagnose(*[slow] * 3, **flags)
        event = {"event": "hang", "seconds": 9, "doing": "weights are being updated", "updates_weights": True}
        [hang] = diagnose_events(event, **flags)
        assert "weights do not arrive (SYNC01)" in hang.remedy
        return found.remedy, hang.remedy

    by_disk, hang_by_disk = remedies(update_weight_transport="disk")
    assert "--update-weights-interval" in by_disk
    assert "--update-weight-disk-dir" in by_disk
    assert "--update-weight-disk-dir" in hang_by_disk
    assert "NCCL" not in by_disk + hang_by_disk
    [other] = diagnose_events({"event": "hang", "seconds": 9, "doing": "all threads are idle"})
    assert all(flag in other.remedy for flag in ("--reward-timeout", "--generate-timeout", "--on-hang stop"))
    assert "--update-weights-interval" not in remedies(update_weight_transport="ipc", offload_rollout=True)[0]
    by_nccl = remedies(update_weight_transport="nccl")[0]
    assert "NCCL_SOCKET_IFNAME" in by_nccl
    assert "GLOO_SOCKET_IFNAME" in by_nccl


def test_a_policy_that_moves_away_from_stale_samples_is_reported_within_the_bound() -> None:
    old = {GAP: 0.3, "rollout/staleness/max": 2.0, "rollout/staleness/mean": 2.0}
    fresh = {GAP: 0.0, "rollout/staleness/max": 0.0, "rollout/staleness/mean": 0.0}
    own: dict[str, Any] = {"async_buffer_size": 2, "update_weights_interval": 2}
    assert read(fresh, *[old] * 7, **own) == []
    assert read(fresh, *[old] * 8, **own) == ["ASYNC01"]
    assert read(fresh, *[old | {GAP: 0.19}] * 9, **own) == []
    assert read(*[old] * 4, fresh, *[old] * 7, **own) == []
    assert read(fresh | {GAP: 0.15}, *[old] * 9, **own) == ["NUM02"]  # engine and trainer disagree, the policy less
    foreign = old | {"rollout/env_tokens_in_loss": 1.0}
    assert read(fresh, *[foreign] * 9, **own) == ["TOOL01"]
    [found] = diagnose(*[old] * 9, **own, partial_rollout=True)
    assert found.evidence["mean_abs_diff"] == pytest.approx(0.3)


def test_waits_for_rewards_are_reported_after_three_steps() -> None:
    slow = {"perf/reward_wait_time": 2.0, "perf/rollout_time": 3.0, "perf/wait_time_ratio": 0.6}
    assert read(slow, slow) == []
    assert read(slow, slow, slow) == ["REW04"]
    assert read(*[slow, slow | {"perf/reward_wait_time": 1.4}] * 3) == []  # not in each of three
    assert read(*[slow | {"perf/rollout_time": 4.1}] * 4) == []
    assert read(*[slow | {"perf/reward_wait_time": 0.9, "perf/rollout_time": 1.0}] * 4) == []
    assert read(*[slow | {"perf/wait_time_ratio": 0.1}] * 4) == []  # training does not wait for it
    assert read(*[{"perf/rollout_time": 3.0, "perf/wait_time_ratio": 0.6}] * 4) == []  # not measured
    of_functions, of_servers = ("--num-reward-workers (now 3)", "async def"), ("--rm-url",)
    for flags, present, absent in (
        ({"rm_type": "math"}, of_functions, of_servers),
        ({"rm_type": "remote_rm", "custom_rm_path": CUSTOM}, of_functions, of_servers),
        ({"rm_type": "remote_rm"}, of_servers, of_functions),
        ({"rm_type": "boxed_remote_rm"}, of_servers, of_functions),
    ):
        [found] = diagnose(*[slow | {"rollout/reward_timed_out": 3.0}] * 3, num_reward_workers=3,
                           rollout_batch_size=10_000, **flags)[-1:]  # fmt: skip
        assert "(3 of this step timed out)" in found.remedy
        assert all(word in found.remedy for word in present)
        assert not any(word in found.remedy for word in absent)


def test_host_memory_that_fills_up_is_reported_in_time() -> None:
    def rows(used: float, a_step: float, count: int = 40) -> list[dict[str, float]]:
        return [{"perf/host_memory_frac": min(used + i * a_step, 1.0)} for i in range(count)]

    [found, *_] = diagnose(*rows(0.3, 0.01))
    assert (found.id, found.evidence["step"], found.evidence["steps_left"]) == ("MEM04", 32, 38)
    assert (found.evidence["used"], found.evidence["before"]) == (pytest.approx(0.61), 0.3)
    assert all(value in found.finding for value in ("61%", "30%", "31 steps", "38 steps"))
    assert read(*rows(0.3, 0.01, 31)) == []
    assert read(*rows(0.1, 0.002)) == []  # slow growth: a cache that fills
    assert read(*rows(0.9, 0.0)) == []


def test_retained_memory_that_grows_is_an_error() -> None:
    found = diagnose(*({"memory/trainer_kept_frac": kept} for kept in (0.06, 0.07, 0.1)))
    assert [(d.id, d.severity) for d in found] == [("MEM03", "warning"), ("MEM03", "error")]
    assert (found[1].evidence["part"], found[1].evidence["first"]) == ("trainer", 0.06)
    assert "6.0%" in found[1].finding
    assert "--sglang-mem-fraction-static 0.85" in found[1].remedy


def test_memory_that_an_engine_retains_is_reported_if_it_leaves_the_trainer_too_little_or_grows() -> None:
    """An engine that served 512 sequences at once kept 8 % of an H200 on which the trainer had 100 GB to spare."""
    assert read(*[{ENGINE_KEEPS: 0.083, TRAINER_TAKES: 0.25}] * 3) == []
    [near] = diagnose({ENGINE_KEEPS: 0.083, TRAINER_TAKES: 0.9})
    assert (near.evidence["part"], near.evidence["kept_frac"], near.evidence["peak_frac"]) == ("engine", 0.083, 0.9)
    assert all(value in near.finding for value in ("8.3%", "90.0%"))
    assert "--sglang-max-running-requests" in near.remedy
    assert near.severity == "warning"
    assert read(*({ENGINE_KEEPS: kept, TRAINER_TAKES: 0.25} for kept in (0.05, 0.07, 0.08))) == ["MEM03"]


def test_recorded_events_of_other_parts_are_reported() -> None:
    reason = "its process ended with code -9"
    died = {"event": "engine_lost", "engine": 2, "url": "http://a:1", "reason": reason}
    [first, again] = diagnose_events(*[died] * 3)
    assert (first.id, first.severity, first.evidence["lost"]) == ("ENG03", "error", 1)
    assert first.finding.count("engine 2 at http://a:1") == 1
    assert first.finding.endswith("its process ended with code -9")
    assert "--use-fault-tolerance" in first.remedy
    assert again.evidence["lost"] == 2
    for code in (ENGINE_HANGS, ENGINE_UNANSWERED):
        [coded] = diagnose_events(died | {"reason": "no answer", "code": code})
        assert coded.finding.endswith(": no answer")
        assert coded.cause not in (first.cause, CATALOGUE["ENG03"].cause)
    [restarted] = diagnose_events(died, use_fault_tolerance=True)
    assert (restarted.severity, "--use-fault-tolerance" in restarted.remedy) == ("warning", False)
    waiting = {"event": "placement_waiting", "seconds": 30, "asked": "8 GPUs", "free": 4, "lacking": "b: 4 of 8 free"}
    [found] = diagnose_events(waiting)
    assert found.id == "GPU02"
    assert all(value in found.finding for value in ("30 s", "8 GPUs", "(b: 4 of 8 free)"))


def compared(version: int, *unchanged: str, changed: int = 5) -> dict[str, Any]:
    event = {"event": "weights_compared", "version": version, "tensors": 9, "changed": changed}
    return event | {"unchanged": list(unchanged)}


def test_matrices_that_never_change_are_reported() -> None:
    still = [compared(v, "a.mlp.weight", "a.norm.weight", *(["b.weight"] if v == 2 else [])) for v in range(1, 5)]
    [found] = diagnose_events(*still)
    assert (found.id, found.evidence["tensors"]) == ("SYNC02", ["a.mlp.weight"])
    assert diagnose_events(*still[:3]) == []
    assert diagnose_events(*(compared(v, "a.mlp.weight", changed=0) for v in range(6))) == []  # nothing was trained
    assert diagnose_events(*still, freeze_params_name_list=("mlp",)) == []
    assert diagnose_events(*still, only_train_params_name_list=("b",)) == []


def test_a_diagnosis_is_reported_again_when_it_got_worse_by_its_factor() -> None:
    level = iter((1.0, 2.9, 3.0, 8.9, 9.0))
    sample = diagnose_events({"event": "worker_died", "worker": "x", "error": "E", "message": "m"})[0]
    monitors = MonitorSuite([StepMonitor("ASYNC02", lambda _: Alert(sample, next(level)), again=3)], RunFacts())
    assert [len(monitors.step(step, {})) for step in range(5)] == [1, 0, 1, 0, 1]


class Rows:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append((step, metrics))

    def close(self) -> None: ...


def monitor_in(folder: Path, trackers: Rows, **changes: Any) -> RunMonitor:
    return RunMonitor(suite(), trackers=trackers, events=EventLog(folder / "events.jsonl"), **changes)


def test_a_diagnosis_goes_to_the_log_the_events_and_the_trackers(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trackers = Rows()
    monitor = monitor_in(tmp_path, trackers)
    with caplog.at_level(logging.INFO):
        monitor.log(1, {"rollout/truncated_ratio": 1.0})
        monitor.log(2, {"rollout/truncated_ratio": 1.0})
        monitor.notify("worker_died", worker="w", error="E", message="m")
        monitor.log(3, {})
    monitor.close()
    assert trackers.rows == [
        (1, {"rollout/truncated_ratio": 1.0, "diagnosis/STOP02": 1.0}),
        (2, {"rollout/truncated_ratio": 1.0}),
        (3, {"diagnosis/ASYNC02": 1.0}),
    ]
    assert [(r.levelname, r.message[:9]) for r in caplog.records] == [("WARNING", "[STOP02] "), ("ERROR", "[ASYNC02]")]
    story = [orjson.loads(line) for line in (tmp_path / "events.jsonl").read_bytes().splitlines()]
    assert [e["event"] for e in story] == ["step", "diagnosis", "step", "worker_died", "diagnosis", "step"]
    assert (story[1]["step"], story[1]["id"], story[1]["evidence"]["truncated_ratio"]) == (1, "STOP02", 1.0)
    assert not monitor.stop_requested


def test_on_diagnosis_selects_what_ends_a_run(tmp_path: Path) -> None:
    error, warning = {GAP: 1.0}, {"rollout/truncated_ratio": 1.0}
    for asked, row, ends in (("warn", error, False), ("stop", error, True), ("stop", warning, False),
                             ("strict", warning, True)):  # fmt: skip
        monitor = monitor_in(tmp_path, Rows(), on_diagnosis=asked)
        monitor.log(1, row)
        monitor.close()
        assert monitor.stop_requested == ends


def test_a_resumed_run_remembers_what_was_reported(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"rollout/truncated_ratio":1.0,"train/loss":null}\n{"step":2,"x":1}\n{"step":3,"half')
    trackers = Rows()
    monitor = monitor_in(tmp_path, trackers, earlier=lambda: read_steps(path.parent))
    monitor.log(2, {"rollout/truncated_ratio": 1.0})
    monitor.close()
    assert read_steps(path.parent) == [(1, {"rollout/truncated_ratio": 1.0}), (2, {"x": 1})]
    assert "diagnosis/STOP02" not in trackers.rows[0][1]


def test_a_monitor_that_fails_is_logged_once_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monitors = [StepMonitor("NUM01", broken), EventMonitor("ENG03", "engine_lost", broken)]
    trackers = Rows()
    suite = MonitorSuite(monitors, RunFacts())
    monitor = RunMonitor(suite, trackers=trackers, events=EventLog(tmp_path / "events.jsonl"))
    for step in (1, 2):
        monitor.log(step, {"a": 1.0})
        monitor.notify("engine_lost")
    monitor.close()
    assert [row for _, row in trackers.rows] == [{"a": 1.0}] * 2
    assert [r.message[:9] for r in caplog.records] == ["[CHECK01]"] * 2


def test_the_facts_of_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("x")
    words = (
        f"--hf-checkpoint {tmp_path} --rollout-batch-size 4 --n-samples-per-prompt 8 --global-batch-size 16 "
        "--num-rollout 9 --use-kl-loss --start-rollout-id 5"
    )
    facts = RunFacts.of(parse(words.split()).config)
    assert (facts.num_samples, facts.first_step) == (32, 6)
    assert facts.has_chat_template
    assert facts.reference == facts.initial_weights
    resumed = RunFacts.of(parse([*words.split(), "--load", "x", "--ref-load", "y"]).config)
    assert (resumed.first_step, resumed.reference) == (1, "y")


def timed(*layers_s: float, cost: tuple[float, ...] = (), stages: int = 1, seconds: float = 1.0) -> dict[str, Any]:
    """One rollout's `ranks_timed`, in which each rank did the same, or `cost`."""
    per_cost_s = [own / c for own, c in zip(layers_s, cost or (1.0,) * len(layers_s), strict=True)]
    slowest = max(range(len(per_cost_s)), key=per_cost_s.__getitem__)
    of_one = {"slowest": slowest, "place": f"trainer rank {slowest}, on host-{slowest // 2}"}
    of_all = {"stages": stages, "layers_s": list(layers_s), "per_cost_s": per_cost_s}
    return {"event": "ranks_timed", "rollout": 7, "seconds": seconds, **of_all, **of_one}


def test_a_slow_rank_is_named_with_its_machine_and_factor() -> None:
    [found] = diagnose_events(*[timed(0.2, 0.2, 0.52, 0.2)] * 12)
    assert (found.id, found.evidence["ranks"]) == ("RANK01", [2])
    assert (found.evidence["ratio"], found.evidence["seconds"]) == (pytest.approx(2.6), 0.52)
    assert all(value in found.finding for value in ("trainer rank 2, on host-1", "2.6 times", "0.52 s of 1 s"))


def test_all_ranks_of_a_slow_machine_are_named() -> None:
    uneven = [timed(0.2, 0.2, 0.4 + 0.1 * (i % 2), 0.45) for i in range(8)]
    [found] = diagnose_events(*uneven)
    assert found.evidence["ranks"] == [2, 3]
    assert "trainer rank 2, on host-1; trainer rank 3, on host-1" in found.finding


@pytest.mark.parametrize(
    "events",
    [
        [timed(0.2, 0.4)] * 7,  # not long enough to tell
        [timed(0.2, 0.28)] * 12,
        [timed(*((0.2, 0.6) if i % 4 else (0.3, 0.3))) for i in range(16)],
        [timed(*((0.2, 0.9) if i % 2 else (0.9, 0.2))) for i in range(16)],  # a loaded machine: now one, now the other
        [timed(0.2, 0.2)] * 4 + [timed(0.2, 60.0)] + [timed(0.2, 0.2)] * 7,  # one compiled, or paused once
        [timed(0.2, 0.5, cost=(1.0, 2.5))] * 12,  # more to do
        [timed(0.2, 0.1, cost=(1.0, 0.1))] * 12,  # little to do, at a bad rate: nobody waits for it
        [timed(0.2, 0.2, 0.6, 0.6, stages=2)] * 12,  # another stage has other layers
        [timed(0.02, 0.05, seconds=2.0)] * 12,  # most of the time goes elsewhere
        [timed(0.002, 0.02, seconds=0.03)] * 12,  # a toy
        [timed(0.2, 0.0, cost=(1.0, 1.0))] * 12,
    ],
)
def test_ranks_without_a_lasting_lag_are_not_reported(events: list[dict[str, Any]]) -> None:
    assert diagnose_events(*events) == []


def test_log_probs_of_tokens_that_no_policy_sampled_are_reported_only_as_tool01() -> None:
    row = {"rollout/env_tokens_in_loss": 32.0, GAP: 3.4, "rollout/log_probs": -6.0}
    assert read(row, **SMALL_MODEL) == ["TOOL01"]
    assert read(row | {"rollout/env_tokens_in_loss": 0.0}, **SMALL_MODEL) == ["TPL03", "NUM02"]


def test_low_log_probs_of_tokens_that_the_model_did_not_choose_are_not_those_of_its_template() -> None:
    row = {"rollout/log_probs": -6.0}
    assert read(row, **SMALL_MODEL) == ["TPL03"]
    assert read(row, **SMALL_MODEL, rollout_min_new_tokens=6) == []
    [small], [large] = diagnose(row, **SMALL_MODEL), diagnose({"rollout/log_probs": -1.2}, **LARGE_MODEL)
    assert (small.severity, large.severity) == ("warning", "info")  # a base model may be so uncertain
    assert small.evidence["share_of_chance"] == pytest.approx(6 / math.log(49_152))


@pytest.mark.parametrize("name", ["train/ppo_kl", "train/kl_loss"])
def test_the_steps_that_a_rollout_had_decide_and_not_the_flags(name: str) -> None:
    """Rollouts that were generated ahead of a resume with a smaller batch have several steps, later ones have one."""
    ahead, later = {name: 0.05, "train/num_steps": 4.0}, {name: 0.05, "train/num_steps": 1.0}
    assert read(ahead, load="save") == []
    assert len(read(later, load="save")) == len(read(later, load="save", num_steps_per_rollout=4)) == 1


def test_a_gap_that_rounding_explains_is_reported_only_above_its_limit() -> None:
    first = {GAP: 0.06, "selftest/share/numerics": 1.0, "selftest/logp_rounding_limit": 0.08}
    assert read(first, *[{GAP: 0.07}] * 200) == []  # also when the self-test is no longer among the recent steps
    assert read(first, {GAP: 0.09}) == ["NUM02"]
    assert read(first | {"selftest/share/numerics": 0.4, "selftest/share/stale_version": 0.6}) == ["NUM02"]
    [found] = diagnose(first | {GAP: 0.2})
    assert "normal: below 0.08" in found.finding


@pytest.mark.parametrize(
    ("gap", "cause", "use_tis", "severity"),
    [
        (0.05, "unexplained", True, "info"),
        (0.05, "unexplained", False, "warning"),
        (0.2, "numerics", True, "error"),
        (0.05, "stale_version", True, "warning"),
    ],
)
def test_a_small_gap_of_numerics_that_is_corrected_is_an_info(gap: float, cause: str, use_tis: bool, severity: str):
    [found] = diagnose({GAP: gap, f"selftest/share/{cause}": 1.0}, use_tis=use_tis)
    assert found.severity == severity


def test_a_few_samples_are_not_called_truncated_or_without_spread() -> None:
    cut, flat = {"rollout/truncated_ratio": 1.0}, {"rollout/raw_reward": 0.0, "rollout/zero_std_frac": 1.0}
    few = {"rollout_batch_size": 2, "n_samples_per_prompt": 2}
    assert read(*[cut] * 7, **few) == []
    assert read(*[cut] * 8, **few) == ["STOP02"]  # 32 samples
    assert read({"rollout/truncated_ratio": 0.5}, *[cut] * 7, **few) == []
    assert read(cut, rollout_batch_size=4, n_samples_per_prompt=4) == []
    assert read(cut, cut, rollout_batch_size=4, n_samples_per_prompt=4) == ["STOP02"]
    assert read({"rollout/truncated_ratio": 0.92}, rollout_batch_size=16, n_samples_per_prompt=8) == ["STOP02"]
    assert read(*[flat] * 15, **few) == []  # a hard task
    assert read(*[flat] * 16, **few) == ["REW02"]
    ended = {"rollout/truncated_ratio": 0.0}
    assert read(*[ended] * 9, *[cut] * 2) == []
    assert read(*[ended] * 9, *[cut] * 3) == ["STOP02"]
    assert read(*[ended] * 9, *[cut] * 23, **few) == []
    assert read(*[ended] * 9, *[cut] * 24, **few) == ["STOP02"]  # 96 samples
    assert read(*[{"rollout/truncated_ratio": 0.4}] * 9, *[cut] * 20) == []  # a tight limit
    [broken] = diagnose(ended, *[cut] * 3)
    assert "(0% in the first step)" in broken.finding
    assert ("--lr" in broken.remedy, "--rollout-stop" in broken.remedy) == (True, False)  # training caused it


def test_the_mean_gap_of_a_few_tokens_is_not_reported() -> None:
    of_tokens = {"rollout_batch_size": 2, "n_samples_per_prompt": 1}
    assert read({GAP: 0.2, "rollout/response_len/mean": 3.0}, **of_tokens) == []
    assert read({GAP: 0.2, "rollout/response_len/mean": 16.0}, **of_tokens) == ["NUM02"]


def test_steps_that_change_nothing_have_the_cause_that_the_metrics_prove() -> None:
    still = {"train/grad_norm": 0.0, "rollout/zero_std_frac": 0.3, "rollout/reward_range": 1.0}
    assert read(*[still] * 7) == []
    [found] = diagnose(*[still] * 20)
    assert (found.id, found.evidence["step"], "Advantages or loss masks are 0" in found.cause) == ("NUM06", 8, True)
    [function] = diagnose(*[still] * 20, custom_advantage_function_path="own.py:f")
    assert function.cause.startswith("--custom-advantage-function-path returns")
    [stale] = diagnose(*[still | {"rollout/staleness/masked_frac": 1.0}] * 8)
    assert "--max-token-staleness" in stale.remedy
    [masked] = diagnose(*[still | {"rollout/response_len/mean": 0.0}] * 8)
    assert "loss masks" in masked.remedy
    assert read(*[still | {"rollout/zero_std_frac": 1.0}] * 2, *[still] * 7) == []
    assert read(*[still] * 7, still | {"train/grad_norm": 0.01}, *[still] * 7) == []
    assert read(*[{"train/grad_norm": 0.0}] * 8, loss_type="sft_loss") == ["NUM06"]


def test_weight_updates_that_change_nothing_are_reported() -> None:
    row = {"train/grad_norm": 0.2, "rollout/zero_std_frac": 0.3, "rollout/reward_range": 1.0}

    def found(changed: list[int]) -> list[str]:
        monitors = suite()
        ids: list[str] = []
        for step, count in enumerate(changed, 1):
            names = [f"layers.{i}.w" for i in range(3)][count:]
            compared = {"version": step, "tensors": 3, "changed": count, "unchanged": names}
            ids += [d.id for d in monitors.event({"event": "weights_compared", **compared})]
            ids += [d.id for d in monitors.step(step, row)]
        return ids

    assert found([0] * 8) == ["NUM06"]
    assert found([0] * 7 + [1]) == found([3] * 9) == []


def test_a_rollout_is_slow_only_if_time_and_tokens_per_second_say_so() -> None:
    def rollout(seconds: float, rate: float, longest: float, **more: float) -> dict[str, float]:
        return {"perf/rollout_time": seconds, "perf/tokens_per_gpu_per_sec": rate,
                "perf/longest_sample_tokens_per_sec": longest, **more}  # fmt: skip

    usual, slow = rollout(0.3, 1000, 40), rollout(3.0, 100, 4)
    assert read(*[usual] * 5, *[slow] * 2, usual) == []
    [found] = diagnose(*[usual] * 5, *[slow] * 6)
    assert (found.id, found.evidence["usual_s"], found.evidence["seconds"]) == ("SLOW01", 0.3, 3.0)
    longer, shorter, straggler = rollout(3.0, 1000, 40), rollout(0.3, 100, 4), rollout(3.0, 100, 40)
    scored = rollout(3.0, 100, 4, **{"perf/reward_wait_time": 2.8})
    for other in (longer, shorter, straggler, scored):
        assert read(*[usual] * 5, *[other] * 6) == []
    assert read(*[usual] * 5, *[slow] * 6, dynamic_sampling_filter_path="own.py:f") == []


def test_a_mean_of_few_rewards_may_vary() -> None:
    def rows(*rewards: float) -> list[dict[str, float]]:
        return [{"rollout/raw_reward": reward, "rollout/zero_std_frac": 0.5} for reward in rewards]

    luck = rows(*[0.5, 0.25, 0.0] * 5, *[0.0, 0.25, 0.0, 0.0, 0.0], *[0.25, 0.0, 0.5] * 5, *[0.0] * 5)
    assert read(*luck, rollout_batch_size=2, n_samples_per_prompt=2) == []
    assert read(*luck, rollout_batch_size=64, n_samples_per_prompt=8) == ["REW02"]
    fallen = rows(*[0.5, 0.25, 0.75] * 10, *[0.0] * 12)
    assert read(*fallen, rollout_batch_size=2, n_samples_per_prompt=2) == ["REW02"]
