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
    """One row: what follows the name, what the command does, and the module whose `main(words)` does it."""

    form: str
    what: str
    module: str


COMMANDS: dict[str, Command] = {
    "train": Command(
        "FLAGS [--config run.yaml]", "train a model; `furlong train --help` lists the flags", "furlong.commands.train"
    ),
    "quickstart": Command(
        "[--async] [--seed N] [--output-dir DIR]",
        "teach a tiny model arithmetic, in two minutes on a CPU",
        "furlong.quickstart.command",
    ),
    "doctor": Command(
        "FLAGS [--json] | --list | --explain ID",
        "check a launch command without starting it",
        "furlong.commands.doctor",
    ),
    "serve": Command(
        "--model-path DIR [--port N] ...",
        "serve a model over HTTP with SGLang's protocol and OpenAI's",
        "furlong.commands.serve",
    ),
    "template": Command(
        "check --hf-checkpoint DIR [--template FILE|NAME] [--thinking on|off|both] [--json] | list | show NAME",
        "test a chat template: turns that rewrite history, ends of turns, prompts rendered twice",
        "furlong.commands.template",
    ),
    "plan": Command(
        "FLAGS --device NAME|GIB [--json]", "predict the memory of each phase on a GPU", "furlong.commands.plan"
    ),
    "trace": Command(
        "RUN_DIR", "make the trace of a run that was killed; others have made theirs", "furlong.commands.trace"
    ),
    "check": Command(
        "DIR [--headers-only] [--json]",
        "check a model folder or a trainer checkpoint: files, layers, values, quantization",
        "furlong.commands.check",
    ),
    "convert": Command(
        "hf-to-megatron SOURCE TARGET | megatron-to-hf SOURCE TARGET --hf-checkpoint DIR",
        "write a Megatron-LM checkpoint from a Hugging Face folder or a run's checkpoint, or the other way",
        "furlong.commands.convert",
    ),
    "env": Command(
        "[--json]",
        "compare installed versions with the tested ones, and load compiled kernels",
        "furlong.commands.env",
    ),
    "data": Command(
        "check FLAGS | tokenize FLAGS -o FILE",
        "read all rows as a run would: bad ones, lengths against limits; or write them as tokens",
        "furlong.commands.data",
    ),
    "reward": Command(
        "test --rm-type NAME|--custom-rm-path PATH --prompt-data FILE [--response TEXT]",
        "call a reward on rows of the data, with the right answer and with a wrong one",
        "furlong.commands.reward",
    ),
    "diff": Command(
        "RUN_A RUN_B [--rtol X] [--json]",
        "name the first step, stage and value in which two runs differ",
        "furlong.commands.diff",
    ),
    "bundle": Command(
        "RUN --step N [-o FILE] [--with-checkpoint]",
        "write one step of a run to a small file for a report, without paths, keys or text",
        "furlong.commands.bundle",
    ),
    "replay": Command(
        "BUNDLE --hf-checkpoint DIR [FLAGS]",
        "train the step in a bundle without an engine and compare with what was recorded",
        "furlong.commands.replay",
    ),
    "report": Command(
        "--ledger RUN_DIR [--json]",
        "audit that every prompt group of a run was used exactly once",
        "furlong.commands.report",
    ),
}


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
        from furlong.config.closest import did_you_mean

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
    lines = ["furlong: reinforcement-learning post-training of language models", "", "commands:"]
    lines += [f"  furlong {name} {row.form}\n      {row.what}" for name, row in COMMANDS.items()]
    return "\n".join(lines)
