"""How much of the prompts of an episode repeats earlier prompts, and how much of that the engine had cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from furlong.interfaces import Completion
from furlong.rollout.asked_context import common_length

MAX_BRANCHES = 8  # prompts of an episode that are compared


@dataclass
class PrefixUse:
    """Prompts of one episode that no later prompt continues, each with the weight version after its answer.

    repeated: prompt tokens that an earlier prompt begins with too, under the same weights. cached: those of them that
    the engine did not compute.
    """

    repeated: int = 0
    cached: int = 0
    _prompts: list[tuple[Sequence[int], int]] = field(default_factory=list[tuple[Sequence[int], int]])

    def add(self, ids: Sequence[int], completion: Completion) -> tuple[int, int]:
        """Add a request; returns its repeated and cached tokens."""
        if not completion.versions:
            return 0, 0
        best, length, continued = None, 0, False
        for place, (prompt, version) in enumerate(self._prompts):
            same = common_length(prompt, ids)
            if same > length and version == completion.versions[0]:
                best, length, continued = place, same, same == len(prompt)
        if best is not None and continued:
            del self._prompts[best]
        self._prompts.append((ids, completion.versions[-1]))
        del self._prompts[:-MAX_BRANCHES]
        repeated = min(length, len(ids) - 1)  # the last token is computed for its logits
        cached = min(completion.cached_tokens, repeated)
        self.repeated, self.cached = self.repeated + repeated, self.cached + cached
        return repeated, cached
