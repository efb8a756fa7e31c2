"""A tokenizer that loads tokenizer.json without importing transformers, for checks that must be fast.

It implements the part of transformers' tokenizers that data and template code uses. Training and generation use
`models.tokenizer.load_tokenizer`; a test compares the two.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from furlong.errors import ConfigError
from furlong.models.hf_folder import LFS_POINTER, read_json

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class JsonTokenizer:
    """Encodes with tokenizer.json and renders the folder's chat template; attributes are named as in transformers.

    Raises ConfigError if tokenizer.json is missing or damaged.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        self.name_or_path = str(folder)
        try:
            self._core = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises a plain Exception for any damage
            if _is_lfs_pointer(folder / "tokenizer.json"):
                raise ConfigError(
                    f"{folder / 'tokenizer.json'} is a Git LFS pointer: the repository was cloned without Git LFS; "
                    "run `git lfs pull` there"
                ) from error
            raise ConfigError(f"cannot load the tokenizer of {folder}: {error}") from error
        self._core.no_padding()
        self._core.no_truncation()
        settings = read_json(folder / "tokenizer_config.json")
        named = read_json(folder / "special_tokens_map.json") | settings
        self._named = {name: text for name in NAMED if (text := _text(named.get(name)))}
        self.added_tokens_decoder: dict[int, AddedToken] = self._core.get_added_tokens_decoder()
        self.chat_template = _template_of(folder, settings)

    @property
    def all_special_tokens(self) -> list[str]:
        """Special tokens: named ones, and added ones marked special."""
        added = [str(token.content) for token in self.added_tokens_decoder.values() if token.special]
        return list(dict.fromkeys([*self._named.values(), *added]))

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens."""
        ids = (self._core.token_to_id(token) for token in self.all_special_tokens)
        return [id for id in ids if id is not None]

    @property
    def eos_token(self) -> str | None:
        """Text of the end-of-sequence token."""
        return self._named.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token."""
        return None if self.eos_token is None else self._core.token_to_id(self.eos_token)

    def get_vocab(self) -> dict[str, int]:
        """Return every token with its id, added ones included."""
        return self._core.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        return self._core.get_vocab_size(with_added_tokens=True)

    def __call__(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, **_: Any
    ) -> dict[str, list[list[int]]]:
        """Encode texts to {"input_ids": ...}, without attention masks."""
        encoded = self._core.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return {"input_ids": [each.ids for each in encoded]}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return self._core.encode(text, add_special_tokens=add_special_tokens).ids

    def convert_ids_to_tokens(self, id: int) -> str | None:
        """Return the token of an id, None for an unknown one."""
        return self._core.id_to_token(id)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tokenize: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render messages to text. Raises ValueError without a template, and errors of the template."""
        source = chat_template or self.chat_template
        if source is None or tokenize:
            raise ValueError(
                f"{self.name_or_path} has no chat template" if source is None else "tokenize=True is not supported"
            )
        values = {**self._named, **kwargs, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return _compiled(source).render(messages=messages, documents=None, **values)


def _text(token: Any) -> str | None:
    """Return the text of a token that is stored as text or as an object."""
    return cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token


def _template_of(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {row["name"]: row["template"] for row in cast("list[dict[str, str]]", template)}
        return named.get("default")
    return template


class _Generation(Extension):
    """Render the body of `{% generation %}` blocks, which mark assistant turns."""

    tags = {"generation"}  # noqa: RUF012  type declared by jinja2

    def parse(self, parser: Parser) -> Node | list[Node]:
        """Replace the block by its statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
    environment.globals.update(functions)
    return environment.from_string(source)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _is_lfs_pointer(path: Path) -> bool:
    return path.is_file() and path.read_bytes().startswith(LFS_POINTER)
