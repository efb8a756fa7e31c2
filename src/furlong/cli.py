"""The command line: `furlong COMMAND ...`, with one row and one function per command."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from furlong.commands import COMMANDS, GROUPS
from furlong.commands.output import problems_text, show, terminal_width
from furlong.core.process_end import EXIT_WITHIN_S, end_children, exit_within, sigterm_unwinds
from furlong.core.text import did_you_mean, redact_credentials
from furlong.errors import ConfigError, EndedBySignal, FurlongError

TRAIN_ELSEWHERE = ("run", "start", "launch", "fit", "grpo", "ppo", "sft", "rl", "finetune")  # names of such commands
SERVE_ELSEWHERE = ("chat", "generate", "infer", "inference", "predict")
SLIMES_DEFAULTS = {"lr_decay_style": "linear"}  # Megatron's, where furlong has others


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 success, 1 failure, 2 wrong usage, 130 Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"] and words[1:2] and words[1] in COMMANDS:
        words = [words[1], "--help", *words[2:]]
    if not words or words[0] in ("-h", "--help", "help"):
        show(_usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version", "version"):
        from furlong.version import __version__

        print(f"furlong {__version__}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        _, hint = did_you_mean(words[0], COMMANDS)
        if words[0].startswith("-") or words[0] in TRAIN_ELSEWHERE:
            hint = f"did you mean furlong train{f' {words[0]} ...' if words[0].startswith('-') else ''}?"
        if words[0] in SERVE_ELSEWHERE:
            hint = "did you mean furlong serve?"
        print(
            f"furlong has no command {words[0]}; {f'{hint} ' if hint else ''}`furlong --help` lists all",
            file=sys.stderr,
        )
        return 2
    module, _, function = command.target.partition(":")
    return _run(
        f"furlong {words[0]}",
        lambda: getattr(import_module(module), function)(words[1:]),
        owns_process=argv is None,
    )


def _run(name: str, command: Callable[[], int], *, owns_process: bool) -> int:
    """Run a command; returns its exit code. In its own process, SIGTERM ends it in good order."""
    with sigterm_unwinds() if owns_process else contextlib.nullcontext():
        return _leave(_exit_code(name, command), owns_process=owns_process)


def _exit_code(name: str, command: Callable[[], int]) -> int:
    """Run a command; prints furlong's own errors to stderr, without a traceback."""
    try:
        return command()
    except ConfigError as error:
        notes: list[str] = getattr(error, "__notes__", [])
        print(redact_credentials("\n".join([problems_text(error), *notes])), file=sys.stderr)
        return 2
    except UnicodeEncodeError as error:  # of a path that a YAML or data file names
        encoding = sys.getfilesystemencoding()
        if encoding == "utf-8" or error.object.isascii():
            raise
        problem = (
            f"the locale decodes file names as {encoding}, but {error.object!a} is not ASCII; set PYTHONUTF8=1, or a "
            "UTF-8 locale such as LC_ALL=C.UTF-8"
        )
        print(redact_credentials(problems_text(ConfigError(problem))), file=sys.stderr)
        return 2
    except FurlongError as error:
        notes = getattr(error, "__notes__", [])
        text = "\n".join([f"{name}: {type(error).__name__}: {error}", *notes])
        print(redact_credentials(text), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except EndedBySignal as error:  # before a run, or in another command
        print(f"{name}: ended by SIGTERM", file=sys.stderr)
        return int(error.code or 0)
    except SystemExit as error:  # of a run that SIGTERM ended
        if not isinstance(error.code, int):
            raise
        return error.code


def _leave(code: int, *, owns_process: bool) -> int:
    """Return the exit code. If user code was imported, its processes and threads cannot keep this one running."""
    if owns_process and "furlong.core.user_modules" in sys.modules:
        end_children()
        exit_within(EXIT_WITHIN_S, code)
    return code


def train(words: list[str], preset: Mapping[str, Any] | None = None) -> int:
    """Train a model, or print the help of the flags. `preset` overrides defaults of flags."""
    if asked := [place for place, word in enumerate(words) if word in ("-h", "--help")]:
        from furlong.config.help import help_text

        about = words[asked[0] + 1 :] if asked[0] == 0 else []
        show(help_text(about, width=terminal_width(80, 110)))
        return 0
    from furlong.config.command_line import examine
    from furlong.run.launch import run

    faulthandler.enable(2)
    run(*examine(words, preset=preset))
    return 0


def main_async(argv: Sequence[str] | None = None) -> int:
    """Entry point of `train_async.py`: slime's defaults, and --async-buffer-size 1."""
    return _entry(argv, SLIMES_DEFAULTS | {"async_buffer_size": 1})


def main_train(argv: Sequence[str] | None = None) -> int:
    """Entry point of `train.py`: slime's defaults."""
    return _entry(argv, SLIMES_DEFAULTS)


def _entry(argv: Sequence[str] | None, preset: Mapping[str, Any]) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    return _run("furlong", lambda: train(words, preset), owns_process=argv is None)


def _usage() -> str:
    lines = ["furlong: reinforcement-learning post-training of language models"]
    for title, rows in GROUPS.items():
        lines += ["", f"{title}:", *(f"  furlong {name:14} {row.summary}" for name, row in rows.items())]
    return "\n".join([*lines, "", "`furlong COMMAND --help` describes a command."])
