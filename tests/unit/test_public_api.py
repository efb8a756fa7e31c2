from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import furlong
from furlong import Config, ConfigError, FurlongError, Run, configure, errors
from furlong.config.command_line import examine, load
from furlong.config.flag_spec import flag_specs
from runs import write_prompts


def test_importing_furlong_imports_nothing_heavy():
    code = "import sys, furlong; print(sum(name.startswith('furlong') for name in sys.modules), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]  # furlong.version


def test_what_modules_of_users_import_and_the_run_page_need_no_torch():
    code = (
        "import sys; from furlong import Args, Config, Group, RewardFunction, Sample, policy; "
        "from furlong.agent import session; from furlong.environments import Step; "
        "import furlong.commands.view_run; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_workers_of_user_functions_import_no_large_library_and_no_configuration():
    code = (
        "import sys, furlong.rewards.sandbox_worker, furlong.environments.worker_process; "
        "print([name for name in sys.modules if name in ('numpy', 'torch') or name.startswith('furlong.config')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", furlong.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(furlong, name) is getattr(importlib.import_module("furlong"), name)


def test_public_names_are_those_that_a_type_checker_sees():
    tree = ast.parse(Path(str(furlong.__file__)).read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("furlong")
        for alias in node.names
    }
    assert imported | {"__version__"} == set(furlong.__all__)
    assert dir(furlong) == sorted(furlong.__all__)


def test_direct_subclasses_of_the_root_error_are_public():
    direct = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__base__ is FurlongError
    }
    assert direct - set(furlong.__all__) == set()
    assert ConfigError.__name__ in furlong.__all__


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="trian"):
        _ = furlong.trian


@pytest.fixture
def keywords(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 8)
    return {
        "hf_checkpoint": model,
        "prompt_data": data,
        "rm_type": "random",
        "num_rollout": 1,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 8,
    }


def plain(keywords):
    return {name: str(value) if isinstance(value, Path) else value for name, value in keywords.items()}


def test_keywords_configure_as_flags_do(keywords):
    config = configure(**keywords, rollout_stop=["a", "b"], use_tis=True, disable_rewards_normalization=True)
    words = [word for name, value in keywords.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--rollout-stop", "a", "b", "--use-tis", "--disable-rewards-normalization"]
    assert config == load(words).config
    assert isinstance(config, Config)


def test_the_source_of_a_keyword_is_recorded(keywords, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("lr: 0.5\nclip_grad: 0.5\n")
    resolved, problems = examine([f"--config={file}"], keywords=plain(keywords) | {"lr": 0.25})
    assert problems == []
    assert (resolved.config.optim.lr, resolved.config.optim.clip_grad) == (0.25, 0.5)
    assert (resolved.sources["lr"], resolved.sources["clip_grad"]) == ("keyword", f"file {file}")


def test_configuration_files_are_keywords_too(keywords, tmp_path):
    (tmp_path / "run.yaml").write_text("lr: 0.5\n")
    (tmp_path / "override.yaml").write_text("clip_grad: 0.25\n")
    config = configure(
        **keywords, clip_grad=0.5, config=tmp_path / "run.yaml", custom_config_path=[tmp_path / "override.yaml"]
    )
    assert (config.optim.lr, config.optim.clip_grad) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"learning_rate": 1e-5}, ["learning_rate", "lr"]),
        ({"rollout_bach_size": 4}, ["rollout_bach_size", "rollout_batch_size"]),
        ({"lr": "fast"}, ["lr", "fast"]),
        ({"lambd": 0.9}, ["lambd"]),
        ({"custom_rm_path": 5}, ["custom_rm_path"]),
        ({"config": "no/such.yaml"}, ["no/such.yaml"]),
    ],
)
def test_a_wrong_keyword_is_a_configuration_error(keywords, change, words, tmp_path):
    with pytest.raises(ConfigError) as caught:
        furlong.train(**keywords, **change, output_dir=tmp_path / "run")
    (problem, *_) = caught.value.problems
    assert all(word in problem for word in words)
    assert not (tmp_path / "run").exists()


def test_all_problems_are_reported_at_once(keywords):
    with pytest.raises(ConfigError) as caught:
        configure(**keywords | {"rm_type": "maths"}, lr="fast", learning_rat=1)
    assert len(caught.value.problems) == 3


def test_every_flag_is_a_valid_keyword():
    assert [name for name in flag_specs(Config) if not name.isidentifier()] == []


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ({"event": "end"}, 0),
        ({"event": "failed", "error": "DataError", "message": ""}, 1),
        ({"event": "stopped", "message": "a diagnosis"}, 1),
        ({"event": "stopped", "message": "by Ctrl-C"}, 130),
        ({"event": "stopped", "message": "by SIGTERM"}, 143),
        ({"event": "step", "step": 1}, None),
    ],
)
def test_exit_code_is_that_of_the_last_start(tmp_path, last, code):
    rows = [{"event": "start"}, {"event": "failed"}, {"event": "start"}, last]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Run(tmp_path).exit_code == code
    assert Run(tmp_path).rows == []
