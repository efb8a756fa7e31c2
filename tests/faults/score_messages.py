"""Last words of programs in last_words.txt, and noisy logs of healthy ones in noisy_logs.txt, for the score.

A case starts with a line `=== ROW: name | word of the fix` in last_words.txt, and `=== name` in noisy_logs.txt.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from diagnosis_score import Case, log

FOLDER = Path(__file__).parent
BEGIN = "=== "


def _cases(file: str) -> Iterator[tuple[str, str]]:
    """Yield title and text of each case of a file."""
    for part in f"\n{(FOLDER / file).read_text()}".split(f"\n{BEGIN}")[1:]:
        title, _, text = part.partition("\n")
        yield title, text


def _fault(title: str, text: str) -> Case:
    rows, _, rest = title.partition(": ")
    name, _, remedy = rest.partition(" | ")
    return log(f"last words: {name}", rows, text, remedy=remedy)


CASES: tuple[Case, ...] = tuple(_fault(*each) for each in _cases("last_words.txt"))
NOISY: tuple[Case, ...] = tuple(log(f"noisy log: {title}", "", text) for title, text in _cases("noisy_logs.txt"))
