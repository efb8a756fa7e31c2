r"""The built-in verifiers, and their table by `--rm-type` name.

They run in the driver. `math` and `deepscaler` compare equal text, plain numbers and words here; everything else needs
`rewards.algebra`, which parses LaTeX with math-verify and sympy in the sandbox.
"""

from __future__ import annotations

import functools
import hashlib
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

from furlong.config.checks.value_checks import BOXED, verifier_problem
from furlong.core.sample import Sample
from furlong.core.task_entries import task_dataset, task_entry
from furlong.errors import ConfigError, DataError, RewardError
from furlong.rewards.math_text import has_box, last_boxed, number_from, quick_equal, tidy

# Labels and responses


def after_thinking(text: str) -> str:
    """Return the text after the last `</think>`, or all of it if there is none."""
    return text.rsplit("</think>", 1)[-1]


def text_label(label: Any) -> str:
    """Return a label as stripped text. Raises DataError unless it is a number or non-empty text."""
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise DataError(
            f"the label is {label!r} of type {type(label).__name__}, a verifier needs text or a number; "
            "check --label-key"
        )
    text = str(label).strip()
    if not text:
        raise DataError("the label is empty, nothing can be verified against it; check --label-key")
    return text


# math

MATH_TAIL = 2_000  # characters at the end of a response without a box that are searched for an answer

_SPECIAL = re.compile(r"<\|[\w ]{1,40}\|>|</?s>")
_NO_FORMULA = re.compile(r"[^\d\\$]*")
_INTEGER = re.compile(r"[+-]?\d{1,50}")


def labels_from(label: Any) -> list[str]:
    r"""Return the accepted answers: one for a text or number, several for a list.

    A label may be bare LaTeX, `$...$`, `\boxed{...}`, or a worked solution that ends in "#### answer" (GSM8K).
    """
    texts = [text_label(each) for each in (label if isinstance(label, list | tuple) and label else [label])]
    return [(last_boxed(text) or text).rsplit("####", 1)[-1].strip() for text in texts]


def quick_math(response: str, label: Any, metadata: Mapping[str, Any]) -> float | None:
    r"""Return 1.0 or 0.0 if the result is certain without algebra, else None.

    The answer is the last `\boxed{}`, the text after "####", or a response that is only a number. The score is 0.0
    for a response without text after its thinking, one cut off inside its only box, and one without a digit or
    formula if the label is an integer.
    """
    del metadata
    labels = labels_from(label)
    answer = answer_of(response)
    if answer is not None:
        return quick_answer(answer, labels)
    text = final_text(response)
    if has_box(response) or not text:
        return 0.0
    return 0.0 if _NO_FORMULA.fullmatch(text) and all(_INTEGER.fullmatch(tidy(each)) for each in labels) else None


def quick_answer(answer: str, labels: Sequence[str]) -> float | None:
    """Compare an extracted answer with the labels: 1.0, 0.0, or None if that needs algebra."""
    scores = [quick_equal(tidy(answer), tidy(label)) for label in labels]
    if 1.0 in scores:
        return 1.0
    return None if None in scores else 0.0


def answer_of(response: str) -> str | None:
    r"""Return the last `\boxed{}`, the text after "####", or a response that is only a number; else None."""
    boxed = last_boxed(response)
    if boxed is not None or has_box(response):
        return boxed
    text = final_text(response)
    if "####" in text:
        return text.rsplit("####", 1)[-1].strip().split("\n", 1)[0]
    return text if number_from(tidy(text)) is not None else None


def final_text(response: str) -> str:
    """Return the text after the thinking, without special tokens such as <|im_end|>."""
    return _SPECIAL.sub("", after_thinking(response)).strip()


def answer_text(response: str) -> str:
    r"""Return the part of a response that math-verify searches.

    That is the last box, else the last 2,000 characters after the thinking.
    """
    answer = answer_of(response)
    return final_text(response)[-MATH_TAIL:] if answer is None else f"\\boxed{{{tidy(answer)}}}"


# deepscaler: the box after the thinking

THOUGHT_ENDS = ("</think>", "###Response")


def final_part(response: str) -> str | None:
    """Return the text after the last end-of-thinking mark, or None if there is no mark."""
    for mark in THOUGHT_ENDS:
        if mark in response:
            return response.rsplit(mark, 1)[-1]
    return None


def quick_deepscaler(response: str, label: Any, metadata: Mapping[str, Any]) -> float | None:
    r"""Return 1.0 or 0.0 if the result is certain without algebra, else None.

    The score is 0.0 for a response without `</think>` (or `###Response`), or without a complete `\boxed{}` after it.
    """
    del metadata
    labels = labels_from(label)
    part = final_part(response)
    answer = None if part is None else last_boxed(part)
    return 0.0 if answer is None else quick_answer(answer, labels)


# dapo: the line after "Answer:"

DAPO_TAIL = 300  # characters at the end of the response in which the recipe looks for the answer

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_INLINE_MATH = re.compile(r"\$(.*?)\$|\\\((.*?)\\\)|\\\[(.*?)\\\]")
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|overline|boxed|fbox|mbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_UNIT = re.compile(
    r"\b(?:square|ways|integers?|dollars?|cents?|mph|inch(?:es)?|feet|hours?|minutes?|km|cm|gm|meters?|pounds?|units?|"
    r"points?|digits?|degrees?|meals|edges|students|multiples)\b",
    re.IGNORECASE,
)
_MARKUP = re.compile(
    r"(\\\\)|<\|im_end\|>|<\|endoftext\|>|</s>|\\[dl]?dots|\^\{?\\circ\}?|\\degree|\\[;,! ]|\\\$|\$|\"|\*"
)
_ARTICLE = re.compile(r"\b(?:an?|the)\s+", re.IGNORECASE)
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:(?:,|\{,\})\d{3})+")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac(?:\{([^{}]+)\}|(\w))\s*(?:\{([^{}]+)\}|(\w))")


def dapo_score(response: str, label: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"score": 1.0 or -1.0, "acc": bool, "pred": str}, as DAPO's recipe does; pass `--reward-key score`.

    Source: arXiv:2503.14476. The answer is what follows the last "Answer:" in the last 300 characters, up to the end of
    the line, compared as text after normalization, which removes LaTeX wrappers, units, thousands separators and what
    is left of "=". Integers are compared as numbers ("007", "7.0"). A response without "Answer:" scores -1.0 with the
    prediction "[INVALID]".
    """
    del metadata
    truth = normalize_answer(text_label(label))
    answers = _ANSWER.findall(response[-DAPO_TAIL:])
    pred = normalize_answer(answers[-1]) if answers else "[INVALID]"
    is_right = bool(answers) and pred != "" and pred == truth
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": pred}


def normalize_answer(text: str) -> str:
    r"""Return a final answer in the normalized form in which answers are compared.

    >>> normalize_answer(r"the area is $A = \boxed{1,\!024}$ square units.")
    '1024'
    """
    inline = _INLINE_MATH.search(text)
    if inline is not None:
        text = next(part for part in inline.groups() if part is not None)
    text = text.rsplit("=", 1)[-1]
    text = _MARKUP.sub(lambda match: match[1] or "", text)  # the row separator of a matrix stays
    for _ in range(3):  # nested wrappers, \boxed{\text{7}}
        text = _WRAPPER.sub(r"\1", text)
    text = _UNIT.sub("", text)
    text = _ARTICLE.sub("", text)
    text = _SHORT_FRACTION.sub(lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}", text)
    has_macros = "\\" in text
    text = "".join(text.split()).rstrip(".,;:")
    if not has_macros:
        text = text.strip("{}")
    if _GROUPED.fullmatch(text):
        text = text.replace("{,}", "").replace(",", "")
    return str(int(float(text))) if re.fullmatch(r"[+-]?\d{1,15}(?:\.0*)?", text) else text


# f1: words shared with the label

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = {"yes", "no", "noanswer"}


def f1_score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return the token-level F1 (SQuAD, arXiv:1606.05250 sec. 6.1) in [0, 1], the maximum over a list of labels.

    Text is compared in lower case, without punctuation and articles. The answers yes, no and noanswer must match
    exactly (HotpotQA's rule), because many wrong sentences contain "no"; so must a label of only articles ("A") or
    punctuation.
    """
    del metadata
    labels: Sequence[Any] = label if isinstance(label, list | tuple) and label else [label]
    return max(_f1(response, text_label(each)) for each in labels)


def f1_words(text: str) -> list[str]:
    """Return the words that `f1_score` compares."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _f1(response: str, label: str) -> float:
    answer, truth = f1_words(response), f1_words(label)
    if not truth:
        return float(response.strip().casefold() == label.casefold())
    if answer == truth:
        return 1.0
    if " ".join(answer) in _CLOSED_ANSWERS or " ".join(truth) in _CLOSED_ANSWERS:
        return 0.0
    common = (Counter(answer) & Counter(truth)).total()
    return 2 * common / (len(answer) + len(truth)) if common else 0.0


# gpqa: multiple choice

# Repetitions are bounded, because a degenerate response with a thousand spaces would make the search quadratic.
# "a" and "I" before another word are words, except before a conjunction ("the answer is a because ...").
_WORD = r"(?-i:(?<=[aiI])\s{1,4}(?!(?:because|since|as|for|and|but|given|due)\b)[a-z])"
_LETTER = r"[\(\[*_\s$]{0,12}(?:\\text(?:bf)?\{)?\(?([A-Z])(?![A-Za-z'’])" f"(?!{_WORD})"
_STATED = re.compile(
    r"(?:answer|option|choice)(?:\s{1,4}(?:is|would be|must be))?\s{0,4}(?:option|choice)?\s{0,4}[:=]?" + _LETTER,
    re.IGNORECASE,
)
_IS_CORRECT = re.compile(r"\b([A-Z])\)?\*{0,4}\s{1,4}is\s{1,4}(?:the\s{1,4})?(?:correct|right|best)")
_RULED_OUT = r"(?:not|wrong|incorrect|false|ruled out|eliminated|excluded)\b"
_NOT_CHOSEN = re.compile(
    r"(?i:\bnot|n['’]t|\bneither|\bnor|\brather than|\binstead of|\b(?:rul|eliminat|exclud|reject)(?:es?|ed|ing)"
    r"(?: out)?)(?:\s{1,4}(?:option|choice|answer|the|be))?\s{1,4}[\(*]{0,3}([A-Z])\b"
    rf"|\b([A-Z])\)?\*{{0,3}}\s{{1,4}}(?:(?:is|are|was)\s{{1,4}}{_RULED_OUT}|(?:isn['’]t|can(?:not|['’]t))\b)"
)
_ALONE = re.compile(r"(?<![A-Za-z0-9'’\-])([A-Z])(?![A-Za-z0-9'’\-])")
_OFFERED = re.compile(  # what can be chosen: "among A, B, C and D", "(A, B or C)"
    r"(?:\b(?i:among|amongst|between|from|of|options|choices|letters)[\s:]{1,4}|\()\(?[A-Z]\)?"
    r"(?:\s{0,2},\s{1,2}\(?[A-HJ-Z]\)?(?![A-Za-z'’])){0,12}\s{0,2},?\s{1,2}(?:and|or)\s{1,2}\(?[A-HJ-Z]\)?(?![A-Za-z'’])"
)
_MARKS = re.compile(r"[^a-z0-9]+")


def gpqa_score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    r"""Return 1.0 if the response chooses the right option, else 0.0.

    The right option is `metadata["correct_letter"]`, or the label: a letter, an index from 0, or the text of one of
    `metadata["choices"]`. Lists of options ("among A, B and C") are no choice. The choice is the first match after
    `</think>` of: `\boxed{B}`, the last "answer is B" or "Answer: (B)", the last "B is correct", the only letter that
    the response does not rule out ("not C", "C is wrong"), the text of exactly one choice.
    Raises DataError if the label is not an option.
    """
    named = metadata.get("choices") or []
    choices = [str(choice) for choice in (named.values() if isinstance(named, Mapping) else named)]
    if valid := metadata.get("valid_letters"):
        letters = [str(letter).upper() for letter in valid]
    elif isinstance(named, Mapping) and all(re.fullmatch("[A-Za-z]", str(key)) for key in named):
        letters = [str(key).upper() for key in named]
    else:
        letters = list(string.ascii_uppercase[: len(choices) or 10])
    right = _right_letter(label, metadata, choices, letters)
    return float(_chosen(after_thinking(response), choices, letters) == right)


def _right_letter(label: Any, metadata: Mapping[str, Any], choices: Sequence[str], letters: Sequence[str]) -> str:
    if isinstance(correct := metadata.get("correct_letter"), str) and correct.strip().upper() in letters:
        return correct.strip().upper()
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        return letters[label]
    text = text_label(label)
    bare = text.strip("()[]. ").upper()
    if bare in letters:
        return bare
    plain = [_plain(choice) for choice in choices]
    if plain.count(_plain(text)) == 1:
        return letters[plain.index(_plain(text))]
    raise DataError(f"the label {label!r} is none of the options {letters} and none of the texts {list(choices)}")


def _chosen(text: str, choices: Sequence[str], letters: Sequence[str]) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None:
        bare = re.sub(r"\\text(?:bf)?|[{}()\[\].\s]", "", boxed).upper()
        return bare if bare in letters else _by_text(boxed, choices, letters)
    text = _OFFERED.sub(" ", text)
    for pattern in (_STATED, _IS_CORRECT):
        stated = [letter.upper() for letter in pattern.findall(text) if letter.upper() in letters]
        if stated:
            return stated[-1]
    ruled_out = {letter for pair in _NOT_CHOSEN.findall(text) for letter in pair}  # "not B, nor C", "B is wrong"
    alone = {letter for letter in _ALONE.findall(text) if letter in letters} - ruled_out
    unambiguous = alone - {"A", "I"} or alone
    return unambiguous.pop() if len(unambiguous) == 1 else _by_text(text, choices, letters)


def _by_text(text: str, choices: Sequence[str], letters: Sequence[str]) -> str | None:
    plain = f" {_plain(text)} "
    matches = [letter for letter, choice in zip(letters, choices, strict=False) if f" {_plain(choice)} " in plain]
    return matches[0] if len(matches) == 1 else None


def _plain(text: str) -> str:
    return _MARKS.sub(" ", text.lower()).strip()


# random


def random_score(sample: Sample) -> float:
    """Return 0.0 or 1.0 with equal probability, a function of the sample's seed, index and response only.

    A sample gets the same reward on every machine and after a restart.
    """
    text = f"{sample.seed}/{sample.group_index}/{sample.index}/{sample.response}"
    return float(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=1).digest()[0] & 1)


# ifbench: the constraints of IFBench, checked by the package if-verifiable in the sandbox

IFBENCH_KEYS = '"instruction_id_list" and "kwargs", as in the dataset allenai/IFBench_test; check --metadata-key'


def ifbench_score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if the response follows all instructions of its row (the strict score of IFBench), else 0.0.

    Reads `instruction_id_list`, `kwargs` (an object per instruction, or one for all) and `prompt_text` of the row's
    metadata. Raises DataError for a row without instructions or with an unknown one, and RewardError if the checks
    need data of NLTK that is not installed.
    """
    del label
    names, given = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(names, list | tuple) or not names:
        raise DataError(f"the metadata has no list of instructions; --rm-type ifbench reads {IFBENCH_KEYS}")
    rows = given if isinstance(given, list | tuple) else [given or {}] * len(names)
    if len(rows) != len(names) or not all(isinstance(row, Mapping | None) for row in rows):
        raise DataError(
            f"the metadata has {len(names)} instructions and kwargs {given!r:.200}; --rm-type ifbench reads "
            f"{IFBENCH_KEYS}"
        )
    if not response.strip():
        return 0.0
    prompt, checks = str(metadata.get("prompt_text") or ""), instruction_checks()
    try:
        for name, row in zip(map(str, names), rows, strict=True):
            if name not in checks:
                raise DataError(f"the instruction {name!r} is not one of IFBench's {len(checks)}; check the metadata")
            check = checks[name](name)
            check.build_description(**{key: value for key, value in (row or {}).items() if value is not None})
            if "prompt" in (check.get_instruction_args() or {}):
                check.build_description(prompt=prompt)
            if not check.check_following(response):
                return 0.0
    except LookupError as error:
        if "nltk" not in str(error).lower():
            raise
        raise RewardError(
            "--rm-type ifbench needs data of NLTK that is not installed; run "
            "`python -m nltk.downloader punkt punkt_tab stopwords averaged_perceptron_tagger_eng` once"
        ) from error
    return 1.0


@functools.cache
def instruction_checks() -> Mapping[str, Any]:
    """Return the classes of if-verifiable's checks by IFBench's names of instructions."""
    import nltk

    with patch.object(nltk, "download", lambda *_, **__: False):  # the package downloads when it is imported
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT
    return INSTRUCTION_DICT


# reasoning_gym: procedural tasks, scored by the task's own function of that package in the sandbox

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_AROUND_WORDS = "\"'`*.,;:!?()[]{}$ \n"


def task_score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    r"""Return the task's score of the response, mostly 1.0 if right, and 0.0 or a little more if not.

    The answer is the text in the last `<answer>` tags, else in the last `\boxed{}`, else the best of: the text after
    `</think>`, its last line, and its last word. Raises DataError for a row that is not of a procedural task.
    """
    del label
    key, seed, index = (metadata.get(name) for name in ("reasoning_gym", "seed", "index"))
    if not (isinstance(key, str) and isinstance(seed, int) and isinstance(index, int)):
        raise DataError(
            "the row is not of a task of reasoning-gym; --rm-type reasoning_gym scores the rows of --prompt-data "
            "reasoning-gym:NAME, with --metadata-key"
        )
    entry, dataset = task_entry(key, seed, index), task_dataset(key, seed)
    return max((float(dataset.score_answer(answer, entry)) for answer in answers_from(response)), default=0.0)


def answers_from(response: str) -> list[str]:
    """Return the texts that may be the answer, each once.

    >>> answers_from("So it is <answer> 12 </answer>.")
    ['12']
    >>> answers_from("7 + 5 = 12.")
    ['7 + 5 = 12.', '12']
    """
    final = after_thinking(response).strip()
    if tagged := _TAGGED.findall(final):
        return [tagged[-1].strip()]
    if (boxed := last_boxed(final)) is not None:
        return [boxed.strip()]
    if not final:
        return []
    last_line = final.splitlines()[-1].strip()
    last_word = last_line.split()[-1].strip(_AROUND_WORDS) if last_line.split() else ""
    return [text for text in dict.fromkeys((final, last_line, last_word)) if text]


# The table

Score = Callable[[str, Any, Mapping[str, Any]], float | dict[str, Any] | None]


@dataclass(frozen=True)
class Verifier:
    r"""A scoring function of (response, label, metadata).

    `quick` runs in the driver: it must be cheap and deterministic and must not hang. If it returns None, the function
    at the path `slow` is called in the sandbox, with the row's metadata if `wants_metadata` is set. `kind` is the
    input: the response, the whole sample, or a request to a server. With `is_boxed`, only the last box of the response
    is scored (see `cut`); `wants_box` keeps its `\boxed{}`.
    """

    name: str
    quick: Score | None = None
    slow: str | None = None
    kind: Literal["response", "sample", "server"] = "response"
    is_boxed: bool = False
    wants_box: bool = False
    wants_metadata: bool = False

    def cut(self, response: str) -> str:
        """Return the part of the response that is scored; "" for a `boxed_` verifier and a response without a box."""
        if not self.is_boxed:
            return response
        content = last_boxed(response)
        if content is None:
            return ""
        return f"\\boxed{{{content}}}" if self.wants_box else content


_ROWS = (
    Verifier("math", quick_math, "furlong.rewards.algebra.math_score", wants_box=True),
    Verifier("dapo", dapo_score),
    Verifier("deepscaler", quick_deepscaler, "furlong.rewards.algebra.deepscaler_score"),
    Verifier("f1", f1_score),
    Verifier("gpqa", gpqa_score),
    Verifier("ifbench", slow="furlong.rewards.verifiers.ifbench_score", wants_metadata=True),
    Verifier("reasoning_gym", slow="furlong.rewards.verifiers.task_score", wants_metadata=True),
    Verifier("remote_rm", kind="server"),
    Verifier("random", kind="sample"),
)
REWARDS = {row.name: row for row in _ROWS}


@functools.cache
def find_verifier(name: str) -> Verifier:
    """Return the verifier called `name`; the prefix `boxed_` works with those that read the response.

    Raises ConfigError with the closest name, or the reason why the name is refused.
    """
    name = name.strip()
    if (problem := verifier_problem("--rm-type", name)) is not None:
        raise ConfigError(problem)
    inner = name.removeprefix(BOXED)
    return replace(REWARDS[inner], name=name, is_boxed=name != inner)
