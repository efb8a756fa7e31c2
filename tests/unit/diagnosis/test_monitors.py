"""Monitors on rows and events that were written by hand: values at both sides of each threshold."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import orjson
import pytest

from furlong.config import parse
from furlong.core.catalogue import CATALOGUE
from furlong.diagnosis.monitors.monitor import EventMonitor, Found, Reading, StepMonitor
from furlong.diagnosis.monitors.run_facts import Setting
from furlong.diagnosis.monitors.run_monitor import Watch
from furlong.diagnosis.monitors.table import MONITORS
from furlong.tracking.event_log import EventLog
from furlong.tracking.run_files import read_steps

GAP = "train/train_rollout_logprob_abs_diff"
ENGINE_KEEPS, TRAINER_TAKES = "memory/engine_kept_frac", "memory/trainer_peak_frac"


def read(*rows: dict[str, float], first: int = 1, **setting: Any) -> list[str]:
    """Ids told over these steps, in order."""
    reading = Reading(MONITORS, Setting(**setting))
    return [d.id for step, row in enumerate(rows, first) for d in reading.step(step, row)]


def heard(*events: dict[str, Any], **setting: Any) -> list[Any]:
    reading = Reading(MONITORS, Setting(**setting))
    return [d for event in events for d in reading.event(event)]


def test_every_monitor_is_of_a_row_that_is_told_while_a_run_goes_on() -> None:
    assert {monitor.id for monitor in MONITORS} <= {id for id, row in CATALOGUE.items() if "R" in row.moments}


@pytest.mark.parametrize(
    ("id", "bad", "good", "setting"),
    [
        ("STOP02", {"rollout/truncated_ratio": 0.9}, {"rollout/truncated_ratio": 0.89}, {}),
        ("NUM01", {"train/kl_loss": -2e-4}, {"train/kl_loss": 9e-5}, {}),
        ("NUM01", {"rollout/kl": 2.0}, {"rollout/kl": 0.0}, {"steps_per_rollout": 4}),
        ("NUM02", {GAP: 0.031}, {GAP: 0.029}, {}),
        ("NUM02", {GAP: 0.2, "rollout/staleness/max": 0.0}, {GAP: 0.2, "rollout/staleness/max": 1.0}, {}),
        ("NUM03", {"train/grad_norm": 101.0}, {"train/grad_norm": 99.0}, {}),
        ("NUM03", {"train/ppo_kl": 0.02}, {"train/ppo_kl": 1e-3}, {}),
        ("NUM05", {"train/routing_agreement": 0.89}, {"train/routing_agreement": 0.91}, {}),
        ("TPL03", {"rollout/log_probs": -0.81}, {"rollout/log_probs": -0.79}, {"has_chat_template": True}),
        ("REW03", {"rollout/reward_timed_out": 1.0}, {"rollout/reward_timed_out": 0.0}, {"num_samples": 64}),
        (
            "ASYNC01",
            {"rollout/staleness/max": 3.0, "rollout/staleness/mean": 1.0},
            {"rollout/staleness/max": 2.0, "rollout/staleness/mean": 2.0},
            {"max_staleness": 2},
        ),
        ("TOOL01", {"rollout/env_tokens_in_loss": 1.0}, {}, {}),
        (
            "TOOL02",
            {"rollout/context_full_frac": 0.1},
            {"rollout/context_full_frac": 0.09},
            {"has_custom_generation": True},
        ),
        ("MEM03", {ENGINE_KEEPS: 0.083, TRAINER_TAKES: 0.89}, {ENGINE_KEEPS: 0.084, TRAINER_TAKES: 0.869}, {}),
        ("MEM03", {"memory/trainer_kept_frac": 0.051}, {"memory/trainer_kept_frac": 0.049}, {}),
    ],
)
def test_a_value_is_told_beyond_its_threshold_only(id: str, bad: dict[str, float], good: dict[str, float], setting):
    assert read(bad, **setting) == [id]
    assert read(good, **setting) == []


@pytest.mark.parametrize(
    ("row", "setting"),
    [
        ({"train/kl_loss": 0.5}, {"steps_per_rollout": 2}),  # a mean over steps that move the policy
        ({"rollout/log_probs": -2.0}, {}),  # a base model
        ({"rollout/log_probs": -2.0}, {"has_chat_template": True, "temperature": 1.5}),
        ({GAP: 0.5}, {"has_old_policy": True, "steps_per_rollout": 2}),
        ({"train/ppo_kl": 0.5}, {"steps_per_rollout": 2}),
        ({"train/ppo_kl": 0.5}, {"has_old_policy": True}),
        ({"rollout/context_full_frac": 1.0}, {}),
        ({"rollout/staleness/max": 9.0, "rollout/staleness/mean": 1.5}, {"is_partial": True, "max_staleness": 1}),
        ({GAP: math.nan, "train/grad_norm": math.inf}, {}),
    ],
)
def test_what_a_setting_explains_is_not_told(row: dict[str, float], setting: dict[str, Any]) -> None:
    assert read(row, **setting) == []


def test_a_resumed_run_has_no_first_step() -> None:
    row = {"train/kl_loss": 2.0, "rollout/log_probs": -3.0, "rollout/truncated_ratio": 1.0}
    assert read(row, first=7, has_chat_template=True) == []
    assert read(row, first=7, first_step=7, has_chat_template=True) == ["TPL03", "STOP02", "NUM01"]


def test_a_reference_that_was_named_differs_with_an_info() -> None:
    setting = Setting(model="a", reference="b")
    [found] = Reading(MONITORS, setting).step(1, {"train/kl_loss": 0.5})
    assert (found.severity, "--ref-load b" in found.cause) == ("info", True)
    [found] = Reading(MONITORS, setting).step(1, {"train/kl_loss": 1.5})
    assert found.severity == "error"


def test_a_gradient_is_compared_with_those_before_it() -> None:
    usual = [{"train/grad_norm": 0.5 + 0.1 * (i % 3)} for i in range(12)]
    assert read(*usual, {"train/grad_norm": 20.0}) == ["NUM03"]
    assert read(*usual, {"train/grad_norm": 9.0}) == []
    assert read(*usual[:5], {"train/grad_norm": 20.0}) == []  # too few to compare with
    assert read(*[{"train/grad_norm": 0.0}] * 12, {"train/grad_norm": 1.0}) == []


def test_rewards_without_spread_are_told_after_three_steps_and_again_after_twelve() -> None:
    flat = {"rollout/raw_reward": 0.0, "rollout/zero_std_frac": 1.0}
    assert read(flat, flat, {"rollout/raw_reward": 0.1, "rollout/zero_std_frac": 0.9}, flat, flat) == []
    assert read(*[flat] * 11) == ["REW02"]
    assert read(*[flat] * 12) == ["REW02"] * 2
    reading = Reading(MONITORS, Setting(label_key="answer"))
    found = [d for step in (1, 2, 3) for d in reading.step(step, flat)]
    assert "every reward is 0 for 3 steps" in found[0].finding
    assert "--label-key answer" in found[0].cause
    reading = Reading(MONITORS, Setting())
    [solved] = [d for step in (1, 2, 3) for d in reading.step(step, flat | {"rollout/raw_reward": 1.0})]
    assert "harder data" in solved.remedy


@pytest.mark.parametrize(("compares", "n"), [(True, 1), (False, 1), (False, 4)])  # 4: no baseline of a group
def test_one_reward_for_all_samples_is_told_where_groups_say_nothing(compares: bool, n: int) -> None:
    setting = {"compares_in_groups": compares, "n_samples_per_prompt": n, "num_samples": 16}
    of_groups = {"rollout/zero_std_frac": 1.0} if n > 1 else {}
    flat = of_groups | {"rollout/raw_reward": 0.0, "rollout/reward_range": 0.0}
    assert read(*[flat] * 3, **setting) == []  # 48 samples: a hard task
    assert read(*[flat] * 4, **setting) == ["REW02"]
    assert read(*[flat] * 3, **setting | {"num_samples": 64}) == ["REW02"]
    assert read(*[flat | {"rollout/reward_range": 1.0}] * 9, **setting) == []  # prompts differ, -0.5 and 0.5
    assert read(*[flat, flat, flat | {"rollout/raw_reward": 1.0}] * 9, **setting) == []


def test_one_reward_for_all_samples_has_its_value_and_what_mends_it() -> None:
    def found(reward: float, **setting: Any) -> Any:
        reading = Reading(MONITORS, Setting(num_samples=64, compares_in_groups=False, **setting))
        row = {"rollout/raw_reward": reward, "rollout/reward_range": 0.0}
        [only] = [d for step in (1, 2, 3) for d in reading.step(step, row)]
        return only

    assert found(0.0).finding == "step 3: every reward is 0 for 3 steps in a row, so nothing is learned"
    assert found(0.0).cause == "The reward function never pays, or the task is too hard."
    assert "--label-key answer" in found(0.0, label_key="answer").cause
    assert "filter" not in found(1.0).remedy  # it would drop everything
    assert (found(-0.1).finding[:29], found(-0.1).cause[:31]) == (
        "step 3: every reward is -0.1 ",
        "The reward function gives the s",
    )


def test_rewards_whose_mean_is_0_are_not_all_0() -> None:
    reading = Reading(MONITORS, Setting())
    row = {"rollout/raw_reward": 0.0, "rollout/zero_std_frac": 1.0, "rollout/reward_range": 2.0}
    [found] = [d for step in (1, 2, 3) for d in reading.step(step, row)]
    assert "all samples of each group score the same" in found.finding


def test_a_setting_knows_whether_rewards_are_compared_in_groups() -> None:
    of = {"algo": {"advantage_estimator": "grpo", "rewards_normalization": True}}
    assert Setting.of_values(of).compares_in_groups
    assert not Setting.of_values({"algo": of["algo"] | {"rewards_normalization": False}}).compares_in_groups
    assert not Setting.of_values(
        {"algo": of["algo"] | {"advantage_estimator": "reinforce_plus_plus"}}
    ).compares_in_groups
    assert Setting.of_values({"algo": of["algo"] | {"advantage_estimator": "of a plugin"}}).compares_in_groups


def test_old_samples_that_over_sampling_left_behind_name_it() -> None:
    reading = Reading(MONITORS, Setting(is_partial=True, over_sampling=12))
    [found] = reading.step(1, {"rollout/staleness/max": 3.0, "rollout/staleness/mean": 2.0})
    assert found.remedy.startswith("lower --over-sampling-batch-size (it is 12)")


def test_another_finding_of_the_same_row_is_told_though_it_is_no_worse() -> None:
    flat = {"rollout/raw_reward": 0.0, "rollout/zero_std_frac": 1.0}
    learned = {"rollout/raw_reward": 0.5, "rollout/zero_std_frac": 0.5}
    solved = flat | {"rollout/raw_reward": 1.0}
    reading = Reading(MONITORS, Setting())
    rows = enumerate([*[flat] * 10, learned, *[solved] * 4])
    found = [d.finding for step, row in rows for d in reading.step(step, row)]
    assert [finding.partition(": ")[2][:17] for finding in found] == ["every reward is 0", "every reward is 1"]
    kl, gradient = {"train/ppo_kl": 5.0}, {"train/grad_norm": 200.0}
    assert read(gradient, gradient | kl) == ["NUM03"] * 2


def test_a_reward_that_collapses_is_told() -> None:
    good = [{"rollout/raw_reward": 0.5 + 0.1 * (i % 2), "rollout/zero_std_frac": 0.5} for i in range(15)]
    bad = [{"rollout/raw_reward": 0.01, "rollout/zero_std_frac": 0.5}] * 6
    assert read(*good, *bad) == ["REW02"]
    assert read(*good, *bad[:2], *good) == []


def test_times_of_data_publication_and_engines_are_told_over_several_steps() -> None:
    data = {"perf/data_time": 0.5, "perf/step_time": 2.0, "perf/wait_time_ratio": 0.6}
    assert read(data, data) == []
    assert read(data, data, data) == ["DATA03"]
    assert read(*[data | {"perf/wait_time_ratio": 0.1}] * 4) == []  # training does not wait for it
    assert read(*[data | {"perf/data_time": 0.3}] * 4) == []
    stalled = {"perf/data_time": 0.06, "perf/step_time": 0.1}  # once, by the collection of garbage or a busy machine
    quick = data | {"perf/data_time": 0.001, "perf/step_time": 0.05}
    assert read(quick, quick | stalled, quick, quick) == []
    assert read(*[quick | stalled] * 3) == ["DATA03"]
    assert read(quick, quick | {"perf/data_time": 1.5, "perf/step_time": 1.6}, quick) == ["DATA03"]
    slow = {"perf/update_weights_time": 11.0, "perf/step_time": 20.0}
    assert read(slow, slow, slow) == ["SYNC01"]
    assert read(*[slow | {"perf/step_time": 30.0}] * 3) == []
    load = {"engine/requests/max": 21.0, "engine/requests/mean": 10.0}
    assert read(*[load] * 5) == ["ENG04"]
    assert read(*[load | {"engine/requests/max": 19.0}] * 5) == []


@pytest.mark.parametrize(
    ("transport", "words", "others"),
    [
        ("nccl broadcast", "NCCL_TIMEOUT=1800 `ibstat` --colocate", "GLOO_ --update-weight-buffer-size"),
        ("gloo broadcast", "GLOO_SOCKET_IFNAME --colocate", "NCCL ibstat"),
        ("ipc", "--update-weight-buffer-size", "NCCL GLOO_ ibstat --colocate network"),
        ("disk", "--update-weight-disk-dir --update-weight-mode", "NCCL GLOO_ ibstat --colocate network"),
        ("disk delta", "--update-weight-disk-dir", "NCCL GLOO_ ibstat --colocate --update-weight-mode network"),
    ],
)
def test_weights_that_do_not_arrive_have_cause_and_way_out_of_their_transport(transport, words, others) -> None:
    event = {"event": "publication_timeout", "version": 1, "seconds": 3, "bucket": 0, "missing": ["http://x"]}
    [found] = heard(event | {"transport": transport})
    assert f"publication of version 1 by {transport}: bucket 0 did not arrive" in found.finding
    said = f"{found.cause} {found.remedy}"
    assert "(--update-weight-timeout)" in said
    assert [word for word in words.split() if word not in said] == []
    assert [word for word in others.split() if word in said] == []
    [earlier] = heard(event | {"group": "furlong-1"}, transport=transport.removesuffix(" broadcast"))
    assert (earlier.cause, earlier.remedy) == (found.cause, found.remedy)  # events of a version that did not say which


def test_slow_publications_and_hanging_ones_name_what_their_transport_depends_on() -> None:
    slow = {"perf/update_weights_time": 11.0, "perf/step_time": 20.0}

    def told(**setting: Any) -> str:
        reading = Reading(MONITORS, Setting(**setting))
        [found] = [d for step in (1, 2, 3) for d in reading.step(step, slow)]
        [hang] = heard({"event": "hang", "seconds": 9, "doing": "weights", "probable": "SYNC01"}, **setting)
        return f"{found.remedy} {hang.remedy}"

    by_disk = told(transport="disk")
    assert "raise --update-weights-interval; a faster file system" in by_disk
    assert "NCCL" not in by_disk
    assert "raise --update-weights-interval" not in told(transport="ipc", may_publish_less=False)
    assert {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= set(told(transport="nccl").replace(",", "").split())


def test_a_policy_that_moves_away_from_old_samples_is_told_within_the_bound() -> None:
    old = {GAP: 0.3, "rollout/staleness/max": 2.0, "rollout/staleness/mean": 2.0}
    fresh = {GAP: 0.0, "rollout/staleness/max": 0.0, "rollout/staleness/mean": 0.0}
    own: dict[str, Any] = {"max_staleness": 3, "rollouts_ahead": 2, "publishes_every": 2}
    assert read(fresh, *[old] * 7, **own) == []
    assert read(fresh, *[old] * 8, **own) == ["ASYNC01"]
    assert read(fresh, *[old | {GAP: 0.19}] * 9, **own) == []
    assert read(*[old] * 4, fresh, *[old] * 7, **own) == []
    assert read(fresh | {GAP: 0.15}, *[old] * 9, **own) == ["NUM02"]  # engine and trainer disagree, the policy less
    foreign = old | {"rollout/env_tokens_in_loss": 1.0}
    assert read(fresh, *[foreign] * 9, **own) == ["TOOL01"]
    reading = Reading(MONITORS, Setting(**own, may_use_tis=True, is_partial=True))
    [found] = [d for step in range(1, 10) for d in reading.step(step, old)]
    assert found.remedy == (
        "a lower --async-buffer-size (it is 2); --update-weights-interval 1 (it is 2); "
        "--mask-offpolicy-in-partial-rollout; a lower --lr; --use-tis, which corrects a part of it"
    )


def test_a_setting_knows_how_weights_go() -> None:
    def setting(*words: str) -> Setting:
        return Setting.of(parse(["--hf-checkpoint", "x", "--num-rollout", "1", *words]).config)

    assert setting().transport == "memory"
    assert setting("--rollout-num-gpus", "1").transport == "nccl"
    disk = ["--rollout-num-gpus", "1", "--update-weight-transport", "disk"]
    assert setting(*disk).transport == "disk"
    assert setting(*disk, "--update-weight-mode", "delta").transport == "disk delta"
    shared = setting("--colocate")
    assert (shared.transport, shared.may_publish_less, setting().may_publish_less) == ("ipc", False, True)


def test_rewards_that_steps_wait_for_are_told_after_three_of_them() -> None:
    slow = {"perf/reward_wait_time": 2.0, "perf/rollout_time": 3.0, "perf/wait_time_ratio": 0.6}
    assert read(slow, slow) == []
    assert read(slow, slow, slow) == ["REW04"]
    assert read(*[slow, slow | {"perf/reward_wait_time": 1.4}] * 3) == []  # not in each of three
    assert read(*[slow | {"perf/rollout_time": 4.1}] * 4) == []
    assert read(*[slow | {"perf/reward_wait_time": 0.9, "perf/rollout_time": 1.0}] * 4) == []
    assert read(*[slow | {"perf/wait_time_ratio": 0.1}] * 4) == []  # training does not wait for it
    assert read(*[{"perf/rollout_time": 3.0, "perf/wait_time_ratio": 0.6}] * 4) == []  # not measured


@pytest.mark.parametrize(
    ("setting", "timed_out", "ways"),
    [
        ({"num_reward_workers": 2}, 0.0, ["more --num-reward-workers (it is 2), up to the CPUs that are free"]),
        ({"has_custom_reward": True}, 0.0, ["more --num-reward-workers (it is 1), ", "if it waits for a server or "]),
        ({"asks_reward_server": True, "may_run_ahead": True}, 0.0, ["a faster server at ", "--async-buffer-size 1, "]),
        ({"asks_reward_server": True, "reward_timeout": 5.0}, 3.0, ["a lower --reward-timeout (it is 5 s) ", "a fast"]),
    ],
)
def test_slow_rewards_have_the_way_out_of_what_scores(setting, timed_out: float, ways: list[str]) -> None:
    row = {"perf/reward_wait_time": 2.0, "perf/rollout_time": 3.0, "perf/wait_time_ratio": 0.6}
    row["rollout/reward_timed_out"] = timed_out
    reading = Reading(MONITORS, Setting(**setting, num_samples=10_000))
    [found] = [d for step in (1, 2, 3) for d in reading.step(step, row) if d.id == "REW04"]
    told = found.remedy.split("; ")
    assert [way for way, begin in zip(told, ways, strict=False) if not way.startswith(begin)] == []
    assert len(told) == len(ways) + ("has_custom_reward" in setting)


def test_memory_of_the_machine_that_fills_up_is_told_in_time() -> None:
    def rows(used: float, a_step: float, count: int = 40) -> list[dict[str, float]]:
        return [{"perf/host_memory_frac": min(used + i * a_step, 1.0)} for i in range(count)]

    reading = Reading(MONITORS, Setting())
    [found, *_] = [d for step, row in enumerate(rows(0.3, 0.01), 1) for d in reading.step(step, row)]
    assert (found.id, found.evidence["step"]) == ("MEM04", 32)
    assert "61% of the machine's memory is in use, 30% 31 steps before; at this pace it is full in 38" in found.finding
    assert read(*rows(0.3, 0.01, 31)) == []
    assert read(*rows(0.1, 0.002)) == []  # slow growth: a cache that fills
    assert read(*rows(0.9, 0.0)) == []


def test_memory_that_grows_is_an_error() -> None:
    reading = Reading(MONITORS, Setting())
    found = [
        d for i, kept in enumerate((0.06, 0.07, 0.1), 1) for d in reading.step(i, {"memory/trainer_kept_frac": kept})
    ]
    assert [(d.id, d.severity) for d in found] == [("MEM03", "warning"), ("MEM03", "error")]
    assert "at first it was 6.0%" in found[1].finding
    assert "--sglang-mem-fraction-static 0.85" in found[1].remedy


def test_what_an_engine_keeps_is_told_where_it_comes_near_to_the_trainer_or_grows() -> None:
    """What served 512 sequences at once was 8 % of an H200 on which the trainer had 100 GB to spare."""
    assert read(*[{ENGINE_KEEPS: 0.083, TRAINER_TAKES: 0.25}] * 3) == []
    reading = Reading(MONITORS, Setting())
    [near] = reading.step(1, {ENGINE_KEEPS: 0.083, TRAINER_TAKES: 0.9})
    assert "keeps 8.3% of the device's memory during training; the trainer takes up to 90.0% beside it" in near.finding
    assert "--sglang-max-running-requests" in near.remedy
    assert near.severity == "warning"
    assert read(*({ENGINE_KEEPS: kept, TRAINER_TAKES: 0.25} for kept in (0.05, 0.07, 0.08))) == ["MEM03"]


def test_recorded_events_of_other_parts_are_told() -> None:
    why = "engine 2 at http://a:1: its process ended with code -9; the last lines of its log:\n    x\n    y"
    died = {"event": "engine_lost", "engine": 2, "url": "http://a:1", "why": why}
    [first, again] = heard(*[died] * 3)
    assert (first.id, first.severity) == ("ENG03", "error")
    assert first.finding == "engine 2 at http://a:1 was lost: its process ended with code -9"
    assert "--use-fault-tolerance" in first.remedy
    assert "engines were lost 2 times so far" in again.finding
    [restarted] = heard(died, restarts_engines=True)
    assert (restarted.severity, "started again" in restarted.finding) == ("warning", True)
    waiting = {"event": "placement_waiting", "seconds": 30, "asked": "8 GPUs", "free": 4, "lacking": "b: 4 of 8 free"}
    [found] = heard(waiting)
    assert (found.id, "asked 8 GPUs, free 4 (b: 4 of 8 free)" in found.finding) == ("GPU02", True)


def compared(version: int, *unchanged: str, changed: int = 5) -> dict[str, Any]:
    return {
        "event": "weights_compared",
        "version": version,
        "tensors": 9,
        "changed": changed,
        "unchanged": list(unchanged),
    }


def test_matrices_that_rest_while_others_change_are_told() -> None:
    still = [compared(v, "a.mlp.weight", "a.norm.weight", *(["b.weight"] if v == 2 else [])) for v in range(1, 5)]
    [found] = heard(*still)
    assert (found.id, found.evidence["tensors"]) == ("SYNC02", ["a.mlp.weight"])
    assert heard(*still[:3]) == []
    assert heard(*(compared(v, "a.mlp.weight", changed=0) for v in range(6))) == []  # nothing was trained
    assert heard(*still, frozen_parameters=("mlp",)) == []
    assert heard(*still, trained_parameters=("b",)) == []


def test_a_diagnosis_is_told_again_when_it_got_worse_by_its_factor() -> None:
    level = iter((1.0, 2.9, 3.0, 8.9, 9.0))
    sample = heard({"event": "worker_died", "worker": "x", "error": "E", "message": "m"})[0]
    reading = Reading([StepMonitor("ASYNC02", lambda _: Found(sample, next(level)), again=3)], Setting())
    assert [len(reading.step(step, {})) for step in range(5)] == [1, 0, 1, 0, 1]


class Rows:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append((step, metrics))

    def close(self) -> None: ...


def watch_in(folder: Path, trackers: Rows, **changes: Any) -> Watch:
    events = EventLog(folder / "events.jsonl")
    return Watch(Reading(MONITORS, Setting()), trackers=trackers, events=events, **changes)


def test_a_diagnosis_goes_to_the_log_the_events_and_the_trackers(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trackers = Rows()
    watch = watch_in(tmp_path, trackers)
    with caplog.at_level(logging.INFO):
        watch.log(1, {"rollout/truncated_ratio": 1.0})
        watch.log(2, {"rollout/truncated_ratio": 1.0})
        watch.notify("worker_died", worker="w", error="E", message="m")
        watch.log(3, {})
    watch.close()
    assert trackers.rows == [
        (1, {"rollout/truncated_ratio": 1.0, "diagnosis/STOP02": 1.0}),
        (2, {"rollout/truncated_ratio": 1.0}),
        (3, {"diagnosis/ASYNC02": 1.0}),
    ]
    assert [(r.levelname, r.message[:9]) for r in caplog.records] == [("WARNING", "[STOP02] "), ("ERROR", "[ASYNC02]")]
    story = [orjson.loads(line) for line in (tmp_path / "events.jsonl").read_bytes().splitlines()]
    assert [e["event"] for e in story] == ["step", "diagnosis", "step", "worker_died", "diagnosis", "step"]
    assert (story[1]["step"], story[1]["id"], story[1]["evidence"]["truncated_ratio"]) == (1, "STOP02", 1.0)
    assert not watch.stop_requested


@pytest.mark.parametrize(("asked", "row", "ends"), [
    ("warn", {GAP: 1.0}, False),
    ("stop", {GAP: 1.0}, True),
    ("stop", {"rollout/truncated_ratio": 1.0}, False),
    ("strict", {"rollout/truncated_ratio": 1.0}, True),
])  # fmt: skip
def test_what_ends_a_run_is_asked_for(tmp_path: Path, asked: Any, row: dict[str, float], ends: bool) -> None:
    watch = watch_in(tmp_path, Rows(), on_diagnosis=asked)
    watch.log(1, row)
    watch.close()
    assert watch.stop_requested == ends


def test_a_run_that_goes_on_remembers_what_was_told(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"rollout/truncated_ratio":1.0,"train/loss":null}\n{"step":2,"x":1}\n{"step":3,"half')
    trackers = Rows()
    watch = watch_in(tmp_path, trackers, earlier=lambda: read_steps(path.parent))
    watch.log(2, {"rollout/truncated_ratio": 1.0})
    watch.close()
    assert read_steps(path.parent) == [(1, {"rollout/truncated_ratio": 1.0}), (2, {"x": 1})]
    assert "diagnosis/STOP02" not in trackers.rows[0][1]


def test_a_monitor_that_fails_is_said_once_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monitors = [StepMonitor("NUM01", broken), EventMonitor("ENG03", "engine_lost", broken)]
    trackers = Rows()
    watch = Watch(Reading(monitors, Setting()), trackers=trackers, events=EventLog(tmp_path / "events.jsonl"))
    for step in (1, 2):
        watch.log(step, {"a": 1.0})
        watch.notify("engine_lost")
    watch.close()
    assert [row for _, row in trackers.rows] == [{"a": 1.0}] * 2
    assert [r.message[:9] for r in caplog.records] == ["[CHECK01]"] * 2


def test_the_setting_of_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("x")
    words = (
        f"--hf-checkpoint {tmp_path} --rollout-batch-size 4 --n-samples-per-prompt 8 --global-batch-size 16 "
        "--async-buffer-size 2 --update-weights-interval 3 --freeze-params-name-list a b --num-rollout 9 "
        "--use-kl-loss --start-rollout-id 5"
    )
    setting = Setting.of(parse(words.split()).config)
    assert (setting.num_samples, setting.steps_per_rollout, setting.max_staleness) == (32, 2, 4)
    for other in ("--debug-rollout-only", "--load-debug-rollout-data=x_{rollout_id}"):
        assert Setting.of(parse([*words.split(), other]).config).max_staleness == float("inf")
    assert (setting.first_step, setting.frozen_parameters) == (6, ("a", "b"))
    assert setting.has_chat_template
    assert setting.is_own_reference
    resumed = Setting.of(parse([*words.split(), "--load", "x", "--ref-load", "y"]).config)
    assert (resumed.first_step, resumed.is_own_reference) == (1, False)


def timed(*layers_s: float, cost: tuple[float, ...] = (), stages: int = 1, seconds: float = 1.0) -> dict[str, Any]:
    """One rollout's `ranks_timed`, in which each rank did the same, or `cost`."""
    per_cost_s = [own / c for own, c in zip(layers_s, cost or (1.0,) * len(layers_s), strict=True)]
    slowest = max(range(len(per_cost_s)), key=per_cost_s.__getitem__)
    of_one = {"slowest": slowest, "place": f"trainer rank {slowest}, on host-{slowest // 2}"}
    of_all = {"stages": stages, "layers_s": list(layers_s), "per_cost_s": per_cost_s}
    return {"event": "ranks_timed", "rollout": 7, "seconds": seconds, **of_all, **of_one}


def test_a_slow_rank_is_named_with_its_machine_and_factor() -> None:
    [found] = heard(*[timed(0.2, 0.2, 0.52, 0.2)] * 12)
    assert (found.id, found.evidence["ranks"]) == ("RANK01", [2])
    assert "trainer rank 2, on host-1 take 2.6 times as long" in found.finding
    assert "(0.52 s of 1 s a rollout, forward passes alone)" in found.finding


def test_all_ranks_of_a_slow_machine_are_named() -> None:
    uneven = [timed(0.2, 0.2, 0.4 + 0.1 * (i % 2), 0.45) for i in range(8)]
    [found] = heard(*uneven)
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
def test_ranks_that_keep_pace_are_not_told(events: list[dict[str, Any]]) -> None:
    assert heard(*events) == []


def test_log_probs_of_tokens_that_no_policy_sampled_are_told_once_as_what_they_are() -> None:
    row = {"rollout/env_tokens_in_loss": 32.0, GAP: 3.4, "rollout/log_probs": -3.4}
    assert read(row, has_chat_template=True) == ["TOOL01"]
    assert read(row | {"rollout/env_tokens_in_loss": 0.0}, has_chat_template=True) == ["TPL03", "NUM02"]
