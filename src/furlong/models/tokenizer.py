"""Load a model's tokenizer, or build a small deterministic one.

Does not import transformers' model code, which takes a second.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import cast

from huggingface_hub.errors import StrictDataclassError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from furlong.errors import ConfigError
from furlong.models.hf_folder import check_folder

# Errors that transformers raises for a config or tokenizer with invalid values.
UNREADABLE = (ValueError, KeyError, TypeError, ArithmeticError, OSError, StrictDataclassError)
PAD, EOS, IM_START, IM_END, UNKNOWN = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
SPECIALS = (PAD, EOS, IM_START, IM_END, UNKNOWN)
PRINTABLE = string.ascii_letters + string.digits + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer. Raises ConfigError if its files are missing or unreadable."""
    path = check_folder(folder, tokenizer=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except UNREADABLE as error:
        raise ConfigError(f"cannot load the tokenizer of {path}: {error}") from error
    return cast("PreTrainedTokenizerBase", tokenizer)


def build_tokenizer(alphabet: str = PRINTABLE) -> PreTrainedTokenizerFast:
    """Build a character tokenizer: ids 0-4 are `SPECIALS`, then one id per character of `alphabet`, in order.

    Characters outside the alphabet become `<|unk|>`. The end-of-sequence token is `<|im_end|>`, as in chat models.

    >>> build_tokenizer("ab+").encode("a+b")
    [5, 7, 6]
    """
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
