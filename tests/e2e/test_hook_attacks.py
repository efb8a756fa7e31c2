"""User functions that attack the run: it ends with an error that names the function, never with exit code 0."""

from __future__ import annotations

import re

import pytest

import hook_attacks
from runs import FORKED, command_in_child, flags

pytestmark = pytest.mark.slow


def _ended(folder, model, data, **named):
    """Return the exit code of a run with these flags, and what it wrote."""
    words = ["train", *flags(model, data, folder / "run", **named)]
    process = FORKED.Process(target=command_in_child, args=(words, folder / "log.txt"))
    process.start()
    process.join(120)
    return process.exitcode, (folder / "log.txt").read_text()


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
    code, log = _ended(tmp_path, model, data, **named)
    assert code == 1
    assert words is None or (words in log and "attack.py:" in log)
    assert "Traceback" not in log
    assert "FILE01" not in log  # a closed descriptor is not a failure of the disk


@pytest.mark.parametrize(
    ("hook", "value"),
    [
        ("source", "None"),
        ("reducer", "huge"),
        ("tis", "nested"),
        ("loss", "object"),
        ("rollout", "int"),
        ("sample_hook", "int"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_function(hook, value, model, data, tmp_path):
    named = hook_attacks.write_attack(tmp_path, hook, value=hook_attacks.VALUES[value])
    code, log = _ended(tmp_path, model, data, **named)
    assert code == 1
    assert re.search(r"attack\.py:\d+", log)
    assert "Traceback" not in log


def test_a_function_that_never_returns_while_the_run_is_built_ends_it(model, data, tmp_path):
    named = hook_attacks.write_attack(tmp_path, "source")
    with (tmp_path / "attack.py").open("a") as file:
        file.write("hook.__init__ = lambda self, args: time.sleep(1000)\n")
    code, log = _ended(tmp_path, model, data, **named, hang_timeout=1)
    assert code == 1
    assert re.search(r"user code does not return, <lambda> \(.*attack\.py:\d+\)", log)
