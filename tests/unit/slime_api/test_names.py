"""The modules `slime.*` and `miles.*`: their names, what the others say, and that an installed one is not shadowed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from furlong import Sample
from furlong.core import slime_modules
from furlong.core.slime_modules import NotInFurlongError
from furlong.core.user_functions import load_function
from furlong.errors import ConfigError
from furlong.slime_api.table import NAMES

GUIDE = Path(__file__).parents[3] / "docs" / "reference" / "slime.md"


@pytest.fixture(autouse=True)
def served():
    slime_modules.install()


@pytest.mark.parametrize("module", sorted(NAMES))
def test_every_name_of_the_table_exists(module):
    loaded = importlib.import_module(module)
    assert all(getattr(loaded, name) is not None for name in NAMES[module])
    assert set(NAMES[module]) <= set(dir(loaded))


def test_names_are_those_of_furlong():
    from miles.rollout.rm_hub import async_rm
    from miles.utils.types import Sample as MilesSample
    from slime.rollout.base_types import RolloutFnTrainOutput
    from slime.utils import types

    from furlong.rollout import replay
    from furlong.slime_api import rewards

    assert types.Sample is MilesSample is Sample
    assert async_rm is rewards.async_rm
    assert RolloutFnTrainOutput is replay.RolloutFnTrainOutput


@pytest.mark.parametrize(
    ("statement", "fix"),
    [
        ("import slime.agent.trajectory", r"policy\(\)"),
        ("from slime.agent import parsing", r"policy\(\)"),
        ("from slime.utils.types import MultimodalTypes", "train on text"),
        ("from slime.utils.types import Sampel", "did you mean Sample"),
        ("from slime.utils.misc import chunk_named_params_by_size", "copy the helper"),
        ("from slime.utils import unheard_of", "reference/slime.md"),
        ("from miles.utils import unheard_of", "out of miles"),
        ("import miles.rollout.sleep_rollout", "furlong serve"),
        ("import slime.unheard_of.deeper", "reference/slime.md"),
    ],
)
def test_a_name_that_furlong_does_not_have_says_what_to_do(statement, fix):
    with pytest.raises(NotInFurlongError, match=fix):
        exec(statement)
    assert issubclass(NotInFurlongError, ImportError)


def test_a_flag_that_names_a_missing_function_says_what_to_do():
    with pytest.raises(ConfigError, match="not supported"):
        load_function("slime.utils.types.MultimodalTypes")


def test_a_function_of_slime_is_loaded_by_name():
    name = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    samples = [Sample(reward=reward, status=Sample.Status.COMPLETED) for reward in (0.0, 1.0)]
    assert load_function(name)(None, samples).keep
    fallback = load_function(f"{name}_with_fallback")
    equal = fallback(None, [samples[0], samples[0]])
    assert (equal.keep, equal.keep_when_insufficient) == (False, True)


PROBE = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from furlong.core import slime_modules
slime_modules.install()
import PACKAGE
print(vars(PACKAGE).get("WHO", "furlong"))
"""


@pytest.mark.parametrize("package", ["slime", "miles"])
@pytest.mark.parametrize(("is_installed", "who"), [(True, "the real one"), (False, "furlong")])
def test_only_an_installed_package_takes_precedence(tmp_path, package, is_installed, who):
    folder = tmp_path / ("site-packages" if is_installed else "checkout")
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text("WHO = 'the real one'\n")
    if is_installed:
        info = folder / f"{package}-0.3.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.3.1\n")
    probe = f"import sys; sys.path.insert(0, {str(folder)!r})\n{PROBE.replace('PACKAGE', package)}"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == who
    assert (f"{package} is installed ({package} 0.3.1" in done.stderr) == is_installed


def test_the_guide_lists_every_module():
    text = GUIDE.read_text()
    missing = [module for module in NAMES if NAMES[module] and f"`{module}`" not in text]
    assert [module for module in missing if f"slime{module[5:]}" not in NAMES] == []


def test_all_names_of_a_module_can_be_imported():
    scope = {}
    exec("from slime.rollout.base_types import *", scope)
    assert set(NAMES["slime.rollout.base_types"]) <= set(scope)


def test_a_filter_may_change_its_result():
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    output = DynamicFilterOutput(keep=False, reason="mine")
    output.keep_when_insufficient = True
    assert output.keep_when_insufficient


def test_fields_for_images_are_none_and_values_of_user_code_survive_a_round_trip():
    sample = Sample(index=3)
    assert sample.multimodal_inputs is None
    sample.turns, sample.names, sample.client = 2, {"a": [1.5]}, object()
    copy = Sample.from_dict(sample.to_dict())
    assert (copy.turns, copy.names) == (2, {"a": [1.5]})
    with pytest.raises(AttributeError, match="JSON values"):
        _ = copy.client


def test_a_name_of_an_example_that_is_not_on_the_path_says_where_it_is(monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("coding_agent")])
    for name in [name for name in sys.modules if name.startswith(("slime.agent.harness", "coding_agents"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(NotInFurlongError, match="examples/coding_agent"):
        exec("from slime.agent.harness import ClaudeCodeHarness")
