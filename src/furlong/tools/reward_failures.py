"""Kinds of failures of reward calls that the data did not cause, recognized by the reason of the outcome."""

from __future__ import annotations

import re

# Pattern of the reason, cause, remedy. First match.
KINDS = tuple(
    (re.compile(pattern), cause, remedy)
    for pattern, cause, remedy in (
        (
            r"ended \(killed by SIGKILL\)",
            "Something killed its process: the out-of-memory killer, a limit of the container, or the function itself.",
            "check `dmesg | grep -i oom`, and what the function keeps in memory; fewer --num-reward-workers need less",
        ),
        (
            r"ended \(killed by SIG(SEGV|BUS|ILL|FPE|ABRT)\)",
            "A compiled library that the function calls crashed.",
            "run the function with `python -X faulthandler`, and update the library in its traceback",
        ),
        (
            r"ended \(killed by ",
            "A signal ended its process.",
            "find what sends it: a limit (`ulimit -a`), or the code",
        ),
        (
            r"ended \(exit code |SystemExit|ProcessExitError",
            "The function, or a library that it calls, ends its process (sys.exit or os._exit).",
            "remove that call, or raise an exception in its place",
        ),
        (
            r"ConnectionRefused|Connection refused|ConnectError|Cannot connect|Max retries exceeded",
            "The function calls a server that refuses connections: it is not running yet, or listens elsewhere.",
            "start the server, or fix its address in the function; `furlong reward test` tries again",
        ),
        (
            r"gaierror|Name or service not known|NameResolution|ConnectionReset|RemoteProtocolError|ConnectTimeout"
            r"|ReadTimeout|Network is unreachable",
            "The function calls a server that it does not reach, or that does not answer.",
            "check the server's address, the network and the proxy variables of this machine",
        ),
        (
            r"ModuleNotFoundError|ImportError",
            "A package that the function imports is not installed in this environment.",
            "install it into the environment of `furlong train`",
        ),
        (
            r"FileNotFoundError|PermissionError",
            "A file that the function reads or writes is missing or not accessible from a reward worker.",
            "use absolute paths, and check permissions",
        ),
        (
            r"MemoryError|Cannot allocate memory",
            "The function ran out of memory, or needs more than --reward-memory-limit, if that is given.",
            "check what it keeps in memory; raise --reward-memory-limit if it needs that much; without a limit, fewer "
            "--num-reward-workers need less",
        ),
    )
)


def failure_cause(reason: str) -> tuple[str, str] | None:
    """Return cause and remedy of a failure that the data did not cause; None for another one.

    >>> failure_cause("ConnectError: [Errno 111] Connection refused")[1].partition(",")[0]
    'start the server'
    """
    message = reason.partition("\n")[0]  # without the lines of code, which may name anything
    return next(((cause, remedy) for pattern, cause, remedy in KINDS if pattern.search(message)), None)
