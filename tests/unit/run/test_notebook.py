import json
import sys
import types

import pytest

from furlong.core.process_environment import log_stream
from furlong.errors import ConfigError
from furlong.run.python_api import Run, open_display


def add_step(folder, step, **metrics):
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "a<b>"
    add_step(folder, 0, **{"eval/x": 0.5})
    add_step(folder, 1, **{"rollout/raw_reward": 0.25, "train/loss": None})
    return Run(folder)


def test_metrics_are_a_frame_with_a_row_per_step(run, monkeypatch):
    pytest.importorskip("pandas")
    frame = run.metrics
    assert frame.equals(run.frame())
    assert list(frame.index) == [0, 1]
    assert frame.loc[1, "rollout/raw_reward"] == 0.25
    assert frame["train/loss"].isna().all()
    (run.folder / "empty").mkdir()
    assert len(Run(run.folder / "empty").frame()) == 0
    with pytest.raises(ConfigError, match="none: no such directory; give the folder of a run"):
        Run(run.folder / "none")
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert run.metrics == run.rows
    assert run.rows[1] == {"step": 1, "rollout/raw_reward": 0.25, "train/loss": None}
    with pytest.raises(ConfigError, match="pip install pandas"):
        run.frame()


def test_a_notebook_shows_a_run_as_escaped_html(run):
    html = run._repr_html_()
    assert "a&lt;b&gt;" in html
    assert "a<b>" not in html


class Shown:
    """A display handle of IPython."""

    def __init__(self):
        self.contents = []

    def show(self, content, *, raw, display_id):
        assert raw
        assert display_id
        self.contents.append(content["text/html"])
        return self

    def update(self, content, *, raw):
        self.contents.append(content["text/html"])


def install_ipython(monkeypatch, shell):
    shown = Shown()
    display = types.SimpleNamespace(display=shown.show)
    module = types.SimpleNamespace(get_ipython=lambda: shell, display=display)
    monkeypatch.setitem(sys.modules, "IPython", module)
    return shown


def test_a_live_display_changes_with_the_run(run, monkeypatch):
    shown = install_ipython(monkeypatch, types.SimpleNamespace(kernel=object()))
    display = open_display(run.folder, 3)
    display.refresh()
    display.refresh()
    num_before = len(shown.contents)
    add_step(run.folder, 2, **{"rollout/raw_reward": 0.75})
    display.refresh()
    assert len(shown.contents) == num_before + 1
    assert "2 of 3" in shown.contents[-1]


@pytest.mark.parametrize("shell", [None, types.SimpleNamespace()])
def test_a_terminal_shows_no_display(tmp_path, monkeypatch, shell):
    install_ipython(monkeypatch, shell)
    assert open_display(tmp_path, None) is None


def test_the_log_of_a_notebook_is_not_on_stderr(monkeypatch):
    assert log_stream() is sys.stderr
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert log_stream() is sys.stdout
