"""Training commands of launch scripts: run a script in a sandbox in which nothing but the script itself starts.

bash evaluates arrays, arithmetic, defaults and sourced files as the script's author meant them. PATH contains a few
harmless text tools; every other command succeeds without being run, and the one that starts `train.py` or
`train_async.py` is recorded with its arguments. The launchers of Miles in Python run with the modules of its checkout,
but `exec_command`, which would start commands, only records.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ENTRY_POINTS = ("train.py", "train_async.py", "train_multi_lora_async.py")
TOOLS = ("awk", "basename", "cat", "cut", "date", "dirname", "expr", "grep", "head", "sed", "seq", "tail", "tr", "wc")
PYTHON_WORDS = ((), ("train",), ("full-train",))  # arguments to try; some launchers have subcommands
# What scripts ask their users for, by a part of their path: words and variables.
ARGUMENTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "p2p_weight_transfer/run-": (("broadcast", "0", "127.0.0.1"), {}),  # a mode, and the rank and address of the node
    "single_round/run_sft.py": ((), {"MILES_DATASET_TRANSFORM_ID": "id"}),
    "run-glm47-flash-agentic-async.py": (("--num-nodes", "2"), {}),
    "run_deepseek_v32.py": (("train", "--actor-num-nodes", "16", "--rollout-num-gpus", "64"), {}),
    "run_nemotron_3_ultra": (("train", "--num-nodes", "16"), {}),
}
FAILURE = "failure"  # file of the scratch folder: why a launcher in Python started nothing
TIME_LIMIT_S = 20
CALLS_TRAINING = re.compile(r"\btrain(_async)?\.py\b")
PYTHON_LAUNCH = re.compile(r"^(?!\s*def ).*\bexecute_train\(")
_END, _REST = "\x01", "\x02"
_REFERENCE = re.compile(r"\$(?:([A-Z]\w*)|\{([A-Z]\w*)(?::-)?\})")  # without a default, or with an empty one
_ASSIGNED = re.compile(r"\b([A-Z]\w*)=(?!\"?\$\{\1:-\}\"?\s)|\bfor (\w+) in|printf -v (\w+)|\$\{([A-Z]\w*):-[^}]")

# Functions take precedence over builtins and PATH. `set -e` must not end a script because a command printed nothing. A
# missing file is looked up in scripts/models, since one of slime's scripts names it by a wrong relative path. A command
# that begins with a flag is the rest of the command before, which lacks a backslash. Files have at most 1 MiB: nothing
# that a script writes is needed.
_PRELUDE = (
    f"""
ulimit -f 1024 -t {TIME_LIMIT_S}
"""
    + """
set -C
record() {
  local word
  for word in "$@"; do
    case "$word" in
      train.py|*/train.py|train_async.py|*/train_async.py) printf '%s\\0' "$@" $'\\001' >&"$CAPTURE_FD"; return 0 ;;
    esac
  done
}
command_not_found_handle() {
  case "$1" in --[a-z]*) printf '%s\\0' $'\\002' "$@" $'\\001' >&"$CAPTURE_FD" ;; *) record "$@" ;; esac
}
python3() { case "$*" in *cluster_resources*) echo 1000000 ;; *) record python3 "$@" ;; esac; }
set() { :; }
kill() { :; }
mktemp() { echo "$HOME/file.$RANDOM$RANDOM"; }
cd() { builtin cd "$@" 2>/dev/null || :; }
source() {
  if [ -f "$1" ]; then builtin source "$@"; else builtin source "$MODEL_SCRIPTS/${1##*/}"; fi
}
"""
)


@dataclass(frozen=True)
class TrainingCommand:
    """A command that a script starts: `train.py` or `train_async.py`, and its arguments.

    lacks_backslash: the script's command ends early, and the shell would take the rest for another command.
    """

    entry_point: str
    words: tuple[str, ...]
    lacks_backslash: bool = False


def launch_scripts(slime_dir: Path) -> tuple[list[Path], list[Path]]:
    """Return the launch scripts of slime or Miles, and other scripts that start training (tests, plugins).

    Launch scripts are those below `scripts/` and `examples/` that call `train.py`, `train_async.py` or, in Python of
    Miles, `execute_train`; files of `scripts/models` only define arrays, so they do not count.
    """
    kinds = ("*.sh", "*.py") if (slime_dir / "miles").is_dir() else ("*.sh",)
    found = (path for kind in kinds for path in slime_dir.rglob(kind))
    scripts = [path for path in sorted(found) if path.is_file() and _calls_training(path)]
    launched = [path for path in scripts if path.relative_to(slime_dir).parts[0] in ("scripts", "examples")]
    return launched, [path for path in scripts if path not in launched]


def _calls_training(path: Path) -> bool:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    pattern = CALLS_TRAINING if path.suffix == ".sh" else PYTHON_LAUNCH
    return any(pattern.search(line) for line in lines if not line.lstrip().startswith("#"))


def training_commands(script: Path, root: Path, scratch: Path) -> list[TrainingCommand]:
    """Run a launch script without effects and return the training commands that it would start.

    `root` is the checkout and the working directory; `scratch` is an empty folder for tools and a home. Ends after
    `TIME_LIMIT_S`; commands recorded until then count.
    """
    asked = next((arguments for part, arguments in ARGUMENTS.items() if part in str(script)), ((), {}))
    tools, home = scratch / "bin", scratch / "home"
    for folder in (tools, home):
        folder.mkdir(parents=True, exist_ok=True)
    for name in TOOLS:
        target = shutil.which(name)
        if target is not None and not (tools / name).exists():
            (tools / name).symlink_to(target)
    if script.suffix == ".py":
        return _python_commands(script, root, scratch, *asked)
    (scratch / "prelude.sh").write_text(_PRELUDE, encoding="utf-8")
    reader, writer = os.pipe()
    environment = {
        **unset_variables(script.read_text(encoding="utf-8", errors="replace")),
        **asked[1],
        "PATH": str(tools),
        "HOME": str(home),
        "TMPDIR": str(home),
        "BASH_ENV": str(scratch / "prelude.sh"),
        "MODEL_SCRIPTS": str(root / "scripts" / "models"),
        "CAPTURE_FD": str(writer),
    }
    with subprocess.Popen(
        [*_namespaces(), shutil.which("bash") or "/bin/bash", str(script), *asked[0]],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(writer,),
        start_new_session=True,
    ) as process:
        os.close(writer)
        timer = threading.Timer(TIME_LIMIT_S, _kill, [process])
        timer.start()
        with os.fdopen(reader, "rb") as captured:
            words = captured.read().decode().split("\0")[:-1]
        timer.cancel()
        _kill(process)
    return _split(words)


def _python_commands(
    script: Path, root: Path, scratch: Path, asked: tuple[str, ...], more: Mapping[str, str]
) -> list[TrainingCommand]:
    """Run a launcher in Python with read-only files and without network or other processes, by bubblewrap."""
    (scratch / "record.py").write_text(_RECORDER, encoding="utf-8")
    sandbox = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-all", "--die-with-parent"]
    sandbox += ["--bind", str(scratch), str(scratch), "--chdir", str(root), "--clearenv"]
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(scratch), "TMPDIR": str(scratch), "PYTHONPATH": str(root)}
    for name, value in {**variables, **more, "PYTHONDONTWRITEBYTECODE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        sandbox += ["--setenv", name, value]
    for words in (asked,) if asked else PYTHON_WORDS:
        (scratch / "words").write_text("", encoding="utf-8")
        command = [*sandbox, sys.executable, str(scratch / "record.py"), str(scratch / "words"), str(script), *words]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
            )
            said = [line.strip(" │╭╰─╮╯") for line in done.stderr.splitlines()]
            if "Got unexpected extra argument" not in done.stderr and "Missing command" not in done.stderr:
                (scratch / FAILURE).write_text(next((line for line in reversed(said) if line), ""), encoding="utf-8")
        if recorded := (scratch / "words").read_text(encoding="utf-8"):
            return _split(recorded.split("\0")[:-1])
    return []


# Writes the words of a training command into the file that is its first argument, and runs the launcher, the second.
# The module that waits for servers is replaced: it imports torch, which takes five seconds.
_RECORDER = """
import runpy, shlex, sys, types
from pathlib import Path
servers = types.ModuleType("miles.utils.http_utils")
servers.wait_for_server_ready = lambda *words, **options: None
sys.modules[servers.__name__] = servers
import miles.utils.external_utils as package

def run(command, capture_output=False, **options):
    if "ray job submit" in command:
        with open(WORDS, "a") as file:
            file.write("\\0".join([*shlex.split(command), "\\1"]) + "\\0")
    return "0"

_, WORDS, script, *rest = sys.argv
module = types.ModuleType("miles.utils.external_utils.exec_command")
module.exec_command_cpu = module.exec_command_gpu = run
module.exec_command_multi_node = lambda *words, **options: ["0"]
package.exec_command = sys.modules[module.__name__] = module
sys.argv = [script, *rest]
sys.path.insert(0, str(Path(script).parent))
runpy.run_path(script, run_name="__main__")
"""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of a script that still runs."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _namespaces() -> list[str]:
    """Return the prefix that hides network and processes, if this user may create namespaces."""
    prefix = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None:
        return []
    trial = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    return [str(shutil.which("unshare")), *prefix[1:]] if trial.returncode == 0 else []


def _split(words: Sequence[str]) -> list[TrainingCommand]:
    """Split the recorded words into commands, and drop what is before the entry point."""
    commands: list[TrainingCommand] = []
    command: list[str] = []
    for word in words:
        if word != _END:
            command.append(word)
            continue
        if command[0] == _REST:
            if commands:
                commands[-1] = replace(commands[-1], words=(*commands[-1].words, *command[1:]), lacks_backslash=True)
            command = []
            continue
        start = next((i for i, each in enumerate(command) if Path(each).name in ENTRY_POINTS), None)
        if start is None:
            command = []
            continue
        commands.append(TrainingCommand(Path(command[start]).name, tuple(command[start + 1 :])))
        command = []
    return commands


def unset_variables(text: str) -> dict[str, str]:
    """Return values for the variables that a script expects from its user: used without a default, never assigned.

    >>> unset_variables('A=1; echo $A ${B:-2} $BASE_DIR ${WANDB_KEY} ${X[@]}')
    {'BASE_DIR': '/root', 'WANDB_KEY': 'wandb_key'}
    """
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    names = dict.fromkeys(match[1] or match[2] for match in _REFERENCE.finditer(code))
    assigned = set(
        re.findall(r"\b([A-Z]\w*)=(?!\"?\$\{\1:-\}\"?\s)|\bfor (\w+) in|printf -v (\w+)|\$\{([A-Z]\w*):-[^}]", code)
    )
    known = {name for names in assigned for name in names} | {"BASH_SOURCE", "NF", "PATH", "HOME", "PWD"}
    return {name: _user_value(name) for name in names if name not in known and not name.endswith("_ARGS")}


def _user_value(name: str) -> str:
    if name.endswith(("_DIR", "_FOLDER", "_PATH", "_ROOT")):
        return "/root"
    return "127.0.0.1" if name.endswith(("_ADDR", "_HOST")) else name.lower()
