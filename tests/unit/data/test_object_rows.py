"""Rows in this process: read like those of a file, by the same source, and compared at a resume."""

from __future__ import annotations

import numpy
import pytest
from datasets import Dataset

from furlong.config.checks.value_checks import prompt_file_problem
from furlong.core.user_functions import use_objects
from furlong.data.dataset import ObjectRows, open_prompts
from furlong.data.prompt import PromptFormat
from furlong.data.prompt_path import PromptDataPath
from furlong.data.row_readers import Cursor
from furlong.errors import DataError

ROWS = [{"prompt": f"{i}+{i}=", "label": 2 * i, "carry": i > 4, "hint": None} for i in range(1, 8)]
COLUMNS = PromptFormat(input_key="prompt", label_key="label")


@pytest.fixture(autouse=True)
def no_objects_are_left():
    yield
    use_objects({})


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS), Dataset.from_list(ROWS)])
def test_rows_are_prompts_whose_other_columns_are_metadata(rows):
    use_objects({"prompt_data": rows})
    prompts = list(open_prompts("python:prompt_data@[4:6]", tokenizer=None, prompt_format=COLUMNS))
    assert [(prompt.text, prompt.label, prompt.metadata["carry"]) for prompt in prompts] == [
        ("5+5=", 10, True),
        ("6+6=", 12, True),
    ]


def test_values_of_data_frames_are_those_of_json():
    pandas = pytest.importorskip("pandas")
    turns = [[{"role": "user", "content": "1+1="}], [{"role": "user", "content": "2+2="}]]
    frame = pandas.DataFrame({"prompt": turns, "label": ["2", None], "day": pandas.to_datetime(["2026-01-02"] * 2)})
    frame["numbers"] = [numpy.arange(2), numpy.arange(3)]
    frame["prompt"] = [numpy.array(each, dtype=object) for each in turns]
    rows = ObjectRows(frame.to_dict("records"), "rows", COLUMNS)
    first, second = (row.raw for row in rows.read(Cursor()))
    metadata = {"day": "2026-01-02T00:00:00", "numbers": [0, 1]}
    assert first == {"prompt": turns[0], "label": "2", "day": metadata["day"], "numbers": [0, 1], "metadata": metadata}
    assert second["label"] is None


def test_an_iterable_data_set_is_a_stream():
    use_objects({"prompt_data": Dataset.from_list(ROWS).to_iterable_dataset()})
    stream = open_prompts("python:prompt_data", tokenizer=None, prompt_format=COLUMNS, streaming=True)
    stream.begin(None)
    stream.take(3)
    again = open_prompts("python:prompt_data", tokenizer=None, prompt_format=COLUMNS, streaming=True)
    again.seek(None, stream.position())
    assert [prompt.text for prompt in again.take(2)] == ["4+4=", "5+5="]


def test_other_rows_have_another_fingerprint():
    def fingerprint(rows):
        use_objects({"prompt_data": rows})
        return PromptDataPath.parse("python:prompt_data").fingerprint()

    assert fingerprint(ROWS) == fingerprint([dict(row) for row in ROWS]) == fingerprint(Dataset.from_list(ROWS))
    assert fingerprint(ROWS) != fingerprint(ROWS[:-1])
    assert fingerprint(ROWS) != fingerprint([*ROWS[:-1], ROWS[-1] | {"label": 5}])


def test_what_is_not_a_row_and_a_missing_object_are_errors_that_name_it():
    use_objects({"prompt_data": [{"prompt": "a", "label": "b"}, "c"]})
    with pytest.raises(DataError, match=r"python:prompt_data row 1 is 'c', expected a dict"):
        open_prompts("python:prompt_data", tokenizer=None, prompt_format=COLUMNS)
    use_objects({})
    assert "an object of the program" in str(prompt_file_problem("--prompt-data", "python:prompt_data"))
