"""Folders of runs, as a run leaves them, with samples whose texts are hostile to a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from furlong.config.sections import Config
from furlong.core.batch import RolloutBatch
from furlong.core.outcome import Outcome
from furlong.core.sample import Group, Sample, Status
from furlong.data.ledger import FileLedger
from furlong.files.batch_file import save_batch
from furlong.files.sample_file import save_samples
from furlong.quickstart.quickstart import model_folder

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
START = 1_700_000_000.0


def sample_of(group: int, index: int, *, reward: float, response: str = "12", **more: Any) -> Sample:
    sample = Sample(group_index=group, index=index, prompt=f"{index}+1=", tokens=[1, 2, 3], label="4", **more)
    sample.append_response_tokens(tokens=[4, 5], log_probs=[-0.5, -2.0], text=response, version=group)
    sample.reward, sample.status = reward, Status.COMPLETED
    sample.outcome = Outcome.scored(reward)
    return sample


def agent_sample(group: int, index: int, last: str) -> Sample:
    messages = [
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "calculator"}]},
        {"role": "tool", "content": HOSTILE},
        {"role": "assistant", "content": last},
    ]
    return sample_of(group, index, reward=1.0, rollout_id=77, metadata={"messages": messages, "session_turns": 2})


def write_run(
    folder: Path, *, num_steps: int = 4, saves_samples: bool = True, ended: str = "end", **flags: Any
) -> Path:
    """Write a run of `num_steps` steps with two groups of two samples each, and an evaluation.

    With `save_debug_train_data` among the flags, training batches are written as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    template = str(folder / "rollouts" / "{rollout_id}.safetensors") if saves_samples else None
    values = {"hf_checkpoint": str(model_folder()), "num_rollout": num_steps, "save_debug_rollout_data": template}
    _write_config(folder, values | {"output_dir": str(folder)} | flags)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(num_steps + 1):
            row: dict[str, Any] = {"step": step} | ({"eval/held": step / 10} if step % 2 == 0 else {})
            if step:
                row |= {"rollout/raw_reward": step / 5, "train/loss": None, "perf/step_time": 1.0}
                row |= {"perf/train_wait_time": 0.5, "perf/train_time": 0.4}
                row |= {"perf/host_memory_frac": 0.1 + step / 100}
            file.write(json.dumps(row) + "\n")
    events: list[dict[str, Any]] = [{"event": "start", "version": "0.1.0"}]
    events += [{"event": "step", "step": step} for step in range(num_steps + 1)]
    events += [{"event": "diagnosis", "id": "REW02", "severity": "warning", "finding": HOSTILE, "cause": "c",
                "remedy": "set `a`", "evidence": {}, "step": step} for step in (1, 2)]  # fmt: skip
    events += [{"event": ended}] if ended else []
    with (folder / "events.jsonl").open("w") as file:
        for number, event in enumerate(events):
            file.write(json.dumps({"time": START + number, **event}) + "\n")
    _write_groups(folder, template, num_steps, flags.get("save_debug_train_data"))
    return folder


def write_sft_run(folder: Path) -> Path:
    """Write a run on demonstrations: no samples, no evaluation."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"hf_checkpoint": str(model_folder()), "loss_type": "sft_loss", "num_rollout": 2, "keep_samples": 20}
    _write_config(folder, values | {"output_dir": str(folder)})
    rows = [{"step": step, "train/nll": 2.0 / step, "perf/step_time": 1.0} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [{"event": "start"}, *({"event": "step", "step": step} for step in (1, 2)), {"event": "end"}]
    lines = [json.dumps({"time": START + number, **event}) for number, event in enumerate(events)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def _write_config(folder: Path, values: dict[str, Any]) -> None:
    from furlong.config.command_line import config_to_json

    sections = json.loads(config_to_json(Config()))
    sources: dict[str, str] = {}
    for flags in sections.values():
        for name in flags:
            if name in values:
                flags[name] = values[name]
            sources[name] = "flag" if name in values else "default"
    (folder / "config.json").write_text(json.dumps({"config": sections, "sources": sources}))


def _write_groups(folder: Path, template: str | None, num_steps: int, batches: str | None) -> None:
    ledger = FileLedger(folder / "ledger.jsonl")
    for rollout in range(num_steps):
        groups = [Group(2 * rollout + g, [], epoch=0, row=2 * rollout + g) for g in range(3 if not rollout else 2)]
        if rollout:
            groups = [Group(group.index + 1, [], epoch=0, row=group.row + 1) for group in groups]
        ledger.issued(groups, rollout)
        for group in groups[:2]:
            responses = (HOSTILE, f"answer {group.index}")
            group.samples = [
                sample_of(group.index, 10 * group.index + i, reward=float(i), response=text)
                for i, text in enumerate(responses)
            ]
            ledger.generated(group, rollout)
        if rollout == 0:
            ledger.dropped(groups[2], "zero_std")
            groups[0].samples = [agent_sample(0, 0, "two"), agent_sample(0, 0, "2")]
        ledger.trained([group.index for group in groups[:2]], rollout)
        if template is not None:
            save_samples(template.format(rollout_id=rollout), rollout, groups[:2])
        if batches is not None:
            _write_batch(Path(batches.format(rollout_id=rollout)), rollout, groups[:2])
    ledger.close()
    if template is not None:
        evaluated = Group(0, [sample_of(0, 0, reward=1.0, response="held out")])
        save_samples(template.format(rollout_id="eval_2"), 2, [evaluated], names=["held"])


def _write_batch(path: Path, rollout: int, groups: list[Group]) -> None:
    """Write the training batch of groups, in which trainer and engine differ by 0.05."""
    samples = [sample for group in groups for sample in group.samples]
    count = len(samples)
    lengths = np.array([sample.response_length for sample in samples])
    engine = np.concatenate([np.array(sample.rollout_log_probs, np.float32) for sample in samples])
    path.parent.mkdir(exist_ok=True)
    batch = RolloutBatch(
        rollout_id=rollout,
        tokens=np.concatenate([np.array(sample.tokens, np.int32) for sample in samples]),
        lengths=lengths + 3,
        response_lengths=lengths,
        loss_masks=np.ones(lengths.sum(), np.uint8),
        rewards=np.ones(count, np.float32),
        raw_rewards=np.ones(count, np.float32),
        group_ids=np.array([sample.group_index for sample in samples]),
        rollout_ids=np.arange(count),
        sample_ids=np.array([sample.index for sample in samples]),
        truncated=np.zeros(count, np.uint8),
        columns={
            "rollout_log_probs": engine, "train_log_probs": engine + np.float32(0.05),
            "train_entropy": np.full_like(engine, 1.5), "advantages": np.full_like(engine, -0.5),
        },
    )  # fmt: skip
    save_batch(path, batch)
