"""Every flag that the documentation names is taken by a program that it speaks of."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from furlong.config import Config
from furlong.config.compat import find_refusal
from furlong.config.flag_spec import flag_specs
from furlong.config.miles_flags import MILES_FLAGS
from furlong.config.passthrough import OptionList
from furlong.inference.server.web import ServerLimits, flag_of

ROOT = Path(__file__).parents[3]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "CHANGELOG.md"})
FLAG = re.compile(r"(?<![\w-])--[a-z0-9]+(?:-[a-z0-9]+)*(?![\w*-])")  # not `--eval-*`, nor `--sglang-NAME`
WORD = re.compile(r'"(--[\w-]+)"(, action=argparse\.BooleanOptionalAction)?')
COMMANDS = (
    *(ROOT / "src" / "furlong" / "commands").glob("*.py"),
    *(ROOT / "src" / "furlong" / "quickstart").glob("*.py"),
    ROOT / "src" / "furlong" / "inference" / "server" / "http_server.py",
    *(ROOT / "scripts").glob("*.py"),
)
OF_OTHERS = {
    "curl": "--silent --show-error --fail --fail-with-body --write-out --no-buffer",
    "ray": "--head --address --working-dir --runtime-env-json",
    "hf": "--local-dir --revision",
    "nvidia-smi": "--query-gpu --format",
    "ps": "--sort",
    "Claude Code": "--dangerously-skip-permissions --tools",
    "Codex": "--dangerously-bypass-approvals-and-sandbox --skip-git-repo-check",
    "mini-swe-agent": "--yolo --exit-immediately --task --model",
    "Megatron-LM": "--pipeline-model-parallel-layout",
    "pip": "--editable --no-deps",
    "docker, uv and sky": "--target --rm --secret",
    "slurm": "--mem --time --requeue --exclude",
    "containers": "--shm-size --ipc --gpus --ulimit --pids-limit --privileged --security-opt",
    "none: mistakes that pages show, and options of TRL": "--rm-typ --rollout-batchsize --max-grad-norm",
    "any: the word for a flag": "--flag",
}


def words_of(files: Iterable[Path]) -> set[str]:
    """The flags that these commands and scripts read."""
    found = [match for file in files for match in WORD.findall(file.read_text())]
    return {flag for flag, _ in found} | {flag.replace("--", "--no-", 1) for flag, negated in found if negated}


def flags_of_furlong() -> set[str]:
    specs = flag_specs(Config).values()
    negated = {spec.flag.replace("--", "--no-", 1) for spec in specs if spec.kind == "tristate"}
    return {spec.flag for spec in specs} | negated | set(MILES_FLAGS) | {"--help", "--config", "--custom-config-path"}


def options_of_engines() -> set[str]:
    """Options of SGLang and its router, as furlong takes them and as they take them."""
    names = [(program, name) for program in ("sglang", "router") for name in OptionList.of(program).options]
    return {f"--{program}-{name}" for program, name in names} | {f"--{name}" for _, name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_of_a_page_is_taken_by_some_program(page: Path) -> None:
    text = page.read_text()
    known = flags_of_furlong() | options_of_engines() | words_of(COMMANDS)
    known |= {flag_of(limit.name) for limit in dataclasses.fields(ServerLimits)}  # of furlong serve
    known |= {flag for flags in OF_OTHERS.values() for flag in flags.split()}
    known |= words_of(ROOT / name for name in re.findall(r"benchmarks/\w+/\w+\.py", text))
    assert sorted({flag for flag in FLAG.findall(text) if flag not in known and not find_refusal(flag)}) == []


def test_unaccepted_flag_is_detected() -> None:
    text = "`--lr 1`, `--learning-rat` and --sglang-NAME or `--eval-*` with (--save-debug)"
    assert FLAG.findall(text) == ["--lr", "--learning-rat", "--save-debug"]
    assert "--lr" in flags_of_furlong()
    assert "--save-debug" not in flags_of_furlong() | options_of_engines() | words_of(COMMANDS)
