"""Trains the quickstart's model from Python: `python examples/python_api.py`, about a minute on a CPU."""

import furlong
from furlong.quickstart import addition
from furlong.quickstart.quickstart import model_folder

rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in addition.problems(5_000, seed=7)]


def right(response: str, label: str) -> float:
    """Return 1 for the right sum."""
    return float(response.removesuffix("<|im_end|>") == label)


run = furlong.train(
    model=model_folder(), prompt_data=rows, reward=right, num_rollout=40, rollout_max_response_len=8, lr=1e-4
)
print(f"{run.folder}: reward {run.rows[0]['rollout/raw_reward']:.2f} to {run.rows[-1]['rollout/raw_reward']:.2f}")
