"""Teachers of finished samples: routing, their own prompts, and other tokenizers."""

from __future__ import annotations

import asyncio
import math
import re

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fakes_engine import FakeEngine
from furlong.config.command_line import config_from_values
from furlong.config.sections import Config
from furlong.config.teachers import MESSAGES, function_problems, teacher_problems, teacher_specs
from furlong.core.sample import Sample, Status
from furlong.interfaces import TokenScores
from furlong.models.tokenizer import build_tokenizer
from furlong.rollout.teachers import Teacher, Teachers
from furlong.rollout.token_alignment import TokenBytes, common_groups, shared_log_probs

TEXTS = ["der schöne Hund läuft 12 Meter weit", "the quick brown fox jumps over 12 dogs", "naïve façade → 日本"]
FOLDER = "folder"
SLIME = "slime.rollout.on_policy_distillation"
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def byte_tokenizer(size):
    """A byte-level BPE, as GPT-2's and Qwen's."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(TEXTS, trainer)
    core.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", chat_template=TEMPLATE)


def marked_tokenizer():
    """A unigram model with marks of spaces, as sentencepiece's; unknown characters are bytes."""
    core = Tokenizer(models.Unigram([("<unk>", 0.0)], 0, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    core.train_from_iterator(TEXTS[:2], trainers.UnigramTrainer(vocab_size=80, unk_token="<unk>", show_progress=False))
    core.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE)


class Scoring(FakeEngine):
    """The log-prob of a token is -1 / (1 + its id); remembers what it was asked."""

    def __init__(self):
        super().__init__()
        self.asked = []

    async def score(self, tokens, num_scored, *, temperature=1.0, num_top=0, ids_RK=None):
        self.asked.append((list(tokens), num_scored, temperature))
        own = np.array([-1 / (1 + token) for token in tokens[-num_scored:]], np.float32)
        top = np.tile(np.arange(num_top, dtype=np.int32), (num_scored, 1))
        asked = np.zeros((num_scored, 0)) if ids_RK is None else -1 / (1 + ids_RK)
        return TokenScores(own, top, -top.astype(np.float32), asked.astype(np.float32))


def sample(prompt, response, **fields):
    n = len(response)
    values = {"tokens": [*prompt, *response], "response_length": n, "rollout_log_probs": [-0.5] * n}
    return Sample(**values | {"status": Status.COMPLETED} | fields)


def asked(teachers, *samples):
    for place, outcome in asyncio.run(teachers.ask(samples)).items():
        samples[place].status, samples[place].outcome = Status.FAILED, outcome
    return teachers


def test_metadata_names_the_teacher_and_an_unknown_name_fails_the_sample():
    engines = {name: Scoring() for name in ("default", "code")}
    built = {name: Teacher(engine, context_len=6) for name, engine in engines.items()}
    teachers = Teachers(built, engines["default"], None, "who", temperature=0.7, num_top=2)
    plain, named = sample([5], [6, 7]), sample([5], [8], metadata={"who": "code"})
    wrong, long = sample([5], [6], metadata={"who": "math"}), sample([5] * 4, [6, 7])
    failed = sample([5], [6], status=Status.FAILED)
    asked(teachers, plain, named, wrong, long, failed)
    assert plain.teacher_log_probs == pytest.approx([-1 / 7, -1 / 8])
    assert plain.teacher_top_ids.tolist() == [[0, 1], [0, 1]]
    assert plain.teacher_top_log_probs.tolist() == [[-1, -0.5]] * 2
    assert engines["code"].asked == [([5, 8], 1, 0.7)]
    assert (wrong.status, long.status) == (Status.FAILED, Status.FAILED)
    assert "metadata.who is 'math'; the teachers are default, code" in wrong.outcome.reason
    assert "have 6 tokens, and its context has 6" in long.outcome.reason
    assert failed.teacher_log_probs is None
    metrics = teachers.take([plain, named, wrong])
    assert metrics["rollout/opd_teacher/code_kl"].value == pytest.approx(-0.5 + 1 / 9)
    assert metrics["perf/teacher_time"].weight == 4


def test_a_teacher_may_see_another_prompt_before_the_same_response():
    engine, tokenizer = Scoring(), build_tokenizer()
    options = {"prompt_key": "hint", "applies_template": True}
    teachers = Teachers({"default": Teacher(engine)}, engine, tokenizer, "who", **options)
    response = tokenizer.encode("7")
    told = sample(tokenizer.encode("3+4="), response, metadata={"hint": "3+4=7, so 3+4="})
    asked(teachers, told, sample([5], response))
    (tokens, count, _), (plain, *_) = engine.asked
    assert tokenizer.decode(tokens) == "<|im_start|>user\n3+4=7, so 3+4=<|im_end|>\n<|im_start|>assistant\n7"
    assert (count, plain) == (1, [5, *response])
    assert told.teacher_log_probs == pytest.approx([-1 / (1 + response[0])])


@pytest.mark.parametrize("theirs", [byte_tokenizer(300), marked_tokenizer()], ids=["bytes", "marks"])
def test_another_tokenizer_is_aligned_by_bytes(theirs):
    """The log-probs of all groups add up to the teacher's of the text, in its own template, and ends correspond."""
    own, engine = byte_tokenizer(280), Scoring()
    teacher = Teacher(engine, tokenizer=theirs, token_bytes=TokenBytes(theirs))
    teachers = Teachers({"default": teacher}, engine, own, "who", token_bytes=TokenBytes(own))
    text = "the quick dogs jump"
    response = [*own.encode(text), own.eos_token_id]
    log_probs = [-0.1 * (1 + i) for i in range(len(response))]
    messages = {MESSAGES: [{"role": "user", "content": "run"}]}
    scored = sample(own.encode("run"), response, metadata=messages, rollout_log_probs=log_probs)
    asked(teachers, scored)
    ids = [*theirs.encode(text, add_special_tokens=False), theirs.eos_token_id]
    prompt = theirs.encode("[user] run\n[assistant] ", add_special_tokens=False)
    assert engine.asked == [([*prompt, *ids], len(ids), 1.0)]
    assert scored.teacher_mask == [1] * len(response)
    assert math.fsum(scored.teacher_log_probs) == pytest.approx(sum(-1 / (1 + i) for i in ids), abs=1e-6)
    assert scored.teacher_log_probs[-1] == pytest.approx(-1 / (1 + theirs.eos_token_id))


def test_what_follows_bytes_that_are_no_text_is_left_out():
    own, theirs = byte_tokenizer(280), byte_tokenizer(300)
    broken = [*own.encode("the"), *own.encode("日")[:1], *own.encode(" fox")]
    teacher = Teacher(Scoring(), tokenizer=theirs, token_bytes=TokenBytes(theirs))
    scored = sample(own.encode("a"), broken)
    scored.prompt = "a"
    asked(Teachers({"default": teacher}, teacher.engine, own, "who", token_bytes=TokenBytes(own)), scored)
    known = len(own.encode("the"))
    assert scored.teacher_mask == [1] * known + [0] * (len(broken) - known)
    assert scored.teacher_log_probs[known:] == [0.0] * (len(broken) - known)


def test_groups_are_the_shortest_with_equal_bytes_and_share_their_log_prob():
    groups = common_groups([b"ab", b"c", b"d", b"ef"], [b"a", b"bc", b"d", b"eg"])
    assert groups == [(slice(0, 2), slice(0, 2)), (slice(2, 3), slice(2, 3))]
    log_probs, mask = shared_log_probs(groups, np.float32([-1, -2, -4, -9]), np.float32([-1, -3, 0, -1]))
    assert log_probs.tolist() == [-0.75, -2.25, -4, 0]
    assert mask.tolist() == [1, 1, 1, 0]


def configured(**values):
    return config_from_values({"use_opd": True, "opd_type": "sglang", **values}, Config())


def test_teachers_are_urls_folders_and_the_reward_url(tmp_path):
    urls = ("math=http://host:1/generate", str(tmp_path))
    config = configured(opd_teacher_urls=urls, opd_teacher_tokenizer=("math=/t",))
    assert [(s.name, s.url, s.folder, s.tokenizer) for s in teacher_specs(config)] == [
        ("math", "http://host:1", None, "/t"),
        ("default", None, str(tmp_path), None),
    ]
    (only,) = teacher_specs(configured(rm_url="http://host:1/generate"))
    assert (only.name, only.url) == ("default", "http://host:1")
    assert teacher_specs(configured(rm_url="http://host:1/generate", custom_rm_path="a.b")) == []
    assert teacher_specs(configured(opd_type="trainer", opd_teacher_load="x")) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "--use-opd has no teacher"),
        ({"opd_teacher_urls": ("a=http://h:1", "a=http://h:2")}, "two teachers named 'a'"),
        ({"opd_teacher_urls": ("a=/none",)}, "/none"),
        ({"opd_teacher_urls": ("http://h:1",), "rollout_function_path": "a.b"}, r"set sample\.teacher_log_probs there"),
        ({"opd_teacher_urls": ("http://h:1",), "opd_teacher_tokenizer": ("b=/t",)}, "is of no teacher; .* default"),
        ({"opd_teacher_urls": ("http://h:1",), "opd_teacher_tokenizer": ("/t",)}, "/t: no tokenizer there"),
        (
            {
                "opd_teacher_urls": ("http://h:1",),
                "opd_teacher_tokenizer": (FOLDER,),
                "opd_loss": "topk",
            },
            "use --opd-loss sampled",
        ),
        ({"opd_teacher_urls": ("t=",)}, "lacks a name or a value"),
        ({"opd_teacher_urls": ("=http://h:1",)}, "lacks a name or a value"),
        ({"opd_teacher_urls": ("t=localhost:30000",)}, "use http://localhost:30000"),
        (
            {"opd_teacher_urls": ("http://h:1",), "opd_teacher_tokenizer": (FOLDER,), "environment": ("a.b:C",)},
            "have the policy's chat template",
        ),
        ({"custom_rm_path": f"{SLIME}.reward_func", "custom_reward_post_process_path": "a.b"}, "add --rm-url http"),
        ({"custom_rm_path": f"{SLIME}.reward_func", "rm_url": "http://h:1"}, f"{SLIME}.post_process_rewards, which"),
        (
            {"custom_reward_post_process_path": f"{SLIME}.post_process_rewards", "rm_url": "http://h:1"},
            f"{SLIME}.reward_func, which asks",
        ),
    ],
)
def test_impossible_teachers_are_problems(values, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "tokenizer.json").touch()
    config = configured(**values)
    problems = "\n".join([*function_problems(config), *teacher_problems(config)])
    assert len(problems.splitlines()) == 1
    assert re.search(words, problems)
