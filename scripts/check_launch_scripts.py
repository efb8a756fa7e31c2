"""Check which launch scripts of slime or Miles run here unchanged: python scripts/check_launch_scripts.py CHECKOUT.

For each script, prints what furlong's checks say about its training command with `--engine sglang` added, and with
`--train-backend megatron` unless it has a backend.
Files that the command names are replaced by small stand-ins, and GPUs are assumed; nothing is started.
Exit code 1 if a script is refused for another reason than those of `ON_PURPOSE`.

  --json        print JSON
  --docs        write the page of the results in docs/guides, slime-scripts.md or miles-scripts.md
  --only TEXT   only scripts whose path contains TEXT
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import warm_python
from launch_commands import FAILURE, launch_scripts, training_commands
from launch_standins import Flags, model_config, rewrite_paths, write_model, write_prompts

HIDDEN = ("slime", "miles", "train.py", "train_async.py", ".git", "runs")  # of the checkout: furlong takes their place
LIMIT_S = 600
WORKERS = 2
PRELOADED = ("furlong.diagnosis.preflight", "furlong.config.command_line", "launch_standins")

# Reasons that other work removes, or that are meant: what a problem contains, by its category. The first that matches.
ON_PURPOSE = {
    "training in FP8": ("training in FP8",),
    "quantized rollouts": ("are quantized", "quantized weights", "quantization_config"),
    "multimodal": ("models are text-only",),
    "LoRA": ("adapters (LoRA)",),
    "sizes that Megatron refuses too": ("training processes of a pipeline stage", "layers; use a divisor"),
}
WAITING = {
    "slime's imports": ("no module slime", "the module slime"),
    "model family": (
        "--train-backend megatron supports",
        "which no training backend supports",
        "unknown to the installed transformers",
        "has none",
    ),
}
GUIDES = Path(__file__).resolve().parent.parent / "docs" / "guides"
CODING_AGENT = GUIDES.parents[1] / "examples" / "coding_agent"  # modules that coding_agent_rl imports
REPOSITORIES = {
    "slime": "https://github.com/THUDM/slime/blob/624b824",
    "miles": "https://github.com/radixark/miles/blob/31f1ca9",
}
MILES_PAGE = """\
# Miles's launch scripts

<!-- Written by scripts/check_launch_scripts.py MILES_DIR --docs. Run it again instead of editing the table. -->

Miles has {total} launch scripts at commit 31f1ca9 that start training: bash scripts, and Python launchers with their
default arguments. With `--engine sglang` added, `--train-backend megatron` where the script has no backend, and paths
of your own, {passed} of them pass furlong's checks, which [slime's launch scripts](slime-scripts.md) explains.
The others are refused before anything starts: {reasons}. "flags" are flags or functions that furlong does not have,
"no command" are launchers that need a model, data or packages of their own, and "no stand-in" are models without a
family here."""
PAGE = """\
# slime's launch scripts

<!-- Written by scripts/check_launch_scripts.py SLIME_DIR --docs. Run it again instead of editing the table. -->

slime has {total} launch scripts at commit 624b824: `run-*.sh` and `low_precision/*.sh` in its folder of scripts, and
those of its examples. With `--train-backend megatron --engine sglang` added and your own paths, {passed} of them
pass furlong's checks (coding_agent_rl with `examples/coding_agent` of this repository on PYTHONPATH).
The others are refused before anything starts: {reasons}.

`python scripts/check_launch_scripts.py SLIME_DIR` prints the messages for any checkout of slime. It lets bash
evaluate each script in a sandbox in which no command runs, replaces data by stand-ins with the script's columns, and
models by stand-ins with the sizes that `scripts/published_models.json` has of the published config.json and, for
models that are not listed there, with those of the script. It assumes GPUs, and runs the checks of `furlong doctor`.
A pass means that flags, functions, model and data fit together, not that the script was trained at its size. Small
versions of 18 scripts train in nightly tests.

A flag in the last column is accepted, and the log has a line that says what happens instead (`--strict-flags` makes it
an error)."""
MODEL_FLAGS = ("--hf-checkpoint", "--ref-load", "--load", "--opd-teacher-load", "--critic-load")
PROMPT_FLAGS = ("--prompt-data", "--eval-prompt-data")
FILE_FLAGS = ("--eval-config", "--custom-config-path", "--sglang-config", "--chat-template-path")


@dataclass(frozen=True)
class Verdict:
    """What furlong says about a script.

    status: "pass", "on purpose" or "refused". category: why it is not a pass. problems: the errors of the checks.
    notes: what the script's own environment lacks, or what is wrong in the script itself. ignored: flags that are
    accepted although something else happens than they ask for.
    """

    script: str
    status: str
    category: str = ""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    model: str = ""
    warnings: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 if a script is refused that should pass."""
    if argv is None and sys.argv[1:2] == ["--judge"]:
        print(json.dumps(judge(json.loads(sys.stdin.read()))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slime_dir", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args(argv)
    verdicts = check_all(options.slime_dir.resolve(), only=options.only)
    if options.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    elif options.docs:
        origin = "miles" if (options.slime_dir / "miles").is_dir() else "slime"
        target = GUIDES / f"{origin}-scripts.md"
        target.write_text("\n".join(page(verdicts, origin)) + "\n", encoding="utf-8")
        print(f"wrote {target}")
    else:
        print("\n".join(table(verdicts)))
    return int(any(verdict.status == "refused" for verdict in verdicts))


def check_all(slime_dir: Path, *, only: str = "") -> list[Verdict]:
    """Return a verdict for each launch script, in the order of their paths."""
    scripts, _ = launch_scripts(slime_dir)
    scripts = [script for script in scripts if only in str(script.relative_to(slime_dir))]
    with tempfile.TemporaryDirectory() as folder:
        root = shadow(slime_dir, Path(folder) / "checkout")
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        (warm := Path(folder) / "warm").mkdir()
        python = warm_python.start(warm, PRELOADED, environment=environment) / "python"

        def check(job: tuple[int, Path]) -> Verdict:
            number, script = job
            scratch = Path(folder) / str(number)
            return verdict_of(script.relative_to(slime_dir), scratch, slime_dir, root, python, environment)

        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(check, enumerate(scripts)))


def shadow(slime_dir: Path, folder: Path) -> Path:
    """Copy the scripts of a checkout and link the rest, without slime or Miles itself."""
    folder.mkdir()
    for entry in slime_dir.iterdir():
        if entry.name in HIDDEN:
            continue
        if entry.name in ("scripts", "examples"):
            shutil.copytree(entry, folder / entry.name, symlinks=True)
        else:
            (folder / entry.name).symlink_to(entry)
    return folder


def verdict_of(
    script: Path, scratch: Path, slime_dir: Path, root: Path, python: Path, environment: Mapping[str, str]
) -> Verdict:
    """Check the command of one script in a separate process, which `python` starts."""
    place = slime_dir if script.suffix == ".py" else root  # launchers in Python need the modules of the checkout
    commands = training_commands(place / script, place, scratch)
    if not commands:
        failure = scratch / FAILURE
        reason = f": {failure.read_text()}" if failure.exists() else " without arguments"
        return Verdict(str(script), "refused", "no command", (f"the script starts no training command{reason}",))
    command = commands[-1]
    notes = ["its command lacks a backslash, so the shell passes only a part of it"] * command.lacks_backslash
    flags = by_flag(command.words)
    model = Path((flags.get("--hf-checkpoint") or [""])[-1]).name
    try:
        words = StandIns(root, scratch / "files", flags).words(command.words)
    except KeyError as error:
        problem = f"no stand-in for the model {error}: add its family to scripts/launch_standins.py"
        return Verdict(str(script), "refused", "no stand-in", (problem,), tuple(notes), model)
    added = ["--engine", "sglang", *([] if "--train-backend" in words else ["--train-backend", "megatron"])]
    request = {"words": [*words, *added], "is_async": command.entry_point == "train_async.py"}
    paths = [str((root / script).parent), str(root), str(CODING_AGENT)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [python, str(Path(__file__).resolve()), "--judge"],
        input=json.dumps(request), capture_output=True, text=True, cwd=root,
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)}, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        return Verdict(str(script), "refused", "crash", (done.stderr[-2000:],), tuple(notes), model)
    return decide(str(script), json.loads(done.stdout.splitlines()[-1]), notes, model)


def decide(script: str, findings: Sequence[dict[str, str]], notes: Sequence[str], model: str) -> Verdict:
    """Make a verdict of diagnoses. A package that the script's own function imports is a note."""
    errors = [each["text"] for each in findings if each["severity"] == "error"]
    missing = [text for text in errors if foreign_package(text)]
    problems = [text for text in errors if text not in missing]
    notes = [*notes, *dict.fromkeys(f"needs the package {foreign_package(text)}" for text in missing)]
    warnings = tuple(each["text"] for each in findings if each["severity"] == "warning")
    categories = list(dict.fromkeys(map(category_of, problems)))
    if not problems:
        status, category = "pass", ""
    else:
        meant = [category for category in categories if category in ON_PURPOSE]
        status, category = ("on purpose", meant[0]) if meant else ("refused", ", ".join(categories))
    infos = [each["text"] for each in findings if each["severity"] == "info" and each["id"] == "CFG02"]
    infos = [text for text in infos if text.startswith("--") and "describe the model" not in text]
    ignored = tuple(dict.fromkeys(text.split()[0] for text in infos))
    return Verdict(script, status, category, tuple(problems), tuple(notes), model, warnings, ignored)


def foreign_package(problem: str) -> str:
    """Return the package that a user function imports and that is not installed, other than slime; else ""."""
    found = re.search(r"needs the (?:module|package) ([\w.-]+), which is not installed", problem)
    name = found[1].partition(".")[0] if found else ""
    return name if name not in ("slime", "furlong") else ""


def category_of(problem: str) -> str:
    """Return the category of a problem: one of `ON_PURPOSE` or `WAITING`, or "flags"."""
    for category, marks in (ON_PURPOSE | WAITING).items():
        if any(mark in problem for mark in marks):
            return category
    return "flags"


def by_flag(words: Sequence[str]) -> Flags:
    """Return the words after each flag of a command; the last occurrence counts."""
    flags: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            current = flags[name] = [value] if equals else []
        else:
            current.append(word)
    return flags


class StandIns:
    """Replaces the paths in a command by stand-ins below `folder`.

    root: the checkout, in which relative paths and those below /root/slime are looked up.
    """

    def __init__(self, root: Path, folder: Path, flags: Flags) -> None:
        self._root, self._folder, self._flags = root, folder, flags
        name = (flags.get("--hf-checkpoint") or [""])[-1]
        self._config = model_config(name, flags)
        self._saves = {path.rstrip("/") for path in flags.get("--save", ())}

    def words(self, words: Sequence[str]) -> list[str]:
        """Return the command with the paths replaced."""
        flag, replaced = "", list[str]()
        for word in words:
            if word.startswith("--"):
                flag = word
                replaced.append(word)
            else:
                replaced.append(self._place(flag, word))
        return replaced

    def _place(self, flag: str, word: str) -> str:
        target = self._folder / word.strip("/").replace("..", "_")
        if flag in FILE_FLAGS:
            return self._settings(word, target)
        if flag in MODEL_FLAGS and not (flag == "--load" and word.rstrip("/") in self._saves):
            return str(self._model(flag, target))
        if flag in PROMPT_FLAGS and Path(word).suffix in (".jsonl", ".parquet"):
            return str(write_prompts(target, self._flags))
        return str(target) if word.startswith("/") else word

    def _model(self, flag: str, target: Path) -> Path:
        is_copy = flag != "--hf-checkpoint"  # a Megatron checkpoint of the same model, in bfloat16
        config = {key: value for key, value in self._config.items() if not is_copy or key != "quantization_config"}
        return write_model(target, config)

    def _settings(self, word: str, target: Path) -> str:
        """Copy a file of settings, with the paths in it replaced."""
        inside = self._root / re.sub(r"^/root/(slime|miles)/", "", word)
        written = self._root.glob(f"examples/**/{inside.name}")  # by the script, from one beside it
        source = next((path for path in (inside, Path(word), *written) if path.is_file()), None)
        if source is None:
            return word
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(rewrite_paths(source.read_text(encoding="utf-8"), self._inner), encoding="utf-8")
        return str(target)

    def _inner(self, path: str) -> str:
        target = self._folder / path.strip("/")
        return str(
            write_prompts(target, self._flags) if target.suffix in (".jsonl", ".parquet") else self._model("", target)
        )


def judge(request: dict[str, Any]) -> list[dict[str, str]]:
    """Return the diagnoses of a command on an assumed machine with GPUs: text and severity of each."""
    from furlong.config.checks.engine_checks import device_problems
    from furlong.config.command_line import examine
    from furlong.diagnosis.preflight import CHECKS, preflight
    from furlong.diagnosis.preflight import machine_checks as machine

    preset = {"async_buffer_size": 1} if request["is_async"] else {}
    resolved, problems = examine(request["words"], preset=preset)
    checks = [check for check in CHECKS if check.__module__ != machine.__name__]
    findings = preflight(resolved.config, problems, checks=checks)
    said = [{"id": one.id, "severity": one.severity, "text": f"{one.finding}; {one.remedy}"} for one in findings]
    problems_of_gpus = device_problems(resolved.config, "cuda")
    return said + [{"id": "CFG05", "severity": "error", "text": text} for text in problems_of_gpus]


def _by_number(counts: Counter[str]) -> list[tuple[str, int]]:
    """Return names with their numbers, the largest first; equal numbers in alphabetical order."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the lines of the table and the counts."""
    width = max((len(verdict.script) for verdict in verdicts), default=0)
    lines: list[str] = []
    for verdict in verdicts:
        reason = f": {verdict.category}" if verdict.category else ""
        lines.append(f"{verdict.script:{width}}  {verdict.status}{reason}")
        lines += [f"{'':{width}}    - {problem}" for problem in verdict.problems]
        lines += [f"{'':{width}}    ({note})" for note in verdict.notes]
    counts = Counter(verdict.status for verdict in verdicts)
    categories = Counter(verdict.category for verdict in verdicts if verdict.category)
    summary = ", ".join(f"{counts[status]} {status}" for status in ("pass", "on purpose", "refused"))
    return [
        *lines,
        "",
        f"{len(verdicts)} scripts: {summary}",
        *(f"  {n:3} {name}" for name, n in _by_number(categories)),
    ]


def page(verdicts: Sequence[Verdict], origin: str) -> list[str]:
    """Return the lines of the documentation's page."""
    counts = Counter(verdict.status for verdict in verdicts)
    refused = Counter(verdict.category for verdict in verdicts if verdict.status != "pass")
    reasons = ", ".join(f"{name} ({count})" for name, count in _by_number(refused))
    text = MILES_PAGE if origin == "miles" else PAGE
    lines = [*text.format(total=len(verdicts), passed=counts["pass"], reasons=reasons).splitlines(), ""]
    lines += ["| script | model | here | flags without effect |", "|---|---|---|---|"]
    for verdict in verdicts:
        here = "passes" if verdict.status == "pass" else f"refused: {verdict.category}"
        notes = f"; {'; '.join(verdict.notes)}" if verdict.notes else ""
        ignored = ", ".join(f"`{flag}`" for flag in verdict.ignored)
        link = f"[{verdict.script.partition('/')[2]}]({REPOSITORIES[origin]}/{verdict.script})"
        lines.append(f"| {link} | {verdict.model} | {here}{notes} | {ignored} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
