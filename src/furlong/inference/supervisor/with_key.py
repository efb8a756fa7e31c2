"""Run a module as `python -m` does, with the key that its server wants as `--api-key`, from the environment.

    FURLONG_API_KEY=KEY python -m furlong.inference.supervisor.with_key sglang.launch_server --model-path MODEL ...

SGLang 0.5.16 and sglang-router take a key in their command only, which `ps` shows to all users of the machine, and
SGLang writes it into its log with all of its settings. Here neither command nor log has it.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from typing import Any

from furlong.core.process_environment import API_KEY_VARIABLE


def hide(key: str) -> None:
    """Have `***` in the place of the key where a message of this process's log shows settings."""
    make = logging.getLogRecordFactory()
    told = f"api_key={key!r}"

    def made(name: str, level: int, path: str, line: int, message: Any, *more: Any, **named: Any) -> logging.LogRecord:
        if isinstance(message, str):
            message = message.replace(told, "api_key='***'")
        return make(name, level, path, line, message, *more, **named)

    logging.setLogRecordFactory(made)


def main() -> None:
    """Run the module that the first word names, with the others and the key."""
    key = os.environ.pop(API_KEY_VARIABLE)  # processes that it starts need none
    hide(key)
    sys.argv = [*sys.argv[1:], f"--api-key={key}"]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
