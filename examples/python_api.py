"""Trains the quickstart's model from Python: `python examples/python_api.py`, about a minute on a CPU."""

from pathlib import Path

import furlong
from furlong.quickstart import addition
from furlong.quickstart.quickstart import model_folder

problems = Path("outputs/problems.jsonl")
problems.parent.mkdir(exist_ok=True)
addition.write_prompts(problems, addition.problems(5_000, seed=7))

run = furlong.train(
    hf_checkpoint=model_folder(),
    prompt_data=problems,
    input_key="prompt",
    label_key="label",
    rm_type="math",
    num_rollout=40,
    rollout_batch_size=32,
    n_samples_per_prompt=8,
    rollout_max_response_len=8,
    lr=1e-4,
)
print(f"{run.folder}: reward {run.rows[0]['rollout/raw_reward']:.2f} to {run.rows[-1]['rollout/raw_reward']:.2f}")
