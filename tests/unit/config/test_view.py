"""`args`, as hooks see it."""

from __future__ import annotations

import copy
import pickle

import pytest

from furlong import get_model_url
from furlong.config import Config, parse
from furlong.config.args_view import Args
from furlong.config.flag_spec import flag_specs
from furlong.errors import ConfigError

ARGS = Args(parse(["--lr", "0.5", "--reward-key", "acc", "--n-samples-per-prompt", "1"]).config)


def test_all_sections_are_flat_attributes() -> None:
    assert (ARGS.lr, ARGS.reward_key, ARGS.rollout_temperature, ARGS.grpo_std_normalization) == (0.5, "acc", 1.0, False)
    assert set(flag_specs(Config)) <= set(dir(ARGS))


def test_an_unknown_name_gives_the_closest() -> None:
    with pytest.raises(AttributeError, match=r"args has no rollout_temperatur; did you mean rollout_temperature\?"):
        _ = ARGS.rollout_temperatur
    assert getattr(ARGS, "my_own", None) is None


def test_an_unsupported_slime_attribute_names_the_reason() -> None:
    with pytest.raises(AttributeError, match=r"args\.http_proxy: requests are sent"):
        _ = ARGS.http_proxy


def test_flags_cannot_be_set_or_deleted() -> None:
    with pytest.raises(ConfigError, match=r"\blr\b.*\b1\.0\b"):
        ARGS.lr = 1.0
    with pytest.raises(AttributeError, match=r"\blr\b was not set by a function"):
        del ARGS.lr


def test_other_attributes_stay_and_those_of_a_call_end_with_it() -> None:
    args = Args(ARGS._config)
    args.calls = 1
    call = pickle.loads(pickle.dumps(args.for_call()))
    call.calls, call.lr, call.more = 2, 0.25, 3
    assert (call.calls, call.lr, call.more) == (2, 0.25, 3)
    assert (args.calls, args.lr, hasattr(args, "more")) == (1, 0.5, False)
    del args.calls
    assert args == Args(ARGS._config)


def test_options_of_sglang_have_values_though_none_was_given() -> None:
    args = Args(parse(["--sglang-mem-fraction-static", "0.5"]).config)
    assert (args.sglang_mem_fraction_static, args.sglang_enable_metrics, args.sglang_tp_size) == (0.5, False, None)


def test_it_pickles_and_copies() -> None:
    assert pickle.loads(pickle.dumps(ARGS)) == ARGS
    assert copy.deepcopy(ARGS).lr == 0.5


def test_as_dict_is_every_value() -> None:
    assert ARGS.as_dict()["lr"] == 0.5
    assert set(ARGS.as_dict()) == set(flag_specs(Config))
    assert repr(ARGS) == f"Args({len(flag_specs(Config))} flags)"


def test_routers_are_found_by_the_names_of_models_as_in_slime() -> None:
    routers = {"actor": ("127.0.0.1", 15000), "judge": ("127.0.0.1", 15001)}
    args = pickle.loads(pickle.dumps(Args(parse([]).config, routers)))
    assert (args.sglang_router_ip, args.sglang_router_port) == routers["actor"]
    assert get_model_url(args, "judge") == "http://127.0.0.1:15001/generate"
    assert get_model_url(args, "actor", "/v1/chat/completions") == "http://127.0.0.1:15000/v1/chat/completions"
    assert args.as_dict()["sglang_model_routers"] == routers
    assert args != ARGS
    with pytest.raises(ConfigError, match=r"model 'juge' .* actor, judge"):
        get_model_url(args, "juge")
    with pytest.raises(ConfigError, match="models with one: none"):
        get_model_url(ARGS, "judge")
