"""Functions that flags name."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from furlong.chat.parsers import PARSERS
from furlong.config import Config
from furlong.config.command_line import config_from_values
from furlong.config.flag_spec import flag_specs
from furlong.config.hooks import HOOKS, Hooks, check_signature, load_hooks
from furlong.config.sections.sessions import TOOL_PARSERS
from furlong.core.user_functions import load_function, reward_style
from furlong.errors import ConfigError

SPECS = flag_specs(Config)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Write a module into a folder on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write_module(name: str, text: str) -> Path:
        file = tmp_path / f"{name}.py"
        file.write_text(textwrap.dedent(text))
        return file

    return write_module


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_function(path)
    return str(caught.value)


def test_a_function_is_loaded_by_module_and_by_file(write: Callable[[str, str], Path]) -> None:
    file = write("hooks_a", "def f(): return 3\nclass C:\n    @staticmethod\n    def g(): return 4\n")
    assert load_function("hooks_a.f")() == 3
    assert load_function("hooks_a:f")() == 3
    assert load_function("hooks_a:C.g")() == 4
    assert load_function(f"{file}:f")() == 3


def test_a_function_of_a_file_pickles(write: Callable[[str, str], Path]) -> None:
    function = load_function(f"{write('hooks_b', 'def f(): return 3')}:f")
    assert pickle.loads(pickle.dumps(function)) is function


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hook.py").write_text(f"def f(): return {name!r}")
    assert [load_function(f"{tmp_path / name / 'hook.py'}:f")() for name in ("one", "two")] == ["one", "two"]


def test_a_hook_that_cannot_be_loaded_names_the_reason(
    write: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "own_rewards").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])  # `furlong` starts without this folder
    Path("own_rewards/mine.py").touch()
    write("hooks_c", "def reward_func(): ...\nNUMBER = 3\n")
    write("hooks_d", "import no_such_library_at_all\n")
    write("hooks_e", "\nraise KeyError('boom')\n")
    assert "no module hooks_zz; put its folder on PYTHONPATH" in refusal("hooks_zz.f")
    assert "no module own_rewards; write own_rewards/mine.py:f" in refusal("own_rewards.mine.f")
    assert "hooks_c has no reward_fun; did you mean reward_func?" in refusal("hooks_c.reward_fun")
    assert "hooks_c.NUMBER is of type int, not a function" in refusal("hooks_c.NUMBER")
    assert "importing hooks_d needs the module no_such_library_at_all" in refusal("hooks_d.f")
    assert f"importing hooks_e raised KeyError: 'boom' at {tmp_path / 'hooks_e.py'}:2; fix" in refusal("hooks_e.f")
    assert f"no file {tmp_path / 'none.py'}" in refusal(f"{tmp_path / 'none.py'}:f")
    assert f"raised KeyError: 'boom' at {tmp_path / 'hooks_e.py'}:2; fix" in refusal(f"{tmp_path / 'hooks_e.py'}:f")
    assert "does not name a function" in refusal("reward")


# slime's documented signatures, as its users write them.
async def generate(args: Any, sample: Any, sampling_params: Any) -> Any: ...
async def generate_with_evaluation(args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> Any: ...
async def reward_func(args: Any, sample: Any, **kwargs: Any) -> float: ...
async def group_reward(args: Any, samples: Any, **kwargs: Any) -> list[float]: ...
def trl_reward(prompts: Any, completions: Any, **kwargs: Any) -> list[float]: ...
def trl_with_a_column(prompts: Any, completions: Any, solution: Any) -> list[float]: ...
def verifier(response: str, label: Any, metadata: dict[str, Any]) -> float: ...
def rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any: ...
def sample_hook(args: Any, sample: Any, *, rollout_id: int, evaluation: bool) -> Any: ...


def plain_sample_hook(args: Any, sample: Any) -> Any: ...


def sample_hook_of_slime(args: Any, sample: Any, *, rollout_id: int | None = None) -> Any: ...


async def sample_hook_with_keywords(args: Any, sample: Any, **kwargs: Any) -> Any: ...


def sample_hook_with_own_parameter(args: Any, sample: Any, *, strength: float) -> Any: ...
def keep(args: Any, samples: Any, **kwargs: Any) -> bool: ...
def tis(
    args: Any, *, pg_loss: Any, train_log_probs: Any, rollout_log_probs: Any, loss_masks: Any, **kwargs: Any
) -> Any: ...
def reducer(
    total_lengths: Any, response_lengths: Any, loss_masks: Any, calculate_per_token_loss: bool = False
) -> Any: ...
def log_rollout(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> bool: ...


class Source:
    def __init__(self, args: Any) -> None: ...
    def get_samples(self, num_samples: int) -> list[Any]: ...
    def add_samples(self, samples: list[Any]) -> None: ...
    def save(self, rollout_id: int) -> None: ...
    def load(self, rollout_id: int | None = None) -> None: ...
    def __len__(self) -> int: ...


class AsyncCallable:
    async def __call__(self, args: Any, sample: Any, sampling_params: Any) -> Any: ...


def test_signatures_of_slime_and_trl_are_accepted() -> None:
    for hook, function in [
        ("custom_generate_function", generate),
        ("custom_generate_function", generate_with_evaluation),
        ("custom_generate_function", AsyncCallable()),
        ("custom_rm", reward_func),
        ("custom_rm", group_reward),
        ("custom_rm", trl_reward),
        ("custom_rm", trl_with_a_column),
        ("custom_rm", verifier),
        ("rollout_function", rollout),
        ("eval_function", rollout),
        ("rollout_sample_hook", sample_hook),
        ("rollout_sample_hook", plain_sample_hook),
        ("rollout_sample_hook", sample_hook_of_slime),
        ("rollout_sample_hook", sample_hook_with_keywords),
        ("dynamic_sampling_filter", keep),
        ("custom_tis_function", tis),
        ("custom_pg_loss_reducer_function", reducer),
        ("custom_rollout_log_function", log_rollout),
        ("data_source", Source),
    ]:
        assert check_signature(HOOKS[hook], function) is None


def sync_generate(args: Any, sample: Any, sampling_params: Any) -> Any: ...
async def async_filter(args: Any, samples: Any) -> bool: ...
def one_argument(args: Any) -> Any: ...
def swapped(sample: Any, args: Any) -> Any: ...


def test_a_function_that_cannot_be_called_is_a_problem() -> None:
    for hook, function, message in [
        (
            "custom_generate_function",
            sync_generate,
            "sync_generate is not async; write async def fn(args, sample",
        ),
        ("dynamic_sampling_filter", async_filter, "async_filter is async, but its result is not awaited"),
        (
            "custom_rm",
            one_argument,
            "one_argument(args: 'Any') -> 'Any' cannot be called (too many positional arguments)",
        ),
        ("rollout_sample_hook", one_argument, "cannot be called"),
        ("rollout_sample_hook", sample_hook_with_own_parameter, "strength"),
        ("custom_rm", swapped, "has args in another position; write def fn(args, sample)"),
        ("custom_tis_function", one_argument, "got an unexpected keyword argument 'pg_loss'"),
        ("data_source", one_argument, "one_argument has no get_samples, add_samples, save, load, __len__"),
    ]:
        problem = check_signature(HOOKS[hook], function)
        assert problem is not None
        assert message in problem
        assert problem.startswith(HOOKS[hook].flag)


def test_reward_styles_are_detected_from_parameter_names() -> None:
    functions = (reward_func, group_reward, trl_reward, verifier)
    assert [reward_style(f) for f in functions] == ["single", "batch", "trl", "named"]


def test_every_path_flag_has_a_hook_and_every_hook_a_field() -> None:
    paths = {spec.flag for spec in SPECS.values() if spec.field.endswith("_path")}
    others = {"environment", "session_match", "session_leaves", "session_tool_parser"}
    assert {hook.flag for hook in HOOKS.values()} == paths - {"--chat-template-path", "--megatron-config-path"} | {
        SPECS[o].flag for o in others
    }
    assert {field.name for field in dataclasses.fields(Hooks)} == set(HOOKS)
    assert {f"{name}_path" for name in HOOKS if name not in others} <= set(SPECS)


def test_a_word_that_selects_nothing_and_is_no_function_is_a_problem() -> None:
    for flag, value in [("match", "16"), ("leaves", "longst"), ("tool_parser", "qwen4")]:
        [problem] = load_hooks(config_from_values({f"session_{flag}": value}))[1]
        assert f"--session-{flag.replace('_', '-')} {value} is none of " in problem


def test_words_that_select_something_of_furlong_are_no_functions() -> None:
    words = {"session_match": "strict", "session_leaves": "last", "session_tool_parser": "glm45"}
    hooks, problems = load_hooks(config_from_values(words))
    assert (problems, hooks.session_match, hooks.session_tool_parser) == ([], None, None)


def test_every_tool_parser_is_a_value_of_its_flag() -> None:
    assert set(TOOL_PARSERS) == set(PARSERS)


def test_hooks_are_loaded_with_all_problems_at_once(write: Callable[[str, str], Path]) -> None:
    write(
        "hooks_f",
        """
        async def reward_func(args, sample, **kw): return 1.0
        def hook(args, sample, *, rollout_id, evaluation): ...
        def generate(args, sample, sampling_params): ...
        """,
    )
    config = config_from_values(
        {
            "custom_rm_path": "hooks_f.reward_func",
            "rollout_sample_hook_path": ("hooks_f.hook", "hooks_f.hook"),
            "custom_generate_function_path": "hooks_f.generate",
            "dynamic_sampling_filter_path": "hooks_f.filtr",
        }
    )
    hooks, problems = load_hooks(config)
    assert hooks.custom_rm is load_function("hooks_f.reward_func")
    assert len(hooks.rollout_sample_hook) == 2
    assert hooks.rollout_function is None
    assert [problem.split()[0] for problem in problems] == [
        "--custom-generate-function-path:",
        "--dynamic-sampling-filter-path",
    ]


def test_no_flag_no_hook() -> None:
    assert load_hooks(Config()) == (Hooks(), [])
