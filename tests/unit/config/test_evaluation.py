from __future__ import annotations

import dataclasses
import json

import pytest
import yaml

from furlong.config.command_line import config_from_values
from furlong.config.evaluation import eval_specs
from furlong.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"input": "1+1=", "label": "2"}) + "\n")
    values = {"eval_config": str(tmp_path / "eval.yaml"), "rollout_max_response_len": 8, "rollout_stop": ("x",)}
    return config_from_values(values)


@pytest.fixture
def write(tmp_path):
    def write(content, **one):
        if one:
            content = {"eval": {"datasets": [{"name": "a", "path": str(tmp_path / "a.jsonl"), **one}]}}
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        (tmp_path / "eval.yaml").write_text(text)

    return write


WRONG = [
    ({"temperature": "hot"}, r"dataset 1 .a., temperature: got 'hot' \(str\), expected a number"),
    ({"temperature": -1}, r"temperature: got -1.0, expected a number in \[0, inf\)"),
    ({"n_samples_per_eval_prompt": 0}, r"n_samples_per_eval_prompt: got 0, expected a number in \[1, inf\)"),
    ({"max_response_len": 2.5}, r"max_response_len: got 2.5 \(float\), expected an integer"),
    ({"metadata_overrides": [1]}, r"metadata_overrides: got \[1\], expected keys and values"),
    ({"rm_type": "mathz"}, r"rm_type mathz is not a verifier; did you mean math\?"),
    ({"path": "no.jsonl"}, r"dataset 1 .a., path no.jsonl: no file no.jsonl"),
    ({"temprature": 1}, r"unknown key 'temprature'; did you mean temperature\?"),
    ({"name": "a/b"}, r"name a/b: "),
    ({"path": None}, r"dataset 1 .a. has no `path`; add it"),
]


def test_values_of_a_set_that_cannot_be_are_named(config, write):
    for one, message in WRONG:
        write(None, **one)
        with pytest.raises(ConfigError, match=message):
            eval_specs(config)


def test_file_of_another_form_is_refused(config, write):
    for text, message in [
        ("eval: [", r"eval.yaml is not YAML: .*write `eval: \{defaults"),
        ("- a", r"contains a list; write `eval: \{defaults"),
        ("sets: []", r"contains the keys sets; write `eval: \{defaults"),
        ("eval: {datasets: []}", "`datasets` is empty; "),
        ("eval: {defaults: 3, datasets: [{}]}", "`defaults` is 3, expected keys and values"),
        ("eval: {datasets: [file.jsonl]}", "dataset 1 is 'file.jsonl', expected keys and values"),
        ("eval: {datasets: [], datasets: []}", "duplicate key datasets"),
    ]:
        write(text)
        with pytest.raises(ConfigError, match=rf"(?s){message}"):
            eval_specs(config)


def test_names_are_given_once(config, write, tmp_path):
    row = {"name": "a", "path": str(tmp_path / "a.jsonl")}
    write({"datasets": [row, row]})
    with pytest.raises(ConfigError, match=r"\ba\b.*\b2\b"):
        eval_specs(config)


def test_values_have_the_types_of_flags_and_missing_ones_those_of_training(config, write):
    write(None, temperature=0, stop="END", stop_token_ids=7, max_response_len=None)
    (spec,) = eval_specs(config)
    flags = spec.config.rollout
    assert (flags.rollout_stop, flags.rollout_stop_token_ids, flags.rollout_max_response_len) == (("END",), (7,), 8)
    assert isinstance(flags.rollout_temperature, float)
    assert flags.rollout_temperature == 0.0


def test_the_verifier_of_a_set_replaces_the_runs_function(config, write):
    own = dataclasses.replace(config.reward, custom_rm_path="own.py:reward", group_rm=True)
    for keys, function in (({"temperature": 0}, "own.py:reward"), ({"rm_type": "math"}, None)):
        write(None, **keys)
        (spec,) = eval_specs(dataclasses.replace(config, reward=own))
        assert (spec.config.reward.custom_rm_path, spec.config.reward.group_rm) == (function, function is not None)
