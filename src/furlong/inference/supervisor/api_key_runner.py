"""Run a module like `python -m`, passing its `--api-key` from the environment.

    FURLONG_API_KEY=KEY python -m furlong.inference.supervisor.api_key_runner sglang.launch_server ...

SGLang 0.5.16 and sglang-router only take the key on the command line, where `ps` shows it to every user of the
machine, and SGLang logs it with its settings. This keeps it out of both.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from typing import Any

from furlong.core.process_environment import API_KEY_VARIABLE


def redact(key: str) -> None:
    """Replace the key with `***` in log messages of this process that show settings."""
    make_record = logging.getLogRecordFactory()
    secret = f"api_key={key!r}"

    def redacted(
        name: str, level: int, path: str, line: int, message: Any, *args: Any, **kwargs: Any
    ) -> logging.LogRecord:
        if isinstance(message, str):
            message = message.replace(secret, "api_key='***'")
        return make_record(name, level, path, line, message, *args, **kwargs)

    logging.setLogRecordFactory(redacted)


def main() -> None:
    """Run the module named by the first argument with the other arguments and the key."""
    key = os.environ.pop(API_KEY_VARIABLE)  # child processes do not need it
    redact(key)
    sys.argv = [*sys.argv[1:], f"--api-key={key}"]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
