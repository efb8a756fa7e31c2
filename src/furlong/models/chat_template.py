"""Chat templates shipped with furlong, for model families whose own template rewrites earlier turns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from furlong.errors import ConfigError

FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class ShippedTemplate:
    """A shipped template. family: the models it is for; settings: Jinja code prepended to the file."""

    family: str
    file: str
    settings: str = ""

    def text(self) -> str:
        """Return the Jinja source."""
        return self.settings + (FOLDER / self.file).read_text(encoding="utf-8")


SHIPPED: Mapping[str, ShippedTemplate] = {
    "qwen3-append-only": ShippedTemplate("Qwen3 models that think when asked to", "qwen3.jinja"),
    "qwen3-thinking-append-only": ShippedTemplate(
        "Qwen3 models that always think", "qwen3.jinja", "{%- set opens_thinking = true -%}"
    ),
    "glm45-append-only": ShippedTemplate("GLM-4.5 and GLM-4.6", "glm45.jinja"),
}


def read_template(name: str, flag: str = "--chat-template-path") -> str:
    """Return the Jinja source of a shipped template or of the file `name`. Raises ConfigError for neither."""
    if name in SHIPPED:
        return SHIPPED[name].text()
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"{flag} {name}: no such file, and not a shipped template; give a file, or one of {', '.join(SHIPPED)}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {name}: the file is not text ({error}); give a Jinja template") from error


def write_template(folder: Path, source: str) -> None:
    """Replace the chat template of a Hugging Face folder by `source`."""
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        values = json.loads(settings.read_text(encoding="utf-8"))
        if values.pop("chat_template", None) is not None:
            settings.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
