"""Asks teachers for the log-probs of finished samples: of their tokens, and of the policy's most likely ones."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from furlong.config.teachers import MESSAGES, teacher_of
from furlong.core.chat_template import TEMPLATE_ERRORS, apply_template
from furlong.core.event_loop import gather_or_cancel
from furlong.core.metric import Metrics, mean
from furlong.core.outcome import Outcome
from furlong.core.sample import FIRST_PROMPT, Sample, Status
from furlong.core.text import abbreviate
from furlong.errors import RolloutError
from furlong.interfaces import Engine
from furlong.rollout.token_alignment import TokenBytes, common_groups, shared_log_probs

FAILED = "teacher: "  # begins the reason of a sample that its teacher cannot score


@dataclass(frozen=True)
class Teacher:
    """An engine that is not trained. tokenizer: its own, if it is not the policy's; context_len: None if unknown."""

    engine: Engine
    context_len: int | None = None
    tokenizer: Any = None
    token_bytes: TokenBytes | None = None


@dataclass
class Teachers:
    """The teachers of a run by name, and what their columns need.

    key: metadata with the name of a sample's teacher. prompt_key: metadata with a prompt that the teacher sees instead
    of the sample's, text or messages; `applies_template` makes text one message. num_top: most likely tokens of
    `policy`, the engine that generates, whose log-probs are asked for at each position.

    The most likely tokens come from one pass of the policy's engine over the finished sample, not with each sampled
    token: a prefill costs less than larger answers of every decode step, and it also covers samples that agents and
    user functions made. The engine may have newer weights than at sampling; that changes which tokens are compared, not
    their values.
    """

    teachers: Mapping[str, Teacher]
    policy: Engine
    tokenizer: Any
    key: str
    prompt_key: str | None = None
    applies_template: bool = False
    temperature: float = 1.0
    num_top: int = 0
    token_bytes: TokenBytes | None = None
    _seconds: list[float] = field(default_factory=list[float])

    async def start(self) -> None:
        """Do nothing: teachers run already, or start with the engines."""

    async def close(self) -> None:
        """Close connections, and engines of this process."""
        for teacher in self.teachers.values():
            await teacher.engine.close()

    async def ask(self, samples: Sequence[Sample]) -> dict[int, Outcome]:
        """Set the columns of finished samples; return failures by place, of those without a teacher or too long for it.

        An EngineError of a teacher propagates: without it nothing can be learned.
        """
        errors = await gather_or_cancel(self._ask(sample) for sample in samples)
        return {i: Outcome.failed(f"{FAILED}{e}", stage="generate") for i, e in enumerate(errors) if e is not None}

    async def _ask(self, sample: Sample) -> RolloutError | None:
        if sample.status in (Status.FAILED, Status.ABORTED) or not sample.response_length:
            return None
        started = time.perf_counter()
        try:
            await self._score(sample, self.teachers[self._name(sample)])
        except RolloutError as error:
            return error
        finally:
            self._seconds.append(time.perf_counter() - started)
        return None

    def _name(self, sample: Sample) -> str:
        given = sample.metadata.get(self.key)
        if (name := teacher_of(given, list(self.teachers))) is None:
            raise RolloutError(
                f"metadata.{self.key} is {given!r}; the teachers are {abbreviate(list(self.teachers))}: name one of "
                "them in the row, or call one `default`"
            )
        return name

    def _prompt(self, sample: Sample, teacher: Teacher) -> list[int]:
        """Return the prompt that the teacher sees, with what an agent's leaf has before its first trained token.

        Leaves that do not begin with the agent's first prompt, such as those of sub-agents, keep theirs.
        """
        own = sample.tokens[: sample.prompt_length]
        shown = int(sample.metadata.get(FIRST_PROMPT, len(own)))
        given = None if self.prompt_key is None else sample.metadata.get(self.prompt_key)
        if teacher.tokenizer is None and (given is None or not shown):
            return own
        if isinstance(given, str) and self.applies_template:
            given = [{"role": "user", "content": given}]
        if given is None:
            given = sample.metadata.get(MESSAGES) or sample.prompt
        tokenizer = teacher.tokenizer or self.tokenizer
        if not isinstance(given, str):
            options = {"add_generation_prompt": True, **sample.apply_chat_template_kwargs}
            messages = cast("list[dict[str, Any]]", given)
            try:
                given = apply_template(tokenizer, messages, tools=sample.tools or None, tokenize=False, **options)
            except TEMPLATE_ERRORS as error:
                raise RolloutError(f"its chat template rejects the prompt: {type(error).__name__}: {error}") from error
        ids = list(tokenizer.encode(given, add_special_tokens=False))
        if not ids:
            raise RolloutError("its prompt has no tokens")
        return ids + own[shown:]

    async def _score(self, sample: Sample, teacher: Teacher) -> None:
        prompt, response = self._prompt(sample, teacher), sample.tokens[sample.prompt_length :]
        if teacher.tokenizer is not None:
            await self._score_text(sample, teacher, prompt, response)
            return
        self._check_length(len(prompt) + len(response), teacher)
        ids_RK = None
        if self.num_top:
            ids_RK = (await self.policy.score(sample.tokens, len(response), num_top=self.num_top)).top_ids_RK
        scores = await teacher.engine.score(
            [*prompt, *response], len(response), temperature=self.temperature, ids_RK=ids_RK
        )
        sample.teacher_log_probs = scores.log_probs_R.tolist()
        if ids_RK is not None:
            sample.teacher_top_ids, sample.teacher_top_log_probs = ids_RK, scores.asked_RK

    async def _score_text(self, sample: Sample, teacher: Teacher, prompt: list[int], response: list[int]) -> None:
        """Score the text of a response with the teacher's tokens. Ends of sequence correspond.

        Raises RolloutError for conversations of agents, whose boundaries are tokens of the policy's template.
        """
        if FIRST_PROMPT in sample.metadata or not all(sample.loss_mask or ()):
            raise RolloutError(
                "its tokenizer is not the policy's, whose chat template the conversation of an agent has: use a "
                "teacher with the policy's tokenizer"
            )
        assert self.token_bytes is not None
        assert teacher.token_bytes is not None
        tokenizer, ends = teacher.tokenizer, response[-1] == self.tokenizer.eos_token_id
        ends = ends and tokenizer.eos_token_id is not None
        own = self.token_bytes.pieces(response[:-1] if ends else response)
        text = b"".join(own).decode(errors="ignore")  # what is left out is not aligned, nor what follows
        ids = list(tokenizer.encode(text, add_special_tokens=False)) if text else []
        theirs = teacher.token_bytes.pieces(ids)
        if theirs and theirs[0][:1] == b" " and text[:1] != " ":  # a mark of the start of a text
            theirs[0] = theirs[0][1:]
        groups = common_groups(own, theirs)
        if ends:
            groups.append((slice(len(own), len(own) + 1), slice(len(ids), len(ids) + 1)))
            ids.append(tokenizer.eos_token_id)
        self._check_length(len(prompt) + len(ids), teacher)
        scored = np.zeros(0, np.float32)
        if ids:
            scored = (await teacher.engine.score([*prompt, *ids], len(ids), temperature=self.temperature)).log_probs_R
        policy = np.asarray(sample.rollout_log_probs or [0.0] * len(response), np.float32)
        log_probs, mask = shared_log_probs(groups, scored, policy)
        sample.teacher_log_probs, sample.teacher_mask = log_probs.tolist(), mask.tolist()

    def _check_length(self, count: int, teacher: Teacher) -> None:
        if teacher.context_len is not None and count >= teacher.context_len:
            raise RolloutError(
                f"prompt and response have {count} tokens, and its context has {teacher.context_len}; serve it "
                "with a longer context, or lower --rollout-max-response-len"
            )

    def take(self, samples: Sequence[Sample]) -> Metrics:
        """Return the mean seconds of a sample at its teacher, and of several teachers each one's KL per token."""
        seconds, self._seconds = self._seconds, []
        metrics: Metrics = {"perf/teacher_time": mean(sum(seconds) / len(seconds), len(seconds))} if seconds else {}
        gaps: dict[str, list[Any]] = defaultdict(list)
        for sample in samples if len(self.teachers) > 1 else ():
            if sample.status is Status.FAILED or not sample.teacher_log_probs or not sample.rollout_log_probs:
                continue
            kept = np.ones(sample.response_length, bool)
            for mask in (sample.loss_mask, sample.teacher_mask):
                kept &= np.asarray(mask if mask is not None else kept, bool)
            gaps[self._name(sample)].append(
                (np.asarray(sample.rollout_log_probs) - np.asarray(sample.teacher_log_probs))[kept]
            )
        for name, parts in gaps.items():
            if (gap := np.concatenate(parts)).size:
                metrics[f"rollout/opd_teacher/{name}_kl"] = mean(float(gap.mean()), gap.size)
        return metrics
