"""`furlong env`: versions and compiled packages."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from furlong.cli import main
from furlong.tools.environment import NEEDED, TESTED, environment_findings, read_environment

NAME, MODULE = "furlong-broken-kernel", "furlong_broken_kernel"
BROKEN = {NAME: MODULE}


def fake_package(folder: Path, name: str, version: str, module: str | None = None, code: str = "") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if module:
        (folder / f"{module}.py").write_text(code)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder of packages before all others, here and in probes. Their torch is empty, to load fast."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_this_installation_is_tested(capsys):
    assert environment_findings(read_environment({})) == []
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"torch", "transformers"} <= {p["name"] for p in found["environment"]["packages"]}


def test_an_untested_version_is_found_with_the_pip_command(installed):
    fake_package(installed, "transformers", "4.40.0")
    (finding,) = environment_findings(read_environment({}))
    assert finding.id == "ENV01"
    assert "transformers 4.40.0 (tested >=5.12,<6)" in finding.finding
    assert "`pip install 'transformers>=5.12,<6'`" in finding.remedy


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ImportError('undefined symbol: _ZN3c104cuda')", "undefined symbol: _ZN3c104cuda"),
        ("import os; os._exit(3)", "3"),
    ],
)
def test_kernel_that_does_not_load_is_detected_in_a_separate_process(code, words, installed):
    fake_package(installed, NAME, "1.0", MODULE, code)
    (installed / "torch.py").write_text("")
    (finding,) = environment_findings(read_environment(BROKEN))
    assert words in finding.finding
    assert "`pip install --force-reinstall --no-deps --no-build-isolation furlong-broken-kernel`" in finding.remedy
    assert MODULE not in sys.modules
    (installed / f"{MODULE}.py").write_text("")
    assert environment_findings(read_environment(BROKEN)) == []


def test_tested_ranges_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    users = [r for name, extra in extras.items() if name != "dev" for r in extra]  # what tests need may be narrower
    wanted = [*extras["dev"], *project["dependencies"], *users]
    ranges = {}
    for requirement in map(Requirement, wanted):
        if requirement.specifier:
            ranges[requirement.name] = requirement.specifier
    assert {name: Requirement(f"{name}{tested}").specifier for name, tested in TESTED.items()} == {
        name: ranges[name] for name in TESTED
    }
    assert set(NEEDED) <= set(TESTED)
