"""Supervised fine-tuning as a rollout: samples are demonstrations from the data source, without generation.

A row is a conversation whose assistant turns are trained on, or a plain prompt with its response in the label column.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from furlong.core.batch import RolloutBatch
from furlong.core.chat_template import TEMPLATE_ERRORS, apply_template, demonstration_problem
from furlong.core.metric import Metrics, mean
from furlong.core.sample import Group, Sample, Status
from furlong.errors import DataError
from furlong.interfaces import DataSource, Ledger
from furlong.rollout.generate import EvalSet, evaluate
from furlong.rollout.metrics import SampleReport
from furlong.rollout.train_batch import Conversion, batch_from_groups

logger = logging.getLogger(__name__)

TOO_LONG, BAD_ROW = "too_long", "bad_row"  # reasons in the ledger
SHOWN_ROWS = 3  # bad rows that are logged
MAX_USELESS = 10_000  # rows one after another that cannot be used


class DemonstrationRollout:
    """Implements `interfaces.Rollout` over demonstrations. Samples longer than `max_len` are dropped and counted.

    With `skip_bad_rows`, so are rows that cannot be used, such as a conversation whose template rewrites history; the
    first are logged.
    `suggest_template` names a chat template to recommend in messages if the tokenizer's own is unsuitable.
    """

    def __init__(
        self,
        *,
        tokenizer: Any,
        source: DataSource,
        ledger: Ledger,
        batch_size: int,
        max_len: int | None = None,
        eval_sets: Sequence[EvalSet] = (),
        report: SampleReport | None = None,
        suggest_template: Callable[[], str | None] | None = None,
        skip_bad_rows: bool = False,
    ) -> None:
        self._suggest_template, self._skip_bad_rows = suggest_template, skip_bad_rows
        self._num_logged = self._num_useless = 0  # rows logged; rows since the last that could be used
        self._tokenizer, self._source, self._ledger = tokenizer, source, ledger
        self._batch_size, self._max_len = batch_size, max_len
        self._eval_sets = eval_sets
        self._report = report or SampleReport()

    async def produce(self, rollout_id: int) -> RolloutBatch | None:
        """Return the next demonstrations; None if fewer than a batch are left (they are dropped and recorded)."""
        kept: list[Group] = []
        dropped: Counter[str] = Counter()
        while len(kept) < self._batch_size:
            groups = self._source.next_groups(self._batch_size - len(kept))
            self._ledger.issued(groups, rollout_id)
            for group in groups:
                if (reason := self._unusable(group)) is None:
                    self._ledger.generated(group, rollout_id)
                    kept.append(group)
                else:
                    dropped[reason] += 1
                    self._ledger.dropped(group, reason)
            if not groups:
                for group in kept:
                    self._ledger.dropped(group, "end_of_data")
                return None
        batch = batch_from_groups(rollout_id, kept, Conversion())
        seen = len(kept) + dropped.total()
        batch.metrics["rollout/response_len/mean"] = mean(float(batch.response_lengths.mean()), len(batch))
        batch.metrics["rollout/too_long_frac"] = mean(dropped[TOO_LONG] / seen, seen)
        if self._skip_bad_rows:
            batch.metrics["rollout/bad_rows_frac"] = mean(dropped[BAD_ROW] / seen, seen)
        return batch

    def _unusable(self, group: Group) -> str | None:
        """Set tokens and masks of a row; returns why it cannot be used. Raises DataError unless bad rows are skipped.

        Also raises DataError after `MAX_USELESS` such rows in a row: the data may have no other.
        """
        reason = None
        try:
            for sample in group.samples:
                demonstrate(sample, self._tokenizer, suggest_template=self._suggest_template)
        except DataError as error:
            message = f"row {group.row} of the data (from 0): {error}"
            if not self._skip_bad_rows:
                raise DataError(f"{message}; or skip such rows with --skip-bad-rows") from error
            level = logging.WARNING if self._num_logged < SHOWN_ROWS else logging.DEBUG
            logger.log(level, "skipped %s", message)
            self._num_logged += 1
            reason = BAD_ROW
        if reason is None and self._max_len is not None and any(len(s.tokens) > self._max_len for s in group.samples):
            reason = TOO_LONG
        self._num_useless = 0 if reason is None else self._num_useless + 1
        if self._num_useless >= MAX_USELESS:
            raise DataError(
                f"{self._num_useless} rows in a row could not be used, the last (row {group.row}) because of "
                f"{reason}; check the data and --rollout-max-context-len {self._max_len}"
            )
        return reason

    async def evaluate(self, rollout_id: int) -> Metrics:
        """Generate and score the evaluation sets."""
        return await evaluate(self._eval_sets, rollout_id, report=self._report) if self._eval_sets else {}


def demonstrate(sample: Sample, tokenizer: Any, *, suggest_template: Callable[[], str | None] | None = None) -> None:
    """Set tokens and loss mask of a demonstration, in place. Raises DataError."""
    if isinstance(sample.prompt, list):
        tokens, mask = conversation_tokens(
            sample.prompt,
            tokenizer,
            tools=sample.tools,
            suggest_template=suggest_template,
            **sample.apply_chat_template_kwargs,
        )
        first = mask.index(1)
    else:
        if problem := demonstration_problem(sample.prompt, sample.label):
            raise DataError(problem)
        prompt = list(sample.tokens) or list(tokenizer.encode(sample.prompt, add_special_tokens=False))
        answer = [*tokenizer.encode(sample.label, add_special_tokens=False), tokenizer.eos_token_id]
        tokens, mask, first = prompt + answer, [0] * len(prompt) + [1] * len(answer), len(prompt)
        sample.response = sample.label
    sample.tokens, sample.loss_mask = tokens, mask[first:]
    sample.response_length = len(tokens) - first
    sample.status = Status.COMPLETED


def conversation_tokens(
    messages: Sequence[dict[str, Any]],
    tokenizer: Any,
    *,
    tools: Any = None,
    suggest_template: Callable[[], str | None] | None = None,
    **template_kwargs: Any,
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation and a mask that is 1 on assistant turns.

    A turn's tokens are those that rendering it appends to the rendering of earlier messages, so the template must not
    rewrite history. A message with `step_loss_mask: 0` is masked. Raises DataError if the template rewrites history or
    no assistant turn is left.
    """

    def render(upto: int, *, prompt: bool) -> list[int]:
        try:
            encoded = apply_template(
                tokenizer,
                messages[:upto],
                tools=tools,
                add_generation_prompt=prompt,
                tokenize=True,
                return_dict=False,
                **template_kwargs,
            )
        except TEMPLATE_ERRORS as error:
            raise DataError(
                f"the chat template rejects it: {type(error).__name__}: {error}; correct the row"
            ) from error
        return list(encoded)

    if problem := demonstration_problem(messages, None):
        raise DataError(problem)
    whole = render(len(messages), prompt=False)
    mask = [0] * len(whole)
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("step_loss_mask", 1) == 0:
            continue
        before, after = render(i, prompt=True), render(i + 1, prompt=False)
        if whole[: len(after)] != after or after[: len(before)] != before:
            name = None if suggest_template is None else suggest_template()
            remedy = (
                "give a template whose rendering only grows with --chat-template-path (`furlong template check` tests "
                "one), or split the conversation"
                if name is None
                else f"--chat-template-path {name} only appends; it ships with furlong"
            )
            raise DataError(
                f"the chat template rewrites history at message {i} ({message['role']}), so its tokens cannot be "
                f"located; {remedy}"
            )
        mask[len(before) : len(after)] = [1] * (len(after) - len(before))
    if not any(mask):
        raise DataError("the chat template leaves out every assistant turn; correct the row, or remove it")
    return whole, mask
