"""Training from Python: `furlong.train` and the `Run` that it returns."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from furlong.config.sections import Config
from furlong.core.user_code import is_async
from furlong.errors import ConfigError, FurlongError
from furlong.run.folder import run_folder
from furlong.run.launch import Interrupt, check_before_run, run_in_folder
from furlong.run.python_arguments import Environments, Rewards, Rows, in_keywords, resolve_call, text_in_keywords
from furlong.run.signals import EXIT_CODES
from furlong.tools.run_diff import summarize
from furlong.tracking.run_files import EVENTS, METRICS, read_flags, read_intact_rows

if TYPE_CHECKING:
    from furlong.run.train_flags import TrainFlags  # pyright: ignore[reportMissingModuleSource]  a generated stub

T = TypeVar("T")
_TRAINING = threading.Lock()  # a run seeds and logs for the whole process
REFRESH_S = 2.0  # between two updates of a live display in a notebook
_EXIT_CODES = {f"by {reason}": code for reason, code in EXIT_CODES.items()}


class Run:
    """A run's folder, read again at every access: finished, failed or still running.

    Raises ConfigError if the folder does not exist.

    >>> Run("outputs/quickstart").rows[-1]["eval/held_out"]  # doctest: +SKIP
    0.97
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder}: no such directory; give the folder of a run (`output_dir`)")

    @property
    def model_path(self) -> Path:
        """The folder of the trained model, in Hugging Face format. Raises ConfigError if the run has not written it."""
        saved = self.flags.get("save_hf")
        steps = [row["step"] for row in self.rows]
        folder = Path(saved.replace("{rollout_id}", str(max(steps, default=0)))) if saved else self.folder / "model"
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{self.folder}: the run has not written its model to {folder}; see its log")
        return folder

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The records of `metrics.jsonl`: `step`, and metrics by name (None if not finite).

        One per step, numbered from 1; with evaluation sets also one of step 0, the evaluation before training.
        """
        return read_intact_rows(self.folder / METRICS, "step")[0]

    @property
    def metrics(self) -> Any:
        """The metrics as a pandas DataFrame (see `frame`), or `rows` if pandas is not installed."""
        return self.rows if _pandas() is None else self.frame()

    @property
    def flags(self) -> dict[str, Any]:
        """The resolved flags by field name. Raises ConfigError if the folder has no readable `config.json`."""
        return read_flags(self.folder)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the last start: 0 finished, 1 failed or stopped by a diagnosis, 130 Ctrl-C, 143 SIGTERM.

        129 is SIGHUP. None while the run is in progress, and if its process was killed.
        """
        for event in reversed(read_intact_rows(self.folder / EVENTS, "event")[0]):
            match event["event"]:
                case "end":
                    return 0
                case "failed":
                    return 1
                case "stopped":
                    return _EXIT_CODES.get(event.get("message", ""), 1)
                case "start":
                    return None
                case _:
                    continue
        return None

    def frame(self) -> Any:
        """Return the metrics as a pandas DataFrame, with a row per step, indexed by it, and NaN where not measured.

        Raises ConfigError if pandas is not installed.
        """
        pandas = _pandas()
        if pandas is None:
            raise ConfigError("Run.frame() needs pandas, which is not installed; pip install pandas, or read Run.rows")
        return pandas.DataFrame(self.rows or {"step": []}).set_index("step").astype(float)

    def _repr_html_(self) -> str:
        return run_html(self.folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"


def _pandas() -> Any | None:
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        return None


def configure(
    *,
    model: str | Path | None = None,
    prompt_data: Rows | None = None,
    reward: Rewards | None = None,
    environment: Environments | None = None,
    eval_data: Rows | Mapping[str, Rows] | None = None,
    **flags: Unpack[TrainFlags],
) -> Config:
    """Return the configuration that `train` would run with these arguments, with derived values; nothing is started.

    Raises ConfigError with every problem of the arguments. Data, functions and the machine are checked by `train`.

    >>> configure(model="model", prompt_data="sums.jsonl", learning_rate=1e-5)  # doctest: +SKIP
    ConfigError: keyword arguments: unknown key learning_rate; use lr
    """
    resolved, problems = resolve_call(
        model=model,
        prompt_data=prompt_data,
        reward=reward,
        environment=environment,
        eval_data=eval_data,
        flags=flags,
    )
    if problems:
        raise in_keywords(ConfigError(*problems))
    return resolved.config


def train(
    *,
    model: str | Path | None = None,
    prompt_data: Rows | None = None,
    reward: Rewards | None = None,
    environment: Environments | None = None,
    eval_data: Rows | Mapping[str, Rows] | None = None,
    on_step: Callable[[dict[str, Any]], object] | None = None,
    **flags: Unpack[TrainFlags],
) -> Run:
    """Train a model in this process, as `furlong train` does; returns the `Run` once training is complete.

    Args:
        model: A model folder, or the name of a model on the Hub. The flag `hf_checkpoint`.
        prompt_data: Rows of columns (a list of dicts, a data set of `datasets`, a data frame), a file, or the name of
            a data set on the Hub. Rows that are given as objects need no flags: the prompt is the column `prompt` (or
            `input`, `messages`, `question`, `problem`), the label `label` (or `answer`, `ground_truth`, `solution`, and
            for SFT `completion`), and other columns are metadata. Lists of messages are rendered with the chat
            template.
        reward: A function such as `def reward(response, label)`, several whose sum is the reward, the name of a
            verifier ("math"), or `file.py:function`. Called in worker processes.
        environment: A class with `reset` and `step`, or several, in place of single responses.
        eval_data: Rows as for `prompt_data`, or several sets by name.
        on_step: Called after every step with its record: `step`, and metrics by name. The run ends after a step for
            which it returns False. An exception ends the run.
        flags: The flags of `furlong train` with underscores. A function or class is accepted where a flag has its
            path. `config` and `custom_config_path` name YAML files.

    Without flags, the run makes one pass over the prompts, 32 per rollout, with responses of up to 512 tokens.
    Preflight, run folder and log are those of the command. If an event loop is already running, as in a notebook,
    training runs in a separate thread and this call blocks. A notebook's cell shows a table, which is updated while
    the run is in progress. The global random generators of Python, NumPy and PyTorch are seeded with `seed` (1234), in
    this process too.

    Raises the errors that the command reports, without the frames of furlong: ConfigError with every problem before
    anything is written, other FurlongErrors, KeyboardInterrupt after Ctrl-C, SystemExit with code 143 after SIGTERM.
    """
    if not _TRAINING.acquire(blocking=False):
        raise ConfigError(
            "furlong.train is already running in this process; wait until it returns, or use another process"
        )
    try:
        if on_step is not None and not callable(on_step):
            raise ConfigError(f"on_step: got {on_step!r}, expected a function of the step's record")
        if on_step is not None:
            _check_takes_one(on_step)
        resolved, problems = resolve_call(
            model=model,
            prompt_data=prompt_data,
            reward=reward,
            environment=environment,
            eval_data=eval_data,
            flags=flags,
        )
        findings = [
            dataclasses.replace(
                each, **{part: text_in_keywords(getattr(each, part)) for part in ("finding", "cause", "remedy")}
            )
            for each in _outside_of_loop(lambda: check_before_run(resolved, problems))
        ]
        folder, interrupt = run_folder(resolved), Interrupt()

        def start() -> int:
            return run_in_folder(folder, resolved, findings, interrupt, on_step=on_step)

        if _is_loop_running():
            _call_in_thread(start, interrupt, open_display(folder, resolved.config.data.num_rollout))
        else:
            start()
    except FurlongError as error:
        raise in_keywords(error).with_traceback(None) from None
    except (KeyboardInterrupt, SystemExit) as error:
        raise error.with_traceback(None) from None
    finally:
        _TRAINING.release()
    return Run(folder)


def _check_takes_one(on_step: Callable[..., object]) -> None:
    if is_async(on_step):
        raise ConfigError("on_step is an async function, and would not be awaited; write it with def")
    try:
        inspect.signature(on_step).bind({})
    except TypeError as error:
        raise ConfigError(f"on_step: {error}; it is called with one argument, the step's record") from None
    except ValueError:
        return  # a builtin without a signature


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _outside_of_loop(call: Callable[[], T]) -> T:
    """Call a function, in another thread if an event loop runs in this one: it may run its own loop."""
    if not _is_loop_running():
        return call()
    with ThreadPoolExecutor(1, "furlong-check") as pool:
        return pool.submit(call).result()


def _call_in_thread(start: Callable[[], int], interrupt: Interrupt, display: LiveDisplay | None) -> None:
    """Call `start` in a new thread and wait for it. Ctrl-C and SIGTERM end the run, then raise their exception.

    display: updated meanwhile, and at the end.
    """
    ended: Future[int] = Future()

    def call() -> None:
        try:
            ended.set_result(start())
        except BaseException as error:  # noqa: BLE001  raised again in the calling thread
            ended.set_exception(error)

    thread = threading.Thread(target=call, name="furlong-train")
    with _signals_raise():
        thread.start()
        try:
            while display is not None and not wait([ended], REFRESH_S).done:
                display.refresh()
            ended.result()
        except (KeyboardInterrupt, SystemExit) as error:
            interrupt.request("Ctrl-C" if isinstance(error, KeyboardInterrupt) else "SIGTERM")
            raise
        finally:
            thread.join()
            if display is not None:
                display.refresh()


@contextlib.contextmanager
def _signals_raise() -> Generator[None]:
    """Raise KeyboardInterrupt on SIGINT and SystemExit on SIGTERM; asyncio would defer the first one."""

    def terminate(number: int, frame: object) -> None:  # noqa: ARG001  signature of signal handlers
        raise SystemExit(EXIT_CODES["SIGTERM"])

    if threading.current_thread() is not threading.main_thread():  # no other thread may handle signals
        yield
        return
    handlers: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_html(folder: Path, *, num_steps: int | None = None) -> str:
    """Return a table of a run's numbers as HTML, in which names are escaped."""
    summary = summarize(folder)
    cells = {"run": summary.name, "step": f"{summary.num_steps}{f' of {num_steps}' if num_steps else ''}"}
    if summary.reward is not None:
        cells["reward"] = f"{summary.reward[0]:.3f} to {summary.reward[1]:.3f}"
    for name, (first, best, step) in summary.evaluations.items():
        cells[f"eval {name}"] = f"{first:.3f} at first, best {best:.3f} at step {step}"
    if summary.step_s is not None:
        cells["s/step"] = f"{summary.step_s:.2f}"
    if summary.diagnoses:
        cells["diagnoses"] = ", ".join(summary.diagnoses)
    heads = "".join(f"<th>{escape(name)}</th>" for name in cells)
    values = "".join(f"<td>{escape(value)}</td>" for value in cells.values())
    return f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{values}</tr></tbody></table>"


class LiveDisplay:
    """The output of a notebook cell that shows a run in progress. `refresh` is called from the cell's thread."""

    def __init__(self, folder: Path, num_steps: int | None, show: Callable[..., Any]) -> None:
        self._folder, self._num_steps = folder, num_steps
        self._handle: Any = show(self._content(), raw=True, display_id=True)
        self._stamp = ""

    def refresh(self) -> None:
        """Update the output if the run has recorded something new."""
        content = self._content()
        if (html := content["text/html"]) != self._stamp:
            self._stamp = html
            self._handle.update(content, raw=True)

    def _content(self) -> dict[str, str]:
        return {"text/html": run_html(self._folder, num_steps=self._num_steps), "text/plain": str(self._folder)}


def open_display(folder: Path, num_steps: int | None) -> LiveDisplay | None:
    """Return the display of a run; None outside of notebooks. IPython is not imported: a notebook has it."""
    ipython: Any = sys.modules.get("IPython")
    if ipython is None:
        return None
    shell: Any = ipython.get_ipython()
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    return LiveDisplay(folder, num_steps, ipython.display.display)
