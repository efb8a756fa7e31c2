"""Settings shared by the benchmarks against TRL: GRPO without KL, one AdamW step per rollout, random rewards.

Each script sets the rest: lengths, precision, engine and micro-batch size.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLIP, EPS_CLIP = 1.0, 0.2


def furlong_words(
    model: Path, data: Path, output: Path, *, prompts: int, samples: int, new: int, lr: float, **more: Any
) -> list[str]:
    """Return furlong's command line. `more` maps field names to flag values; True turns a switch on."""
    from furlong.inference.supervisor.launch import argv_from_options

    return argv_from_options(
        {
            "hf_checkpoint": model,
            "prompt_data": data,
            "input_key": "prompt",
            "label_key": "label",
            "rm_type": "random",
            "rollout_batch_size": prompts,
            "n_samples_per_prompt": samples,
            "global_batch_size": prompts * samples,
            "rollout_max_response_len": new,
            "lr": lr,
            "weight_decay": 0.0,
            "clip_grad": CLIP,
            "eps_clip": EPS_CLIP,
            "use_dynamic_batch_size": True,
            "output_dir": output,
            **more,
        }
    )


def trl_config(output: Path, *, samples: int, new: int, lr: float, max_steps: int, **more: Any) -> Any:
    """Return the GRPOConfig equivalent to these flags. `more` sets further GRPOConfig fields."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(output),
        num_generations=samples,
        max_completion_length=new,
        max_steps=max_steps,
        learning_rate=lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=CLIP,
        epsilon=EPS_CLIP,
        beta=0.0,
        loss_type="grpo",
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        **more,
    )


def random_reward() -> Callable[..., list[float]]:
    """Return a TRL reward function that draws 0 or 1, like `--rm-type random`."""
    rng = random.Random(0)

    def reward(completions: list[str], **kwargs: Any) -> list[float]:  # noqa: ARG001  TRL's signature
        return [float(rng.randrange(2)) for _ in completions]

    return reward
