"""Tokenizers and chat templates: those of model folders, shipped templates, and a small deterministic tokenizer.

transformers is imported when the first tokenizer is loaded or built. It renders templates in a sandbox.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from furlong.core.model_config import read_json
from furlong.errors import ConfigError
from furlong.files.tensor_file import LFS_POINTER
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
    """Load the tokenizer; one with its own Python code, which is never run, from tokenizer.json.

    Raises ConfigError if its files are missing or unreadable.
    """
    path = check_folder(folder, tokenizer=True)
    if problem := _tiktoken_problem(path):
        raise ConfigError(problem)
    try:
        return cast("PreTrainedTokenizerBase", _read_tokenizer(path))
    except Exception as error:  # tokenizers raises a plain Exception for any damage
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            read_json(path / name)  # raises, naming the file, if that is damaged
        if (path / "config.json").is_file():
            from furlong.models.hf_config import load_config  # imports transformers

            load_config(path)  # raises, naming the file, if the tokenizer's class could not be found because of it
        file = path / "tokenizer.json"
        if file.is_file() and file.read_bytes().startswith(LFS_POINTER):
            raise ConfigError(
                f"{file} is a Git LFS pointer: the repository was cloned without Git LFS; run `git lfs pull` there"
            ) from error
        name = file.name if file.is_file() else "it has no file tokenizer.json"
        raise ConfigError(f"cannot load the tokenizer of {path} ({name}): {type(error).__name__}: {error}") from error


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
