"""User functions that attack the run: it ends with an error that names the function, never with exit code 0."""

from __future__ import annotations

import pytest

import hook_attacks
from runs import FORKED, command_in_child, flags

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("hook", "attack", "words"),
    [
        ("source", "builtins", "it replaced builtins.len"),
        ("sample_hook", "C _exit", "C's _exit(0) would end"),
        ("post_process", "C exit itself", None),
        ("buffer_filter", "descriptors", "it closed descriptor"),
        ("loss", "descriptors", "it closed descriptor"),
        ("advantages", "descriptors", "it closed descriptor"),
        ("sample_filter", "os._exit", "os._exit(0)"),
        ("all_samples", "sys.exit", "sys.exit(0)"),
        ("data_postprocess", "KeyboardInterrupt", "KeyboardInterrupt: mine"),
        ("convert", "chdir", "it changed the working directory"),
        ("log", "SIGTERM ignored", "it changed the handler of SIGTERM"),
        ("source", "descriptors", "it closed descriptor"),
        ("sample_hook", "tasks cancelled", "user code cancelled the task of the run"),
        ("tis", "MemoryError", "MemoryError: mine"),
        ("reducer", "surrogates", r"ValueError: \udcff"),
    ],
)
def test_an_attack_is_an_error_that_names_the_function(hook, attack, words, model, data, tmp_path):
    named = hook_attacks.write_attack(tmp_path, hook, attack=hook_attacks.ATTACKS[attack])
    words_of_command = ["train", *flags(model, data, tmp_path / "run", **named)]
    process = FORKED.Process(target=command_in_child, args=(words_of_command, tmp_path / "log.txt"))
    process.start()
    process.join(120)
    assert process.exitcode == 1
    log = (tmp_path / "log.txt").read_text()
    assert words is None or (words in log and "attack.py:" in log)
    assert "Traceback" not in log
    assert "FILE01" not in log  # a closed descriptor is not a failure of the disk
