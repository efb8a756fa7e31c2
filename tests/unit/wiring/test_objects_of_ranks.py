"""Trainer processes get no function that only the driver's program has."""

from __future__ import annotations

from furlong.config.command_line import config_from_values
from furlong.config.hooks import load_hooks
from furlong.wiring.cluster import without_objects


def test_functions_of_the_driver_are_left_out_and_those_of_ranks_must_be_importable():
    config = config_from_values({"custom_rm_path": "python:reward", "dynamic_sampling_filter_path": "json:dumps"})
    assert without_objects(config).reward.custom_rm_path is None
    assert without_objects(config).rollout.dynamic_sampling_filter_path == "json:dumps"
    values = {"custom_loss_function_path": "python:loss", "actor_num_gpus_per_node": 2}
    [problem] = load_hooks(config_from_values(values))[1]
    assert problem.startswith("--custom-loss-function-path: trainer processes cannot import python:loss")
