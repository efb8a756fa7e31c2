"""Train with TRL's GRPOTrainer as `furlong reproduce` trains a row with furlong: model, prompts, rewards and budget.

Runs in an environment with TRL 1.16 and furlong: rewards are furlong's. Writes `metrics.jsonl` with furlong's names for
reward, response length and step time, and the trained model into `model`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer
from trl_rival import trl_config

from furlong.config.task_specs import TaskMixture, parse_tasks
from furlong.core.task_entries import task_entry
from furlong.rewards.algebra import math_score
from furlong.rewards.verifiers import task_score


class StepLog(TrainerCallback):
    """Writes a row per optimizer step: reward, tokens of responses, seconds."""

    def __init__(self, file: Path, num_samples: int) -> None:
        self.file, self.num_samples, self.began = file, num_samples, time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002  its signature
        """Start the clock."""
        if state.global_step == 0:
            self.began = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Append the row of the step that ended."""
        if logs is None or "reward" not in logs:
            return
        now = time.monotonic()
        row = {
            "step": state.global_step,
            "rollout/raw_reward": logs["reward"],
            "rollout/response_lengths": logs["completions/mean_length"],
            "train/global_batch_size": self.num_samples,
            "perf/step_time": now - self.began,
        }
        self.began = now
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")


def sums(path: Path) -> list[dict[str, Any]]:
    """Return the prompts of a JSONL file with `prompt` and `label`."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def task_rows(tasks: TaskMixture, count: int) -> list[dict[str, Any]]:
    """Return chat prompts of reasoning-gym, in furlong's order, with what their score needs."""
    rows = list[dict[str, Any]]()
    for i in range(count):
        task, index = tasks.row(i % tasks.size)
        question = task_entry(task.key, tasks.seed, index)["question"]
        rows.append({"prompt": [{"role": "user", "content": question}], "task": task.key, "index": index})
    return rows


def sum_reward(completions: list[str], label: list[str], **kwargs: Any) -> list[float]:  # noqa: ARG001  TRL's signature
    """Score sums as `--rm-type math` does."""
    return [float(math_score(text, right, {})) for text, right in zip(completions, label, strict=True)]


def task_reward(seed: int) -> Any:
    """Return a reward function that scores as `--rm-type reasoning_gym` does."""

    def score(completions: list[Any], task: list[str], index: list[int], **kwargs: Any) -> list[float]:  # noqa: ARG001
        return [
            task_score(text[0]["content"], None, {"reasoning_gym": key, "seed": seed, "index": i})
            for text, key, i in zip(completions, task, index, strict=True)
        ]

    return score


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--task", help="reasoning-gym:NAME?key=value, as --prompt-data of furlong")
    source.add_argument("--prompts", type=Path, help="JSONL of sums, with prompt and label")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts-per-step", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    num_samples = options.prompts_per_step * options.samples
    count = options.steps * options.prompts_per_step
    if options.task:
        tasks = parse_tasks(options.task)
        rows, reward = task_rows(tasks, count), task_reward(tasks.seed)
    else:
        rows, reward = sums(options.prompts), sum_reward
    has_gpu = torch.cuda.is_available()
    config = trl_config(
        options.out / "trl",
        samples=options.samples,
        new=options.max_new_tokens,
        lr=options.lr,
        max_steps=options.steps,
        use_cpu=not has_gpu,
        bf16=has_gpu,  # as furlong: float32 weights, computed with in bfloat16 on a GPU
        per_device_train_batch_size=num_samples,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
    )
    config.seed = options.seed
    config.weight_decay = 0.01  # furlong's default
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[StepLog(options.out / "metrics.jsonl", num_samples)],
    )
    trainer.train()
    trainer.model.save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")


if __name__ == "__main__":
    main()
