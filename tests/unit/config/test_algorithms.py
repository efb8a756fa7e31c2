"""What the flags say about algorithms agrees with the algorithms themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from furlong.algo.policy_loss import POLICY_LOSSES, clipped_ratio_loss
from furlong.config.checks.training_checks import algorithm_problems
from furlong.config.checks.validate import declared_problems, notices
from furlong.config.checks.value_checks import RM_TYPES
from furlong.config.command_line import config_from_values, examine, parse
from furlong.config.hooks import function_paths
from furlong.core.algorithms import ALGORITHMS
from furlong.errors import ConfigError
from furlong.rewards.verifiers import REWARDS
from furlong.wiring.cluster import check_known_to_ranks


def test_every_verifier_is_known() -> None:
    assert set(RM_TYPES) == set(REWARDS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_derived_upper_clip_is_the_algorithms(name: str) -> None:
    assert parse(["--advantage-estimator", name]).config.algo.eps_clip_high == (ALGORITHMS[name].eps_clip_high or 0.2)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_takes_the_flags_of_its_definition_and_refuses_those_it_would_not_read(name: str) -> None:
    row = ALGORITHMS[name]
    own = {"advantage_estimator": name, "normalize_advantages": row.whitened, "n_samples_per_prompt": 4}
    own |= {"loss_constant_len": 9} if row.aggregation == "constant" else {}

    def refused(**values: object) -> bool:
        return bool(list(algorithm_problems(config_from_values(own | values))))

    assert not refused()
    assert refused(kl_coef=0.1) == (not row.kl_in_reward)
    assert refused(gamma=0.9) == (not row.discounted)
    assert refused(normalize_advantages=False) == row.whitened
    assert refused(eps_clip_c=3.0) == (row.policy in ("clipped_weight", "masked_weight"))
    assert refused(loss_constant_len=9) == (row.aggregation == "token")
    assert refused(n_samples_per_prompt=1) == (row.baseline != "none")
    assert not refused(n_samples_per_prompt=1, rewards_normalization=False)


def test_clip_bounds_that_a_custom_loss_does_not_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "dapo", replace(ALGORITHMS["dapo"], clips=False))

    def refused(*words: str) -> str:
        config = parse(["--advantage-estimator", "dapo", "--n-samples-per-prompt", "4", *words]).config
        return "; ".join(declared_problems(config))

    assert refused() == ""
    assert "--eps-clip 0.1 has no effect with --advantage-estimator dapo" in refused("--eps-clip", "0.1")
    assert "--eps-clip-high 0.4 has no effect" in refused("--eps-clip-high", "0.4")
    assert "--eps-clip-c 3.0 has no effect" in refused("--eps-clip-c", "3")
    assert "--eps-clip 0.28 has no effect" in refused("--eps-clip", "0.28")  # dapo's other bound
    assert refused("--eps-clip", "0.2", "--eps-clip-high", "0.28") == ""  # nothing but what is there without them


def test_options_of_the_policy_loss_are_refused_for_demonstrations() -> None:
    def refused(words: str) -> list[str]:
        config = parse(["--loss-type", "sft_loss", *words.split()]).config
        return [
            problem.partition(" has no effect with --loss-type sft_loss")[0] for problem in declared_problems(config)
        ]

    assert refused("--eps-clip 0.2 --entropy-coef 0.0 --advantage-estimator dapo") == []
    assert refused("--eps-clip 0.3 --entropy-coef 0.01 --use-tis") == [
        "--eps-clip 0.3", "--entropy-coef 0.01", "--use-tis"
    ]  # fmt: skip
    assert refused("--use-kl-loss --eps-clip-c 3") == ["--eps-clip-c 3.0", "--use-kl-loss"]


def test_a_class_registered_only_in_this_process_is_refused_with_ranks_in_other_processes(monkeypatch) -> None:
    for name in ALGORITHMS:
        check_known_to_ranks(name)
    monkeypatch.setitem(ALGORITHMS, "mine", replace(ALGORITHMS["grpo"], policy="my_loss"))
    monkeypatch.setitem(POLICY_LOSSES, "my_loss", lambda inputs: clipped_ratio_loss(inputs))
    with pytest.raises(ConfigError, match=r"'mine'.* ALGORITHMS .*POLICY_LOSSES"):
        check_known_to_ranks("mine")
    monkeypatch.setitem(ALGORITHMS, "rloo", replace(ALGORITHMS["rloo"], baseline="group_mean"))
    with pytest.raises(ConfigError, match=r"'rloo'.* ALGORITHMS "):
        check_known_to_ranks("rloo")


MIS = """
use_tis: true
use_rs: true
tis_level: token
rs_level: token
tis_mode: {mode}
tis_lower_bound: 0.5
tis_upper_bound: 4.0
rs_lower_bound: null
rs_upper_bound: null
rs_veto_threshold: 1.0e-4
tis_batch_normalize: true
"""
SLIME_FUNCTION = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"


def test_keys_of_slimes_mis_yaml_are_flags(tmp_path):
    for mode, low in [("truncate", 0.0), ("clip", 0.5), ("mask", 0.5)]:
        (tmp_path / "mis.yaml").write_text(MIS.format(mode=mode))
        words = ["--custom-config-path", str(tmp_path / "mis.yaml"), "--custom-tis-function-path", SLIME_FUNCTION]
        resolved, problems = examine(words)
        algo = resolved.config.algo
        assert [problem for problem in problems if "tis" in problem or "rs-" in problem or "rs_" in problem] == []
        assert (algo.tis_clip, algo.tis_clip_low, algo.tis_veto) == (4.0, low, 1e-4)
        assert algo.rejection_bounds == (0.5, 4.0)
        assert function_paths(resolved.config)["custom_tis_function"] == ()
        assert [notice for notice in notices(resolved.config) if SLIME_FUNCTION in notice]


def test_bounds_that_contradict_each_other_are_refused():
    for words, problem in [
        ("--use-tis --tis-clip 3 --tis-upper-bound 4", "names of one setting"),
        ("--use-tis --use-rs --tis-veto 0.1 --rs-veto-threshold 0.2", "names of one setting"),
        ("--use-tis --tis-mode clip --tis-clip-low 0.1 --tis-lower-bound 0.2", "names of one setting"),
        ("--use-tis --use-rs --rs-lower-bound 3", "rejects weights below 3 and above 2"),
        ("--use-tis --tis-level geometric --tis-batch-normalize", "not defined"),
        ("--use-rs", "--use-tis"),
        ("--use-tis --rs-level sequence", "--use-rs"),
    ]:
        _, problems = examine(words.split())
        assert [each for each in problems if problem in each]


def test_unset_bounds_of_rejection_are_those_of_the_weights():
    def bounds(words: str) -> tuple[float, float]:
        return parse(["--use-tis", "--use-rs", *words.split()]).config.algo.rejection_bounds

    assert bounds("--tis-clip 4") == (0.25, 4.0)
    assert bounds("--tis-mode mask --tis-upper-bound 4") == (0.25, 4.0)
    assert bounds("--tis-mode clip --tis-clip-low 0.5 --tis-clip 4 --rs-upper-bound 3") == (0.5, 3.0)
