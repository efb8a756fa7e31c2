"""The command line: `furlong COMMAND ...`. One row a command, one module each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from furlong.commands import train
from furlong.commands.output import problems_text, show
from furlong.errors import ConfigError, FurlongError


@dataclass(frozen=True)
class Command:
    """One row: what the command does, and the module whose `main(words)` does it."""

    what: str
    module: str


GROUPS: dict[str, dict[str, Command]] = {
    "train": {
        "quickstart": Command("teach a tiny model arithmetic, in a minute or two", "furlong.quickstart.quickstart"),
        "train": Command("train a model: `furlong train --help` lists the flags", "furlong.commands.train"),
    },
    "before a run": {
        "doctor": Command("check a launch command without starting it", "furlong.commands.doctor"),
        "plan": Command("predict the memory of each phase on a GPU", "furlong.commands.plan"),
        "data": Command("read every row as a run would, or write rows as tokens", "furlong.commands.data"),
        "reward": Command("try a reward on rows, with right and wrong answers", "furlong.commands.reward"),
        "template": Command("test a chat template: history, ends of turns", "furlong.commands.template"),
        "check": Command("check a model folder or a checkpoint", "furlong.commands.check"),
        "env": Command("compare installed versions with the tested ones", "furlong.commands.env"),
    },
    "of a run": {
        "doctor --run": Command("what is wrong with a run, or what it died of", "furlong.commands.doctor"),
        "report": Command("what runs came to; audit their prompt groups", "furlong.commands.report"),
        "diff": Command("name the first value in which two runs differ", "furlong.commands.diff"),
        "bundle": Command("write one step to a small file, without text", "furlong.commands.bundle"),
        "replay": Command("train the step of a bundle again, and compare", "furlong.commands.replay"),
        "trace": Command("make the trace of a run that was killed", "furlong.commands.trace"),
    },
    "models": {
        "serve": Command("serve a model with SGLang's and OpenAI's protocols", "furlong.commands.serve"),
        "convert": Command("Hugging Face to Megatron-LM checkpoints and back", "furlong.commands.convert"),
    },
}
COMMANDS = {name: row for rows in GROUPS.values() for name, row in rows.items() if " " not in name}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 well, 1 failed, 2 wrong usage, 130 interrupted by Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        show(_usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from furlong import __version__

        print(f"furlong {__version__}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        from furlong.core.text import did_you_mean

        _, hint = did_you_mean(words[0], COMMANDS)
        print(f"furlong has no command {words[0]}; {hint or 'it has those below'}\n\n{_usage()}", file=sys.stderr)
        return 2
    return _exit_code(f"furlong {words[0]}", lambda: import_module(command.module).main(words[1:]))


def _exit_code(name: str, command: Callable[[], int]) -> int:
    """Run a command; an error that furlong raises on purpose becomes one message on stderr."""
    try:
        return command()
    except ConfigError as error:
        print(problems_text(error), file=sys.stderr)
        return 2
    except FurlongError as error:
        notes: list[str] = getattr(error, "__notes__", [])
        print("\n".join([f"{name}: {type(error).__name__}: {error}", *notes]), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def main_async(argv: Sequence[str] | None = None) -> int:
    """Entry of `train_async.py`: one rollout ahead unless --async-buffer-size says otherwise."""
    return _entry(argv, {"async_buffer_size": 1})


def main_train(argv: Sequence[str] | None = None) -> int:
    """Entry of `train.py`."""
    return _entry(argv, {})


def _entry(argv: Sequence[str] | None, preset: Mapping[str, Any]) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    return _exit_code("furlong", lambda: train.main(words, preset))


def _usage() -> str:
    lines = ["furlong: reinforcement-learning post-training of language models"]
    for title, rows in GROUPS.items():
        lines += ["", f"{title}:", *(f"  furlong {name:14} {row.what}" for name, row in rows.items())]
    return "\n".join([*lines, "", "`furlong COMMAND --help` says more of each."])
