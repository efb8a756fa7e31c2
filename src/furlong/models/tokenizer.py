"""Tokenizers and chat templates: those of model folders, shipped templates, and a small deterministic tokenizer.

Training and generation use the tokenizers of transformers, which are imported when the first is loaded or built. Checks
that must be fast use `JsonTokenizer`; a test compares the two.
"""

from __future__ import annotations

import functools
import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from furlong.core.model_config import read_json
from furlong.core.text import shortened
from furlong.errors import ConfigError
from furlong.files.safetensors_header import LFS_POINTER
from furlong.models.hf_folder import check_folder

if TYPE_CHECKING:  # it takes a second to import
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, EOS, IM_START, IM_END, UNKNOWN = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
SPECIALS = (PAD, EOS, IM_START, IM_END, UNKNOWN)
PRINTABLE = string.ascii_letters + string.digits + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer; one with Python code of its own, which is never run, from tokenizer.json.

    Raises ConfigError if its files are missing or unreadable.
    """
    path = check_folder(folder, tokenizer=True)
    if problem := _tiktoken_problem(path):
        raise ConfigError(problem)
    _settings(path)
    try:
        tokenizer = _read_tokenizer(path)
    except Exception as error:  # tokenizers raises a plain Exception for any damage
        _template_of(path, read_json(path / "tokenizer_config.json"))  # raises, naming the file, if that is damaged
        read_json(path / "special_tokens_map.json")
        if (path / "config.json").is_file():
            from furlong.models.hf_config import load_config  # imports transformers

            load_config(path)  # raises, naming the file, if the tokenizer's class could not be found because of it
        name = "tokenizer.json" if (path / "tokenizer.json").is_file() else "it has no file tokenizer.json"
        raise ConfigError(f"cannot load the tokenizer of {path} ({name}): {type(error).__name__}: {error}") from error
    return cast("PreTrainedTokenizerBase", tokenizer)


def _read_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        return AutoTokenizer.from_pretrained(path, **options)
    except ValueError:
        settings = read_json(path / "tokenizer_config.json")
        if "auto_map" not in settings or not (path / "tokenizer.json").is_file():
            raise
        return PreTrainedTokenizerFast.from_pretrained(path, **options)  # its class is code of the folder


def _tiktoken_problem(folder: Path) -> str:
    """Return why a folder with tiktoken.model has no usable tokenizer; "" if it has one.

    The file has the tokens alone: transformers would split text by another model's pattern.
    """
    if (folder / "tokenizer.json").is_file() or not (folder / "tiktoken.model").is_file():
        return ""
    return (
        f"{folder} has tiktoken.model but no tokenizer.json: how text is split and which tokens are special is in "
        "Python code of the folder, which is never run; write tokenizer.json once, in an environment with tiktoken: "
        "TikTokenConverter(vocab_file, pattern=..., extra_special_tokens=[...]).converted().save('tokenizer.json') of "
        "transformers.convert_slow_tokenizer, with vocab_file the path of tiktoken.model, and the pattern (`pat_str`) "
        "and special tokens of the folder's tokenization_*.py"
    )


def build_tokenizer(alphabet: str = PRINTABLE) -> PreTrainedTokenizerFast:
    """Build a character tokenizer: ids 0-4 are `SPECIALS`, then one id per character of `alphabet`, in order.

    Characters outside the alphabet become `<|unk|>`. The end-of-sequence token is `<|im_end|>`, as in chat models.

    >>> build_tokenizer("ab+").encode("a+b")
    [5, 7, 6]
    """
    from transformers import PreTrainedTokenizerFast

    characters = list(dict.fromkeys(alphabet))
    vocab = {token: i for i, token in enumerate([*SPECIALS, *characters])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=IM_END,
        unk_token=UNKNOWN,
        additional_special_tokens=[EOS, IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class JsonTokenizer:
    """Encodes with tokenizer.json and renders the folder's chat template, without transformers.

    It has the part of transformers' tokenizers that data and template code uses, under the same names. Raises
    ConfigError if tokenizer.json is missing or damaged.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        self.name_or_path = str(folder)
        try:
            self._core = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises a plain Exception for any damage
            path = folder / "tokenizer.json"
            if path.is_file() and path.read_bytes().startswith(LFS_POINTER):
                raise ConfigError(
                    f"{path} is a Git LFS pointer: the repository was cloned without Git LFS; run `git lfs pull` there"
                ) from error
            raise ConfigError(_tiktoken_problem(folder) or f"cannot load the tokenizer {path}: {error}") from error
        self._core.no_padding()
        self._core.no_truncation()
        settings = _settings(folder)
        named = read_json(folder / "special_tokens_map.json") | settings
        self._named = {name: text for name in NAMED if (text := _text(named.get(name), folder, name))}
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
    def special_tokens_map(self) -> dict[str, str]:
        """The named special tokens, such as `eos_token`."""
        return dict(self._named)

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
        return render_template(source, {**values, "messages": messages, "documents": None})


def render_template(source: str, values: Mapping[str, Any]) -> str:
    """Render a chat template in a sandbox, as transformers does. Raises errors of the template."""
    return _compiled(source).render(**values)


def _is_token(value: Any) -> bool:
    return isinstance(cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value, str)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(_is_token(each) for each in cast("list[Any]", value))


def _are_added_tokens(value: Any) -> bool:
    entries = cast("dict[str, Any]", value).items() if isinstance(value, dict) else [("", None)]
    return all(id.isdecimal() and isinstance(token, dict) and _is_token(token) for id, token in entries)


# Settings with which transformers would fail without naming them: what they must be.
SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tokenizer_class": (lambda value: isinstance(value, str), "the name of a class"),
    "model_max_length": (lambda value: isinstance(value, int | float) and not isinstance(value, bool), "a number"),
    "padding_side": (lambda value: value in ("left", "right"), "left or right"),
    "truncation_side": (lambda value: value in ("left", "right"), "left or right"),
    "additional_special_tokens": (_are_tokens, "a list of tokens"),
    "added_tokens_decoder": (_are_added_tokens, "an object of ids with tokens, objects with `content`"),
}


def _settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, {} without one. Raises ConfigError for a setting that no tokenizer can have."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path)
    for name, (is_right, expected) in SETTINGS.items():
        if settings.get(name) is not None and not is_right(settings[name]):
            value = shortened(settings[name])
            raise ConfigError(f"{path}: {name} is {value}, expected {expected}; download the tokenizer again")
    return settings


def _text(token: Any, folder: Path, key: str) -> str | None:
    """Return the text of a token that is stored as text or as an object. Raises ConfigError for anything else."""
    text = cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise ConfigError(
            f"{folder}: {key} in tokenizer_config.json or special_tokens_map.json is {shortened(token)}, expected text "
            "or an object with `content`; download the tokenizer again"
        )
    return text


def _template_of(folder: Path, settings: dict[str, Any]) -> str | None:
    """Return the chat template of a folder, or None. Raises ConfigError that names the file of a damaged one."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as text: {error}; download the model again") from error
    template = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list) and all(isinstance(row, dict) for row in cast("list[Any]", template)):
        named = {str(row.get("name")): row.get("template") for row in cast("list[dict[str, Any]]", template)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ConfigError(
            f"{folder}: chat_template in tokenizer_config.json or chat_template.json is {shortened(template)}, "
            "expected text or a list of objects with `name` and `template`; download the model again"
        )
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


TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class ShippedTemplate:
    """A shipped template. family: the models it is for; settings: Jinja code prepended to the file."""

    family: str
    file: str
    settings: str = ""

    def text(self) -> str:
        """Return the Jinja source."""
        return self.settings + (TEMPLATES / self.file).read_text(encoding="utf-8")


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
