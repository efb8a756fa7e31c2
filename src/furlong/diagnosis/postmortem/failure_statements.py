"""Lines of a log that state why a process ended: the exceptions and last words of Python, C++, kernel and scheduler.

A log contains words such as "error", "nan" and "timeout" for many reasons. General signatures are searched only in
these lines, and only in those after which the process did no more work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST = 8  # lines of one statement: an exception and the lines of its message
# What Ray, torchrun, SGLang, NCCL and loggers write before a line.
PREFIX = re.compile(
    r"(?:\x1b\[[\d;]*m|\s*(?:\([^()\n]*\bpid=\d+[^()\n]*\)|\((?:raylet|autoscaler|gcs_server)[^()\n]*\)|\[rank\d+\]:|"
    r"\[[^\]\n]*\d\d:\d\d:\d\d[^\]\n]*\]|\[\s*\d+\.\d+\]|\d{4}-\d\d-\d\d[ T][\d:.,]+Z?|[\w.-]+:\d+:\d+ \[\d+\]|"
    r"\[[\w.-]+:\d+ *:\d+\]|[\w./]+\.(?:c|cc|cpp|cu):\d+:?|"
    r"\w{3} +\d+ [\d:]{8} [\w.-]+ kernel:)\s*)*"
)
EXCEPTION = (
    r"(?:Caused by: )?(?:\w+\.)*_*(?:[A-Z]\w*)?(?:Error|Exception|Exit|Interrupt|Failure|Timeout|Expired|OutOf\w+|Died|"
    r"Full|Unavailable|Lost|Mismatch|Disallowed|gaierror|herror)\w*(?=[:(\n]|$)|(?:\w+\.){2,}[A-Z]\w+: "
)
NATIVE = (
    r"terminate called|what\(\):|Fatal Python error|Out of memory:|Memory cgroup|slurmstepd: |srun: |sbatch: |"
    r"salloc: |NVRM: |lib\w+: |OpenBLAS |Segmentation fault|Bus error|Illegal instruction|Aborted|Killed|"
    r"[\w./-]+: line \d+: |"
    r"Failed to initialize|thread '[^'\n]*' panicked|panicked at|command terminated|[Rr]eason: |OMP: Error|"
    r"mpirun |torchrun: |raylet|The system (?:is|will)|Some of the step|Current loss scale|"
    r"=>> PBS: |TERM_\w+: |UCX +ERROR|malloc\(|free\(|double free|\*\*\* |ORTE |PMIX |NVIDIA-SMI has failed|"
    r"batch response: |The node was |Pod was |Stream closed EOF|Permission denied|"
    r"(?:bash|sh|zsh|docker|podman|ssh|scp|rsync|apptainer|singularity|enroot|pyxis|kubectl|env|nohup|curl|wget|git|"
    r"pip|apt|conda|uv|ray|torchrun|"
    r"deepspeed|python\d*(?:\.\d+)?|/[\w./-]+): "
)
LEVEL = (
    r"(?:[\w.-]+ ?[:-] ?)?\[?(?:ERROR|CRITICAL|FATAL|Error|error|fatal|Fatal error)\]?(?= ?[:|\-(] ?| {2,})|"
    r"[EF]\d{4} "
)
INSIDE = (  # words that state a failure anywhere in a line
    r"[^\n]*(?:NCCL (?:WARN|ERROR)|\bfatal(?: error)?\b *:|Assertion [^\n]* failed|\berror: |CANCELLED AT|CommError|"
    r"[Ww]atchdog caught|\[E ?[\w.]+\]|oom-kill|killed due to|Xid \(|(?:process|worker|job|pod|actor|task|rank|"
    r"node)\b[^\n]*(?:was|been|is) (?:killed|preempted|evicted|terminated))"
)
STATEMENT = re.compile(rf"(?P<exception>{EXCEPTION})|{NATIVE}|(?P<level>{LEVEL})|(?P<inside>{INSIDE})")
# Words of a failure that the program coped with.
HANDLED = re.compile(
    r"\b([Rr]etry(ing)?\b|[Ww]ill retry|[Rr]etries left|[Ii]gnor(ed?|ing)\b|[Ff]all(ing|s)? ?back|[Ss]kipp(ed|ing)\b|"
    r"[Rr]ecovered|[Cc]ontinu(ing|es)|DEBUG|INFO|WARNING|(Deprecation|Future|User|Runtime|Resource)Warning)\b|"
    r"\b(attempt|try) \d+( of |/)\d+|:\d\d\S* [DIW] [\w.]+: "
)
# Lines after which an earlier failure did not end the process: steps of training, batches and answers of an engine.
WORK = re.compile(
    r"\bstep +\d+|(Decode|Prefill) batch|\" 200 OK|\biteration +\d+/|\bepoch \d+|\d+/\d+ \[\d\d:\d\d|"
    r"fired up and ready|saved checkpoint|\b([Rr]un|[Tt]raining|[Ee]valuation|[Rr]ollout) (finished|completed|done)|"
    r"exit code 0\b"
)


def statements(content: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each statement of a failure in a text, in its order.

    A statement is a line and what follows of its message. One before a line of `WORK`, or that says that the program
    coped with it, is left out.
    """
    lines = content.splitlines(keepends=True)
    number = _end_of_work(lines)
    position = sum(map(len, lines[:number]))
    while number < len(lines):
        size = _length(lines, number)
        length = sum(map(len, lines[number : number + max(size, 1)]))
        if size:
            yield position, position + length
        position += length
        number += max(size, 1)


def _end_of_work(lines: list[str]) -> int:
    """Return the number of the line after the last one of `WORK` that is not a statement itself."""
    for number in reversed(range(len(lines))):
        if WORK.search(lines[number]) and not _length(lines, number):
            return number + 1
    return 0


def _length(lines: list[str], number: int) -> int:
    """Return the number of lines of the statement that starts here, 0 if none does."""
    line = lines[number]
    begin = PREFIX.match(line)
    found = STATEMENT.match(line, begin.end() if begin is not None else 0)
    if found is None or ((found["level"] or found["inside"]) and HANDLED.search(line)):
        return 0
    size = 1
    while size < LONGEST and number + size < len(lines):
        following = lines[number + size]
        start = PREFIX.match(following)
        is_next = STATEMENT.match(following, start.end() if start is not None else 0) is not None
        if not following.strip() or is_next or HANDLED.search(following) or "Traceback (most" in following:
            break
        size += 1
    return size
