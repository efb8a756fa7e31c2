"""The user functions of the Megatron backend are called at their moments, with what slime passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from furlong.errors import ConfigError
from runs import flags, train, write_model, write_prompts

pytest.importorskip("megatron", reason="megatron-core is not installed")
# megatron-core calls what PyTorch has deprecated
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

HOOKS = """
import json
from pathlib import Path

CALLS = Path(__file__).with_suffix(".jsonl")


def note(*words):
    with CALLS.open("a") as file:
        file.write(json.dumps(words) + "\\n")


def init(args):
    from megatron.core import parallel_state
    note("init", args.seed, parallel_state.get_tensor_model_parallel_world_size())


def provider(pre_process, post_process):
    from furlong.training.megatron.model_build import default_model
    note("provider", pre_process, post_process)
    model = default_model(pre_process, post_process)
    model.decoder.final_layernorm.register_forward_hook(lambda *_: note("forward"))
    return model


def wrong_provider(pre_process=True, post_process=True, vp_stage=None):
    return "a model"


def before_log_prob(args, model, store_prefix):
    note("log_prob", store_prefix, len(model))


def before_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    assert all(float(p.main_grad.abs().sum()) == 0 for chunk in model for p in chunk.parameters() if p.requires_grad)
    note("step", rollout_id, step_id, bool(optimizer.param_groups), opt_param_scheduler.lr(0) > 0)
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(HOOKS)
    write_model(tmp_path / "model", tie_word_embeddings=False)
    write_prompts(tmp_path / "prompts.jsonl")
    return tmp_path


def command(folder: Path, **changes) -> list[str]:
    settings = {"train_backend": "megatron", "num_rollout": 2, "num_steps_per_rollout": 2}
    return flags(folder / "model", folder / "prompts.jsonl", folder / "run", **settings | changes)


def calls(folder: Path) -> list[list]:
    return [json.loads(line) for line in (folder / "own.jsonl").read_text().splitlines()]


def test_hooks_of_megatron_run_in_slimes_order(files):
    own = files / "own.py"
    words = command(
        files,
        custom_megatron_init_path=f"{own}:init",
        custom_megatron_before_log_prob_hook_path=f"{own}:before_log_prob",
        custom_megatron_before_train_step_hook_path=f"{own}:before_step",
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k3",
    )
    assert train(words) == 2
    have = calls(files)
    assert (have[0][0], have[0][2]) == ("init", 1)
    steps = [call[1:] for call in have if call[0] == "step"]
    assert steps == [[rollout, step, True, True] for rollout in range(2) for step in range(2)]
    per_rollout = [call[0] if call[0] == "step" else f"log_prob {call[1]}".strip() for call in have[1:]]
    assert sorted(per_rollout[:2]) == ["log_prob", "log_prob ref_"]
    assert per_rollout[2:4] == ["step", "step"]
    assert per_rollout[4:] == per_rollout[:4]


def test_a_model_provider_may_change_the_model(files):
    assert train(command(files, custom_model_provider_path=f"{files / 'own.py'}:provider")) == 2
    assert calls(files)[0] == ["provider", True, True]
    assert calls(files).count(["forward"]) >= 4


def test_a_provider_of_something_else_is_refused(files):
    words = command(files, custom_model_provider_path=f"{files / 'own.py'}:wrong_provider")
    with pytest.raises(ConfigError, match=r"returned str, not a Megatron-core GPTModel; return what .*default_model"):
        train(words)
