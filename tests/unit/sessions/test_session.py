"""Sessions keep the ids that the engine sampled, whatever the client does with the text."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from typing import Any

import pytest

from chat_zoo import TEMPLATES, TOOLS, Script, bpe_tokenizer
from furlong.chat.messages import MessageError
from furlong.chat.parsers import PARSERS
from furlong.chat.template_boundary import ChatFormat
from furlong.core.sample import Sample, Status
from furlong.errors import RolloutError
from furlong.interfaces import Completion, SamplingParams
from furlong.sessions.samples import samples_from_session
from furlong.sessions.session import SMALL, EndedError, FullContextError, Reply, Session, SessionSettings

USER = {"role": "user", "content": "what is the sum?"}


def session_of(script: Script, **options: Any) -> Session:
    options = {"name": "s", "params": SamplingParams(), **options}
    return Session(ChatFormat(script.tokenizer), script, **options)


def talk(session: Session, turns: int, *, change: Any = lambda message: message, **options: Any) -> list[Reply]:
    """Have a conversation in which the client changes each answer before it sends it back."""

    async def main() -> list[Reply]:
        messages: list[Any] = [USER]
        replies: list[Reply] = []
        for turn in range(turns):
            replies.append(await session.chat(messages, **options))
            messages += [change(dict(replies[-1].message)), {"role": "user", "content": f"and then {turn}?"}]
        return replies

    return asyncio.run(main())


def random_answers(tokenizer: Any, count: int, *, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    ordinary = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids) - set(tokenizer.added_tokens_decoder))
    return [[*draw.choices(ordinary, k=8), tokenizer.eos_token_id] for _ in range(count)]


@pytest.mark.parametrize("family", TEMPLATES)
def test_sampled_ids_are_trained_as_they_are_although_they_change_when_encoded_again(family):
    tokenizer = bpe_tokenizer(family)
    answers = random_answers(tokenizer, 6)
    changed = sum(tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids for ids in answers)
    assert changed > 3
    script = Script(tokenizer, *answers)
    session = session_of(script)
    talk(session, 6)
    (sample,) = samples_from_session(session, Sample(index=0))
    trained = [
        id
        for id, is_trained in zip(sample.tokens[sample.prompt_length :], sample.loss_mask or (), strict=True)
        if is_trained
    ]
    assert trained == [id for ids in answers for id in ids]
    for asked, ids in zip(script.asked, answers, strict=True):
        assert sample.tokens[: len(asked) + len(ids)] == [*asked, *ids]
    assert session.tree.branch_reasons.total() == 0
    assert sample.status is Status.COMPLETED


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_engine_reads_what_the_template_renders(family):
    tokenizer = bpe_tokenizer(family)
    opening = {"gpt_oss": "<|channel|>final<|message|>", "mistral": " "}.get(family, "")
    script = Script(tokenizer, opening + "one", opening + "two", opening + "three")
    talk(session_of(script), 3)
    messages = [USER, {"role": "assistant", "content": "one"}, {"role": "user", "content": "and then 0?"}]
    messages += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "and then 1?"}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    shown = tokenizer.decode(script.asked[-1]).replace("<|return|>", "<|end|>").replace("<think></think>\n", "")
    assert shown.replace("\n", "") == whole.replace("<think></think>\n", "").replace("\n", "")


@pytest.mark.parametrize(
    "change",
    [
        lambda message: {**message, "id": "x", "name": "bot", "refusal": None},
        lambda message: {**message, "content": [{"type": "text", "text": message["content"].strip()}]},
        lambda message: {key: value for key, value in message.items() if key != "reasoning_content"},
    ],
)
def test_an_echo_in_another_form_is_the_same_conversation(change):
    tokenizer = bpe_tokenizer("qwen")
    script = Script(tokenizer, "<think>\nhm\n</think>\n\n the answer ", "<think>\nno\n</think>\n\nyes", "ok")
    session = session_of(script)
    replies = talk(session, 3, change=change)
    assert [reply.reasoning for reply in replies] == ["hm", "no", None]
    assert len(session.tree.leaves()) == 1
    assert "hm" in tokenizer.decode(script.asked[-1])  # thinking stays in what the engine reads


def test_history_template_drops_what_the_template_drops_and_branches():
    tokenizer = bpe_tokenizer("qwen")
    script = Script(tokenizer, "<think>\nhm\n</think>\n\nthe answer", "<think>\nno\n</think>\n\nyes")
    session = session_of(script, settings=SessionSettings(history="template"))
    talk(session, 2)
    assert "hm" not in tokenizer.decode(script.asked[-1])
    assert session.tree.branch_reasons == {"stripped": 1}
    first, second = samples_from_session(session, Sample(index=0))
    assert sum(first.loss_mask or ()) + sum(second.loss_mask or ()) == sum(len(n.sampled) for n in session.tree.nodes)


def test_tool_calls_keep_their_ids_when_the_client_writes_the_arguments_anew():
    tokenizer = bpe_tokenizer("qwen")
    call = 'let me see\n<tool_call>\n{"name": "add", "arguments": {"b":2,"a":1}}\n</tool_call>'
    script = Script(tokenizer, call, "3")
    session = session_of(script)

    async def main() -> Reply:
        reply = await session.chat([USER], tools=TOOLS)
        (made,) = reply.tool_calls
        assert (made["function"], reply.content) == ({"name": "add", "arguments": '{"b": 2, "a": 1}'}, "let me see")
        echoed = {"id": "other", "type": "function", "function": {"name": "add", "arguments": '{ "a": 1, "b": 2 }'}}
        answer = {"role": "assistant", "content": "let me see", "tool_calls": [echoed]}
        return await session.chat(
            [USER, answer, {"role": "tool", "tool_call_id": "other", "content": "3"}], tools=TOOLS
        )

    asyncio.run(main())
    assert script.asked[1][: len(script.asked[0])] == script.asked[0]
    added = tokenizer.decode(session.tree.nodes[1].added)
    assert added == "\n<|im_start|>user<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_arguments_and_tools_are_compared_by_value():
    tokenizer = bpe_tokenizer("qwen")
    call = '<tool_call>{"name": "add", "arguments": {"a": 1.0, "b": 12345678901234567890, "c": null}}</tool_call>'
    session = session_of(Script(tokenizer, call, "ok"))

    async def main() -> None:
        tools = [*TOOLS, {"type": "function", "function": {"name": "b", "parameters": None}}]
        first = await session.chat([USER], tools=tools)
        (made,) = first.tool_calls
        written = {"name": "add", "arguments": '{"b":12345678901234567000,"a":1}'}  # by JavaScript
        answer = {"role": "assistant", "content": None, "tool_calls": [{**made, "function": written}]}
        result = {"role": "tool", "tool_call_id": made["id"], "content": "3"}
        again = [{"type": "function", "function": {"name": "b"}}, *TOOLS]
        await session.chat([USER, answer, result], tools=again)

    asyncio.run(main())
    assert (len(session.tree.leaves()), session.tree.branch_reasons.total()) == (1, 0)


def test_an_ill_formed_call_comes_back_as_text_and_is_counted():
    script = Script(bpe_tokenizer("qwen"), "<tool_call>\n{name: add}\n</tool_call>")
    session = session_of(script)
    (reply,) = talk(session, 1, tools=TOOLS)
    assert reply.content == "<tool_call>\n{name: add}\n</tool_call>"
    assert not reply.tool_calls
    assert session.counts["ill_formed_calls"] == 1


def test_an_answer_that_was_cut_gets_its_end_of_turn_without_being_trained_on():
    tokenizer = bpe_tokenizer("qwen")
    session = session_of(Script(tokenizer, "one two...", "ok"))
    talk(session, 2)
    (sample,) = samples_from_session(session, Sample(index=0))
    assert tokenizer.decode(session.tree.nodes[1].added).startswith("<|im_end|>\n<|im_start|>user")
    assert sum(sample.loss_mask or ()) == sum(len(node.sampled) for node in session.tree.nodes)


def test_a_stop_string_is_trained_but_not_part_of_the_text():
    tokenizer = bpe_tokenizer("qwen")
    session = session_of(Script(tokenizer, "say Observation:", end=""), params=SamplingParams(stop=("Observation:",)))
    (reply,) = talk(session, 1)
    assert reply.content == "say "
    assert tokenizer.decode(reply.tokens) == "say Observation:"


def test_delimiters_that_end_and_begin_turns_are_not_doubled():
    tokenizer = bpe_tokenizer("glm")
    session = session_of(Script(tokenizer, "one", "two"))
    talk(session, 2)
    assert tokenizer.decode(session.tree.nodes[1].added) == "\nand then 0?<|assistant|>"


def test_branches_are_trained_once_and_share_the_rollout():
    tokenizer = bpe_tokenizer("plain")
    script = Script(tokenizer, "one", "two", "other", "sub", "edited")
    session = session_of(script)

    async def main() -> None:
        one = (await session.chat([USER])).message
        more = [USER, one, {"role": "user", "content": "more"}]
        await session.chat(more)
        await session.chat(more)  # a deliberate second sample
        await session.chat([{"role": "system", "content": "you plan"}, {"role": "user", "content": "x"}])
        await session.chat([USER, {"role": "assistant", "content": "uno"}, {"role": "user", "content": "more"}])

    asyncio.run(main())
    assert session.tree.branch_reasons == {"retry": 1, "subagent": 1, "edited": 1}
    samples = samples_from_session(session, Sample(index=3, group_index=1))
    assert [sample.rollout_id or sample.index for sample in samples] == [3] * 4
    total = sum(len(node.sampled) for node in session.tree.nodes)
    assert sum(sum(sample.loss_mask or ()) for sample in samples) == total
    assert samples[1].prompt_length > samples[0].prompt_length  # what both have is part of the prompt
    assert script.parts[:2] == [None, None]
    assert len(set(script.parts[2:])) == 3
    assert [len(samples_from_session(session, Sample(), leaves=choice)) for choice in ("last", "longest")] == [1, 1]
    chosen = samples_from_session(session, Sample(), leaves=lambda leaves: leaves[:2])
    assert len(chosen) == 2


def test_other_tools_are_a_branch_with_its_reason():
    session = session_of(Script(bpe_tokenizer("qwen"), "one", "two"))

    async def main() -> None:
        one = (await session.chat([USER], tools=TOOLS)).message
        await session.chat([USER, one, USER])

    asyncio.run(main())
    assert session.tree.branch_reasons.total() == 1
    assert len(session.tree.leaves()) == 2


def test_an_answer_that_its_client_never_got_is_superseded_by_another_one_to_the_same_request():
    session = session_of(Script(bpe_tokenizer("qwen"), "one", "two", "three"))
    asyncio.run(session.chat([USER]))
    lost = session.tree.nodes[0]
    lost.is_delivered = False
    assert session.tree.leaves() == [lost]
    asyncio.run(session.chat([USER, {"role": "user", "content": "and another one"}]))
    assert len(session.tree.leaves()) == 2
    asyncio.run(session.chat([USER]))
    assert [leaf.number for leaf in session.tree.leaves()] == [1, 2]


def test_a_template_that_moves_its_tools_branches_instead_of_training_on_other_ids():
    tokenizer = bpe_tokenizer("mistral")
    script = Script(tokenizer, "one", "two", "three")
    session = session_of(script)
    talk(session, 2, tools=TOOLS)
    assert len(session.tree.leaves()) == 2
    assert session.tree.branch_reasons == {"stripped": 1}
    assert script.asked[1] == tokenizer.apply_chat_template(
        [USER, {"role": "assistant", "content": "one"}, {"role": "user", "content": "and then 0?"}],
        tools=TOOLS,
        add_generation_prompt=True,
        return_dict=False,
    )


def test_a_template_that_marks_the_last_message_branches():
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if loop.last %} (now){% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    script = Script(bpe_tokenizer("plain"), "one", "two")
    chat_format = ChatFormat(script.tokenizer, chat_template=source)
    session = Session(chat_format, script, name="s", params=SamplingParams())
    talk(session, 2)
    assert (len(session.tree.leaves()), session.tree.branch_reasons) == (2, {"stripped": 1})
    assert script.tokenizer.decode(script.asked[1]).count("(now)") == 1


def test_a_conversation_continues_if_the_template_does_not_write_tool_calls():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    script = Script(bpe_tokenizer("plain"), call, "3")
    session = session_of(script, settings=SessionSettings(parser=PARSERS["hermes"]))

    async def main() -> None:
        reply = await session.chat([USER], tools=TOOLS)
        assert reply.tool_calls
        await session.chat([USER, reply.message, {"role": "tool", "content": "4 it is"}], tools=TOOLS)

    asyncio.run(main())
    assert "4 it is" in script.tokenizer.decode(script.asked[1])
    assert session.tree.branch_reasons == {"stripped": 1}


def test_token_ids_attach_to_the_same_tree():
    tokenizer = bpe_tokenizer("plain")
    script = Script(tokenizer, "one", "two")
    session = session_of(script)

    async def main() -> None:
        first = await session.complete(tokenizer.encode("a b"))
        await session.complete([*tokenizer.encode("a b"), *first.tokens, *tokenizer.encode("c")])

    asyncio.run(main())
    (sample,) = samples_from_session(session, Sample(index=0))
    assert sum(sample.loss_mask or ()) == sum(len(node.sampled) for node in session.tree.nodes)
    assert script.parts == [None, None]


def test_a_sample_whose_tokens_differ_from_the_sampled_ones_fails_with_the_turn():
    session = session_of(Script(bpe_tokenizer("plain"), "one", "two"))
    talk(session, 2)
    session.tree.nodes[1].added = [*session.tree.nodes[1].added[:-1], 7]
    with pytest.raises(RolloutError, match=r"turn 2, position \d+"):
        samples_from_session(session, Sample(index=0))


def test_an_ended_session_and_a_full_context_are_errors():
    session = session_of(Script(bpe_tokenizer("plain"), "one"), context_len=8)
    with pytest.raises(FullContextError, match="context length is 8"):
        talk(session, 1)
    session.end()
    with pytest.raises(EndedError, match="has ended"):
        talk(session, 1)


def test_messages_that_cannot_fit_are_refused_before_they_are_tokenized(monkeypatch):
    session = session_of(Script(bpe_tokenizer("plain"), "one"), context_len=8)
    talk_once = session.chat([{"role": "user", "content": "a" * 8 * session.chat_format.longest_token}])
    asyncio.run(session._check_template())
    monkeypatch.setattr(session.chat_format, "render", lambda *_, **__: pytest.fail("it was rendered"))
    with pytest.raises(FullContextError, match="cannot fit: the context length is 8"):
        asyncio.run(talk_once)


def test_large_messages_are_tokenized_outside_of_the_event_loop(monkeypatch):
    session = session_of(Script(bpe_tokenizer("plain"), "one", "two"))
    encode, threads = session.chat_format.encode, list[bool]()

    def noted(text):
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(text)

    asyncio.run(session._check_template())
    monkeypatch.setattr(session.chat_format, "encode", noted)
    for size in (10, 2 * SMALL):
        asyncio.run(session.chat([{"role": "user", "content": "a" * size}]))
    assert threads == [True, False]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages must be"),
        ([{"role": "robot", "content": ""}], r"messages\[0\].role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\] has type 'image_url'"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], r"messages\[0\].tool_calls\[0\]"),
        ([{"role": "assistant", "reasoning": 3}], r"messages\[0\].reasoning"),
    ],
)
def test_an_invalid_message_is_named(messages, field):
    session = session_of(Script(bpe_tokenizer("plain")))
    with pytest.raises(MessageError, match=field):
        asyncio.run(session.chat(messages))


def test_an_ended_session_is_freed_without_a_garbage_collection():
    def opened() -> tuple[Session, weakref.ref[Any]]:
        class Owner:
            async def complete(self, *_: Any) -> Completion:
                return Completion([7], [-0.5], [0], "length", "x")

        owner: Any = Owner()  # as a policy: it has the session, and the session completes with it
        owner.session = Session(ChatFormat(bpe_tokenizer("plain")), owner.complete, name="s", params=SamplingParams())
        return owner.session, weakref.ref(owner)

    async def main() -> weakref.ref[Any]:
        session, owner = opened()
        await session.chat([{"role": "user", "content": "hi"}])
        session.end()
        with pytest.raises(EndedError):
            await session.chat([{"role": "user", "content": "hi"}])
        assert len(session.tree.nodes) == 1
        return owner

    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()
