"""Arguments of `furlong.train`: objects where flags have paths, and what a call leaves out."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import furlong
from furlong.core.user_functions import load_function, use_objects
from furlong.core.user_objects import find_object
from furlong.run.python_arguments import in_keywords

ROOT = Path(__file__).parents[3]
ROWS = [{"prompt": "1+1=", "answer": "2", "carry": False}, {"prompt": "8+8=", "answer": "16", "carry": True}]


@pytest.fixture(autouse=True)
def no_objects_are_left():
    yield
    use_objects({})


def right(response: str, label: str) -> float:
    return float(response == label)


async def wait(row): ...


def test_a_model_rows_and_a_function_are_a_complete_call(model):
    config = furlong.configure(model=model, prompt_data=ROWS, reward=right)
    assert config.rollout.hf_checkpoint == str(model)
    assert (config.data.input_key, config.data.label_key) == ("prompt", "answer")
    assert (config.data.rollout_batch_size, config.data.num_epoch) == (2, 1)
    assert config.rollout.rollout_max_response_len == 64  # half of the context
    assert load_function(str(config.reward.custom_rm_path)) is right
    assert find_object(str(config.data.prompt_data)) is ROWS


def test_what_a_call_or_a_file_sets_is_kept(model, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("num_rollout: 7\nrollout_max_response_len: 9\n")
    config = furlong.configure(model=model, prompt_data=ROWS, reward="math", config=file, label_key="carry")
    assert (config.data.num_rollout, config.data.num_epoch, config.rollout.rollout_max_response_len) == (7, None, 9)
    assert (config.data.label_key, config.reward.rm_type) == ("carry", "math")


def test_objects_stand_where_flags_have_paths(model):
    class Game:
        def reset(self, task, seed): ...

        def step(self, message): ...

    config = furlong.configure(
        model=model,
        prompt_data=ROWS,
        reward=[right, lambda response: 0.0],
        eval_data={"easy": ROWS[:1], "hard": ROWS[1:]},
        dynamic_sampling_filter_path=lambda args, samples: True,
        rollout_sample_hook_path=[lambda args, sample: None],
    )
    assert [*load_function(str(config.reward.custom_rm_path)).functions] == ["right", "lambda"]
    names, paths = (config.eval.eval_prompt_data or ())[::2], (config.eval.eval_prompt_data or ())[1::2]
    assert names == ("easy", "hard")
    assert [find_object(path) for path in paths] == [ROWS[:1], ROWS[1:]]
    assert load_function(str(config.rollout.dynamic_sampling_filter_path))(None, None) is True
    assert len(config.rollout.rollout_sample_hook_path) == 1
    played = furlong.configure(model=model, prompt_data=ROWS, environment=Game, env_workers=["thread", "2"])
    assert played.session.environment == ("python:Game",)
    messages = [{"messages": [{"role": "user", "content": "1+1="}]}]
    assert not furlong.configure(model=model, prompt_data=messages, environment=Game).data.apply_chat_template


def test_messages_and_data_frames_are_rows(model):
    pandas = pytest.importorskip("pandas")
    messages = [{"messages": [{"role": "user", "content": "1+1="}], "label": "2"}]
    config = furlong.configure(model=model, prompt_data=messages, reward=right)
    assert (config.data.input_key, config.data.apply_chat_template) == ("messages", True)
    config = furlong.configure(model=model, prompt_data=pandas.DataFrame(ROWS), reward=right)
    assert find_object(str(config.data.prompt_data)) == ROWS
    config = furlong.configure(model=model, prompt_data=(row for row in ROWS), reward=right, lr=pandas.Series([0.5])[0])
    assert config.optim.lr == 0.5  # numpy's
    assert find_object(str(config.data.prompt_data)) == ROWS
    table = pytest.importorskip("pyarrow").Table.from_pylist([row | {"input": "another"} for row in ROWS])
    config = furlong.configure(model=model, prompt_data=table, reward=right)
    assert (config.data.input_key, config.data.rollout_batch_size) == ("prompt", 2)
    pairs = [{"prompt": "1+1=", "completion": "2"}]
    assert furlong.configure(model=model, prompt_data=pairs, loss_type="sft_loss").data.label_key == "completion"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "m", "hf_checkpoint": "n"}, "model and hf_checkpoint are the same"),
        ({"reward": 3}, "reward: got 3, expected a function"),
        ({"reward": [right, 3]}, "reward: got 3 among several"),
        ({"reward": right, "rm_type": "math"}, "`reward`"),
        ({"n_samples_per_prompt": 0}, "`n_samples_per_prompt` 0 is outside"),
        ({"prompt_data": []}, "prompt_data has no rows; give a list of dicts"),
        ({"prompt_data": {"prompt": ["1+1="], "label": ["2"]}}, "is a dict of columns; give pandas.DataFrame(DATA)"),
        ({"prompt_data": {"train": ROWS[0]}}, "is a dict of splits; give one of them, as in DATA['train']"),
        (
            {"prompt_data": [ROWS[0] | {"image": type("Image", (), {"__module__": "PIL.Image"})()}]},
            "models are text-only",
        ),
        ({"prompt_data": ["1+1="]}, "prompt_data has the row '1+1='"),
        ({"prompt_data": 64}, "prompt_data: got 64, expected rows"),
        ({"prompt_data": [{"promt": "1+1=", "label": "2"}]}, "has the columns ['promt', 'label']"),
        ({"prompt_data": [{"promt": "1+1=", "label": "2"}]}, "for the prompt; did you mean prompt?"),
        ({"prompt_data": [{"text": "1+1="}]}, "problem for the prompt; name it with input_key"),
        ({"eval_data": {"a": [1]}}, "eval_data['a'] has the row 1"),
        ({"eval_data": []}, "eval_data has no rows"),
        ({"eval_data": {"a/b": ROWS}}, "it becomes part of a metric's name"),
        ({"eval_prompt_data": ROWS}, "give rows as eval_data"),
        ({"eval_interval": 2}, "add `eval_data`"),
        ({"opd_teacher_load": right}, "opd_teacher_load: got <function right"),
        ({"model": furlong.Run(Path(__file__).parent)}, "give its model_path"),
        ({"reward": []}, "reward is an empty list"),
        ({"args": object()}, "args: got object; pass its settings as keywords"),
        ({"tools": [right]}, "furlong.environments.ToolEnvironment"),
        ({"environment_factory": dict}, "give a class to `environment`"),
        ({"optim": "adamw_torch"}, "use optimizer"),
        ({"beta": 0.04}, "use `use_kl_loss=True` with `kl_loss_coef`"),
        ({"loss_type": "dr_grpo"}, "use `advantage_estimator` dr_grpo"),
        ({"on_step": wait}, "on_step is an async function"),
        ({"learning_rate": 1.0}, "unknown key learning_rate"),
        ({"num_generations": 4}, "use n_samples_per_prompt"),
        ({"reward_funcs": right}, "use reward"),
        ({"actor_rollout_ref.rollout.n": 4}, "use n_samples_per_prompt"),
        ({"reward": None}, "give a function such as def reward(response, label)"),
        ({"model": None}, "give a model folder, or the name"),
        ({"prompt_data": None}, "give a list of dicts, a data set"),
        ({"reward": dict}, "got the class dict; give an instance"),
        ({"config": {"lr": 1e-4}}, "pass its entries as keywords"),
        ({"warmup_ratio": 0.1}, "use lr_warmup_fraction"),
        ({"tokenizer": "model"}, "the tokenizer is that of the model folder"),
        ({"on_step": lambda: None}, "it is called with one argument"),
        ({"eval_data": [{"prompt": "1+1="}], "label_key": "answer"}, "with `eval_label_key`"),
        ({"model": 3}, "model: got 3, expected a model folder"),
        ({"environment": right}, "expected a class with reset and step"),
        ({"on_step": 3}, "on_step: got 3, expected a function"),
    ],
)
def test_a_mistake_is_an_error_that_names_it(model, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(furlong.ConfigError) as caught:
        furlong.train(**{"model": model, "prompt_data": ROWS, "reward": right} | arguments)
    assert words in str(caught.value)
    assert [*tmp_path.iterdir()] == []


def test_errors_name_keywords_and_leave_commands_and_other_flags():
    error = in_keywords(furlong.ConfigError("--use-opd with --no-offload-train, see `furlong doctor --lr`, --hsts"))
    assert error.problems == ("`use_opd=True` with `offload_train=False`, see `furlong doctor --lr`, --hsts",)
    error = in_keywords(furlong.ConfigError("fix it; `furlong reward test` with the same flags calls it; then --lr"))
    assert error.problems == ("fix it; then `lr`",)


def test_a_run_is_a_folder_that_exists(tmp_path):
    with pytest.raises(furlong.ConfigError, match=r"outputs: no such directory; give the folder of a run"):
        furlong.Run(tmp_path / "outputs")


def test_an_evaluation_set_has_its_own_columns_and_a_default_folder_is_free(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = [{"question": "1+1=", "solution": "2"}]
    config = furlong.configure(model=model, prompt_data=ROWS, reward=right, eval_data=other)
    assert (config.data.input_key, config.data.label_key) == ("prompt", "answer")
    assert (config.eval.eval_input_key, config.eval.eval_label_key) == ("question", "solution")
    trained = tmp_path / "outputs" / "grpo-model" / "model"  # of an earlier call
    shutil.copytree(model, trained)
    assert furlong.configure(model=trained, prompt_data=ROWS, reward=right).rollout.hf_checkpoint == str(trained)
    with pytest.raises(furlong.ConfigError, match="the folder that the trained model replaces"):
        furlong.configure(model=trained, prompt_data=ROWS, reward=right, save_hf=trained)


def test_the_types_of_keywords_are_those_of_the_flags():
    spec = importlib.util.spec_from_file_location("make_train_flags", ROOT / "scripts/make_train_flags.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.TARGET.read_text() == made.render(), "run scripts/make_train_flags.py"


CODE = """\
from pathlib import Path

from datasets import Dataset

import furlong


def reward(response: str, label: str) -> float:
    return float(response == label)


run = furlong.train(
    model=Path("model"),
    prompt_data=[{"prompt": "1+1=", "label": "2"}],
    reward=[reward, lambda response: 0.0],
    eval_data={"test": Dataset.from_list([{"prompt": "1+1="}])},
    on_step=lambda row: row["step"] < 3,
    lr=1e-5,
    advantage_estimator="grpo",
    dynamic_sampling_filter_path=lambda args, samples: True,
    sglang_mem_fraction_static=0.5,
)
print(run.model_path / "config.json", run.rows[-1]["step"])
furlong.train(model="m", learning_rate=1e-5)
furlong.train(model="m", lr="fast")
"""


@pytest.mark.nightly
def test_a_type_checker_accepts_a_call_and_finds_wrong_keywords(tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    settings = {
        "venvPath": str(ROOT),
        "venv": ".venv",
        "extraPaths": [str(ROOT / "src")],
        "typeCheckingMode": "standard",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    found = [(each["range"]["start"]["line"], each["rule"]) for each in json.loads(done.stdout)["generalDiagnostics"]]
    lines = CODE.splitlines()
    assert [(lines[line].split(",")[1], rule) for line, rule in found] == [
        (" learning_rate=1e-5)", "reportCallIssue"),
        (' lr="fast")', "reportArgumentType"),
    ]
