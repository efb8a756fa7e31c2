from furlong.environments import Observation, Step, Task


def test_a_text_prompt_is_one_message_of_the_user():
    assert Task("1+1=").messages == [{"role": "user", "content": "1+1="}]


def test_messages_are_copied_so_that_an_environment_may_append():
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="}]
    Task(prompt).messages.append({})
    assert len(prompt) == 2


def test_what_an_environment_leaves_out_has_no_effect():
    assert Step() == Step((), None, done=False, truncated=False, info={})
    assert Observation([]).tools is None
