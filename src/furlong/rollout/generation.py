"""`Generation`: how the samples of training, or of one evaluation set, are generated and scored."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from furlong.chat.template_boundary import ChatFormat
from furlong.config.environment_specs import EnvironmentSpec
from furlong.config.hooks import HOOKS, Hooks, check_signature
from furlong.config.sections import RolloutFlags
from furlong.core.sample import Group, Sample
from furlong.core.user_functions import Function, load_function
from furlong.environments.protocol import ENVIRONMENT
from furlong.errors import ConfigError
from furlong.interfaces import Engine, Reward, SamplingParams
from furlong.rollout.episodes import EpisodeLoad
from furlong.sessions.samples import Leaves
from furlong.sessions.session import SessionSettings

if TYPE_CHECKING:  # imports a web server, which most runs do not need
    from furlong.sessions.session_server import SessionServer

MAX_LOGGED_FAILURES = 8  # kinds; a message that quotes the response is a new kind for each sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generation:
    """How samples of one kind (of training, or of one evaluation set) are generated and scored.

    flags: of the rollout, with the limit of prompt + response and the limits of episodes, which an environment may
    replace. timeout_s: limit of one sample's generation. Tokens from custom functions must be below `vocab_size` and at
    most `max_tokens` per sample, the model's context. logged_failures: kinds of failures of user code already logged.
    chat_format: renders messages for `policy().chat`.
    """

    engine: Engine
    tokenizer: Any
    reward: Reward
    params: SamplingParams
    flags: RolloutFlags = field(default_factory=RolloutFlags)
    environments: Sequence[EnvironmentSpec] = ()
    hooks: Hooks = field(default_factory=Hooks)
    timeout_s: float | None = None
    evaluation: bool = False
    args: Any = None
    vocab_size: int | None = None
    max_tokens: int | None = None
    load: EpisodeLoad = field(default_factory=EpisodeLoad)
    logged_failures: set[str] = field(default_factory=set[str])
    chat_format: ChatFormat | None = None
    session_settings: SessionSettings = field(default_factory=SessionSettings)
    session_leaves: Leaves = "all"
    session_server: SessionServer | None = None

    def function_of(self, sample: Sample) -> Function | None:
        """Return the sample's custom function; None for the single turn. Raises ConfigError for an invalid path."""
        if (path := sample.generate_function_path) is None:
            return self.hooks.custom_generate_function
        return load_generate_function(path)

    def is_custom(self, group: Group) -> bool:
        """Return whether user functions generate samples of the group, and may change them."""
        return self.hooks.custom_generate_function is not None or any(
            sample.generate_function_path is not None for sample in group.samples
        )

    def limits_of(self, sample: Sample) -> RolloutFlags:
        """Return the flags with the limits of the sample's environment."""
        specs = self.environments
        if len(specs) > 1:
            specs = [spec for spec in specs if spec.name == sample.metadata.get(ENVIRONMENT)]
        limits: Any = specs[0].limits if specs else {}
        return dataclasses.replace(self.flags, **limits)

    def log_failure(self, what: str, sample: Sample, reason: str) -> None:
        """Log that user code failed on a sample: each of the first kinds of failure once. Metrics count all."""
        kind = re.sub(r"\d+", "0", reason)  # lengths and ids differ between samples
        is_new = kind not in self.logged_failures and len(self.logged_failures) < MAX_LOGGED_FAILURES
        if is_new:
            self.logged_failures.add(kind)
        level = logging.WARNING if is_new else logging.DEBUG
        logger.log(level, "%s failed on sample %s: %s", what, sample.index, reason)


@functools.cache
def load_generate_function(path: str) -> Function:
    """Load the generate function named by a sample. Raises ConfigError if it is missing or has a wrong signature."""
    function = load_function(path)
    if problem := check_signature(HOOKS["custom_generate_function"], function):
        raise ConfigError(f"Sample.generate_function_path {path!r} cannot be called. {problem}")
    return function
