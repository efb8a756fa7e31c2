"""Reads the YAML files that flags name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from furlong.errors import ConfigError

MOST_BYTES = 4 << 20


class _UniqueKeys(yaml.SafeLoader):
    """YAML's plain types; a key given twice, of which YAML would keep the last, is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build one mapping."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path | str, where: str, *, form: str) -> Any:
    """The content of a YAML or JSON file of at most `MOST_BYTES`.

    Raises ConfigError that begins with `where`, and says that the file should hold `form` where it is no YAML.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)  # a device has no end
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{where} is larger than {MOST_BYTES >> 20} MiB; write {form}")
        return yaml.load(content.decode("utf-8"), _UniqueKeys)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}; give an existing file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not YAML: {error}; write {form}") from error
