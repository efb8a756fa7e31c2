"""Run a module like `python -m`, with a key from the environment in place of {KEY} in its arguments.

SGLang 0.5.16 and sglang-router only take keys on the command line, where `ps` shows them to every user of the machine,
and SGLang logs its own with its settings. A module, because child processes that are spawned need one.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from typing import Any

from furlong.core.process_environment import API_KEY_VARIABLE, KEY

if __name__ == "__main__":
    key = os.environ.pop(API_KEY_VARIABLE)  # child processes do not need it
    make_record = logging.getLogRecordFactory()

    def _masked(name: str, level: int, path: str, line: int, message: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(message, str):
            message = message.replace(f"api_key={key!r}", "api_key='***'")
        return make_record(name, level, path, line, message, *args, **kwargs)

    logging.setLogRecordFactory(_masked)
    words: list[str] = []
    for word in sys.argv[1:]:
        if word == KEY:
            words[-1] += f"={key}"  # a key may begin with a dash
        else:
            words.append(word.replace(KEY, key))
    sys.argv = words
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
