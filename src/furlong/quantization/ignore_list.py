"""Which weights of a model stay unquantized: names and patterns, as in compressed-tensors' `ignore`. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from furlong.errors import ConfigError

# Weights that engines do not load as quantized linear layers: embeddings, output layer, norms, routers, and layers of
# single families whose values decide too much (MTP's projection, DeepSeek's indexer, Qwen3-Next's gates).
NEVER_QUANTIZED = (
    r"re:.*lm_head(\.weight)?$",
    r"re:.*embed.*",
    r"re:.*\.w[tp]e(\.weight)?$",
    r"re:.*norm.*",
    r"re:.*\.gate(\.weight)?$",
    r"re:.*router.*",
    r"re:.*shared_expert_gate(\.weight)?$",
    r"re:.*eh_proj(\.weight)?$",
    r"re:.*weights_proj(\.weight)?$",
    r"re:.*conv1d.*",
    r"re:.*in_proj_(a|b|ba)(\.weight)?$",
)


def module_of(name: str) -> str:
    """Return the module of a weight: `x` of `x.weight`."""
    return name.removesuffix(".weight")


def is_ignored(name: str, ignore: Iterable[str]) -> bool:
    """Whether compressed-tensors' `ignore` covers a parameter, by its name or its module's.

    >>> is_ignored("model.layers.0.mlp.gate.weight", ["re:.*mlp.gate$"])
    True
    """
    module = module_of(name)
    for entry in ignore:
        if entry in (name, module):
            return True
        if entry.startswith("re:") and any(re.match(entry[3:], text) for text in (name, module)):
            return True
    return False


def checked_ignore(entries: Sequence[str]) -> list[str]:
    """Return the entries of an ignore list. Raises ConfigError for an invalid pattern."""
    for entry in entries:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            raise ConfigError(f"ignore has the invalid pattern {entry!r}: {error}; correct it") from error
    return list(entries)
