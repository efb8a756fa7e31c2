"""F1 of the words in response and label, as in SQuAD."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from furlong.rewards.answers import text_label

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = {"yes", "no", "noanswer"}


def score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return the token-level F1 (SQuAD, arXiv:1606.05250 sec. 6.1) in [0, 1], the maximum over a list of labels.

    Text is compared in lower case, without punctuation and articles. The answers yes, no and noanswer must match
    exactly (HotpotQA's rule), because many wrong sentences contain "no".
    """
    del metadata
    labels: Sequence[Any] = label if isinstance(label, list | tuple) and label else [label]
    return max(_f1(_words(response), _words(text_label(each))) for each in labels)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _f1(answer: list[str], truth: list[str]) -> float:
    if answer == truth:
        return 1.0
    if " ".join(answer) in _CLOSED or " ".join(truth) in _CLOSED:
        return 0.0
    common = (Counter(answer) & Counter(truth)).total()
    return 2 * common / (len(answer) + len(truth)) if common else 0.0
