"""The run page in a real browser. The tests are skipped where no Chromium is installed; they install nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from browser import find_chromium, open_browser
from recorded_runs import HOSTILE, START, write_run, write_sft_run

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine; Debian has it as the package chromium"),
]
VIEWS = ("runs", "overview", "samples", "evaluations", "groups", "timeline", "config")
READY = "!!document.querySelector('nav a[aria-current]') && document.querySelector('main').children.length > 0"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    assert CHROMIUM is not None
    with open_browser(tmp_path_factory.mktemp("profile"), CHROMIUM) as browser:
        yield browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    batches = str(folder / "first" / "train" / "{rollout_id}.safetensors")
    return [
        write_run(folder / "first", ended="", save_debug_train_data=batches),
        write_run(folder / "second", lr=5e-5, num_steps=3),
        write_sft_run(folder / "demonstrations"),
    ]


@pytest.fixture(scope="module")
def url(runs, tmp_path_factory):
    command = [sys.executable, "-m", "furlong", "view", *map(str, runs), "--no-browser"]  # agents are in the first
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0


def show(browser, view, condition="true"):
    """Open a view, with `?` and parameters. It is drawn again if it is the current one."""
    browser.evaluate(f"location.hash = '#{view}'")
    is_current = f"document.querySelector('nav a[aria-current]')?.hash.split('?')[0] === '#{view.split('?')[0]}'"
    browser.wait_for(f"{is_current} && ({condition})")


def check_no_damage(browser):
    """No error on the console or in a view, nothing beyond the edge of the screen, and no text became markup."""
    assert browser.errors == []
    assert browser.evaluate("document.querySelector('.problem')?.innerText ?? ''") == ""
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert browser.evaluate("document.title.includes('furlong') && !document.querySelector('img')")


@pytest.mark.commit
def test_no_view_of_any_run_shows_an_error(browser, url):
    browser.size(1400)
    browser.go(url, READY)
    assert "token" not in browser.evaluate("location.href")
    for run in ("first", "second", "demonstrations"):
        for view in VIEWS:
            show(browser, f"{view}?run={run}", "document.querySelector('main').innerText.length > 20")
            browser.wait_for(f"document.title.includes('{run}')")
            if view == "evaluations":
                expected = "has no evaluation" if run == "demonstrations" else "held"
                browser.wait_for(f"document.querySelector('main').innerText.includes('{expected}')")
            if view == "samples" and run != "demonstrations":
                browser.wait_for("!!document.querySelector('.detail .token')")
            check_no_damage(browser)


def test_views_fit_narrow_and_dark_screens(browser, url):
    browser.go(url, READY)
    browser.size(400)
    browser.dark(True)
    for view in VIEWS:
        show(browser, view, "document.querySelector('main').innerText.length > 20")
        check_no_damage(browser)
    browser.dark(False)


def test_runs_are_found_sorted_and_chosen(browser, url):
    names = "[...document.querySelectorAll('main tbody th')].map((cell) => cell.innerText)"
    browser.size(1400)
    browser.go(url, READY)
    show(browser, "runs", f"{names}.length === 3")
    browser.evaluate("[...document.querySelectorAll('.sort')].find((head) => head.innerText === 'Run').click()")
    assert browser.evaluate(names) == ["demonstrations", "first", "second"]
    browser.evaluate("[...document.querySelectorAll('.sort')].find((head) => head.innerText.startsWith('Run')).click()")
    assert browser.evaluate(names) == ["second", "first", "demonstrations"]
    browser.evaluate(
        "(search => { search.value = 'sft'; search.dispatchEvent(new Event('input')) })"
        "(document.querySelector('input[type=search]'))"
    )
    assert browser.evaluate(names) == ["demonstrations"]
    browser.evaluate("[...document.querySelectorAll('button')].find((button) => button.innerText === 'Clear').click()")
    assert browser.evaluate("document.querySelectorAll('main input:checked').length") == 0
    check_no_damage(browser)
    show(browser, "runs?run=first", f"{names}.length === 3")
    browser.evaluate("[...document.querySelectorAll('main input:checked')].at(-1).click()")
    show(browser, "overview?run=first&runs=first", "document.querySelectorAll('.chip').length === 1")
    browser.evaluate("history.back()")
    browser.wait_for("document.querySelectorAll('main input:checked').length === 2")


def test_the_address_has_the_run_the_view_the_filters_and_the_sample(browser, url):
    browser.size(1400)
    browser.go(url, READY)
    show(browser, "samples?run=second&reward_max=0", "document.querySelectorAll('.samples tbody tr').length === 5")
    browser.wait_for("location.hash.includes('file=')")
    browser.press("j")
    browser.wait_for("document.querySelector('.samples tr.open')?.rowIndex === 2 && location.hash.includes('pos=2')")
    address = browser.evaluate("location.href")
    browser.go("about:blank")
    browser.go(address, READY)
    browser.wait_for("document.querySelector('.samples tr.open')?.rowIndex === 2")
    assert browser.evaluate("document.querySelectorAll('.samples tbody tr').length") == 5
    assert browser.evaluate("document.querySelector('.chip[aria-pressed=true]').innerText").startswith("second")
    show(browser, "overview?run=second&x=tokens&log=1", "document.querySelectorAll('.chart canvas').length > 3")
    assert browser.evaluate("document.querySelectorAll('.filters select')[1].value") == "tokens"
    show(
        browser,
        "overview?run=second&x=hours&log=1",
        "!!document.querySelector('[aria-label$=\"by seconds of steps\"]')",
    )
    show(browser, "overview?run=none", "document.querySelector('main').innerText.includes('No run is named none')")
    check_no_damage(browser)
    show(browser, "samples?run=second&text=answer", "location.hash.includes('file=')")
    browser.evaluate(
        "(search => { search.value = 'nothing'; search.dispatchEvent(new Event('change')) })"
        "(document.querySelector('main input[type=search]'))"
    )
    browser.wait_for("location.hash.includes('text=nothing') && !location.hash.includes('file=')")


def test_charts_are_saved_as_files(browser, url, tmp_path):
    browser.go(url, READY)
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    show(browser, "overview", "document.querySelectorAll('.chart canvas').length > 3")
    browser.evaluate("document.querySelectorAll('.chart .save button').forEach((b, i) => { if (i < 2) b.click(); })")
    end = time.monotonic() + 60
    files = [tmp_path / f"rollout_raw_reward.{kind}" for kind in ("csv", "png")]
    while not all(path.is_file() and path.stat().st_size for path in files):
        assert time.monotonic() < end, list(tmp_path.iterdir())
        time.sleep(0.05)
    assert files[0].read_text().splitlines()[:3] == ["step,first,second,demonstrations", "0,,,", "1,0.2,0.2,"]
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_curves_of_both_runs_are_drawn(browser, url):
    browser.size(1400)
    browser.go(url, READY)
    show(browser, "overview", "document.querySelectorAll('.chart canvas').length > 3")
    values = browser.evaluate("[...document.querySelectorAll('.chart')][0].querySelector('.value').innerText")
    assert values.split() == ["first", "0.8", "second", "0.6", "demonstrations", "–"]
    browser.wait_for("document.querySelector('.diagnosis')?.innerText.includes('REW02')")
    assert browser.evaluate("document.querySelector('.diagnosis p:nth-of-type(2) code').textContent") == "a"


def test_texts_of_a_run_are_shown_and_not_run(browser, url):
    browser.go(url, READY)
    show(browser, "samples", "document.querySelectorAll('.samples tbody tr').length > 1")
    browser.wait_for("!!document.querySelector('.detail .token')")
    assert HOSTILE in browser.evaluate("document.querySelector('.samples').innerText")
    show(browser, "samples?step=1&group=0", "document.querySelectorAll('.branch').length === 2")
    assert HOSTILE in browser.evaluate("document.querySelector('.conversation').innerText")
    check_no_damage(browser)


def test_tokens_have_colors_and_values(browser, url):
    browser.go(url, READY)
    show(browser, "samples?text=answer", "document.querySelectorAll('.detail .token').length === 5")
    colors = browser.evaluate("[...document.querySelectorAll('.token')].map((t) => t.style.backgroundColor)")
    assert colors[:3] == ["", "", ""]
    assert colors[3] != colors[4] != ""
    browser.evaluate("document.querySelectorAll('.token')[4].click()")
    values = browser.evaluate("document.querySelector('.tokenline').innerText")
    assert "log-prob of the engine -2 " in values
    assert "log-prob of the trainer -1.95 · trainer - engine 0.05 · advantage -0.5 · entropy 1.5 " in values
    drawn = set()
    for fact in ("trainer", "difference", "advantage", "entropy", "mask", "version"):
        browser.evaluate(f"""(() => {{ const colors = [...document.querySelectorAll('.detail select')].at(-1);
            colors.value = '{fact}'; colors.dispatchEvent(new Event('change')); }})()""")
        drawn.add(browser.evaluate("document.querySelectorAll('.token')[4].style.backgroundColor"))
    assert len(drawn) == 6


def test_keys_switch_views_and_samples(browser, url):
    browser.go(url, READY)
    browser.press("2")
    browser.wait_for("location.hash.startsWith('#samples') && !!document.querySelector('.detail .token')")
    assert browser.evaluate("document.querySelector('.samples tr.open').rowIndex") == 1
    browser.press("j")
    browser.wait_for("document.querySelector('.samples tr.open')?.rowIndex === 2")
    browser.press("?")
    browser.wait_for("!!document.querySelector('dialog[open]')")
    browser.evaluate("document.querySelector('dialog').close()")
    browser.wait_for("!document.querySelector('dialog')")
    browser.press("t")
    browser.wait_for("!!document.documentElement.dataset.theme")


def test_flags_that_differ_between_runs_are_shown(browser, url):
    browser.go(url, READY)
    show(browser, "config", "!!document.querySelector('.config')")
    text = browser.evaluate("[...document.querySelectorAll('tr.different')].map((row) => row.innerText).join('\\n')")
    assert "--lr" in text
    assert "second: 0.00005" in text


def test_new_steps_appear_without_a_reload(browser, url, runs):
    browser.go(url, READY)
    show(browser, "overview", "document.querySelectorAll('.chart canvas').length > 3")
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "rollout/raw_reward": 0.99}\n')
    browser.wait_for("document.querySelector('.chart .value').innerText.includes('0.99')")
    with (runs[0] / "events.jsonl").open("a") as file:
        file.write('{"event": "failed", "error": "DataError", "message": "row 0 has no `label`"}\n')
    browser.wait_for("document.querySelector('.diagnosis.error')?.innerText.includes('row 0 has no `label`')")
    assert browser.errors == []


def test_an_exported_page_needs_no_server(browser, runs, tmp_path, monkeypatch):
    from furlong.view.page_file import write_page
    from furlong.view.run_reader import open_runs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_page(open_runs(runs), tmp_path / "page.html")
    browser.size(1400)
    browser.go(f"file://{tmp_path}/page.html", READY)
    for view in VIEWS:
        show(browser, view, "document.querySelector('main').innerText.length > 20")
        check_no_damage(browser)
    show(browser, "samples?text=answer", "document.querySelectorAll('.detail .token').length === 5")
    many = [write_run(tmp_path / f"run{i}", num_steps=1, saves_samples=False) for i in range(9)]
    with (many[-1] / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": START + 60, "event": "start"}) + "\n")
    write_page(open_runs(many), tmp_path / "many.html")
    browser.go(f"file://{tmp_path}/many.html#runs", READY)
    browser.wait_for("document.querySelector('main tbody th')?.innerText === 'run8'")
    assert browser.evaluate("[...document.querySelectorAll('.chip')].length") == 8
    assert browser.evaluate("document.querySelector('.chip').innerText").startswith("run8")
