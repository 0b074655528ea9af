"""Tests of `ckpt report -o`: a self-contained page about any run."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import nn

import ckpt
from accounts import WALL, account, died, invoke, run, seen, write
from ckpt.core.cadence.ledger import (
    MOST_LANDED,
    Account,
    Decision,
    End,
    LandedSave,
    SaveTotals,
    stall_bucket,
    thinned,
)
from ckpt.errors import NoCheckpointError
from ckpt.guard.report import Fault, SavedStep
from ckpt.tools.observe.goodput.accounting import settled
from ckpt.tools.observe.report import style
from ckpt.tools.observe.report.chronicle import chronicle
from ckpt.tools.observe.report.page import Subject, page
from processes import REPO
from run_files import INDEX, MANIFEST, checkpoint_files

__all__ = ["run"]  # a fixture

EVIL = "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'>\"&\u2028</script>\u202e]]>-->"
TIERS = ("file:///run", "s3://bucket/run")


def rich(number: int, born: float, first: int = 1, steps: int = 60, **given: Any) -> Account:
    """Return an account of a job attempt with all kinds of events, as the current version writes it."""
    found = account(number, born, first, steps, of=f"{number - 1}.abc" if number > 1 else "", **given)
    begin = found.rows[0].at
    found.host, found.world, found.pid = "node7", 4, 1234
    found.rows = [replace(row, stalled=0.004, slowed=0.01, saves=1) for row in found.rows]
    found.saves = {url: SaveTotals(6, 1, 6.0, 3.0, 6000, 600) for url in TIERS}
    found.stalls = {stall_bucket(0.001 * 2**n): 10 + n for n in range(6)}
    found.landed = [
        LandedSave(TIERS[n % 2], begin + 4.0 * n, first + 4 * n, 0.5 + 3 * (n % 2), n % 3, 1000, 400, n == 5)
        for n in range(12)
    ]
    found.decisions = [
        Decision(
            first + n, {TIERS[0]: 10 + n, "memory": 1}, {TIERS[0]: "a save costs 0.2 s"}, {TIERS[0]: 0.2}, at=begin + n
        )
        for n in range(3)
    ]
    found.versions = {"everystep": "0.1.0", "torch": "2.13.0"}
    if number > 1:
        found.restores = [replace(found.restores[0], repaired=2, passed_over=1, why="step 9 in s3://b: damaged")]
    return found


def history() -> tuple[list[Account], list[Fault]]:
    one = died(rich(1, 0.0, faults=[seen(65.0)]), 3.0)
    two = died(rich(2, 90.0, 51), 1.0)
    three = died(rich(3, 180.0, 101), how="closed")
    fault = Fault("oom", "rank 2 ran out of memory", rank=2, world=4, host="node7", term="2.abc", exit_code=1)
    fault.time = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(WALL + two.beat + 0.9))
    fault.steps, fault.saved = (
        {"2": 110},
        [SavedStep(110, TIERS[0], "live", 1.5), SavedStep(110, TIERS[1], "live", 1.5, "gone")],
    )
    return [one, two, three], [fault]


def subject(accounts: list[Account], faults: list[Fault] | None = None, **given: Any) -> Subject:
    now = given.pop("now", WALL + 1e6)
    run = settled(accounts, faults or [], now=now)
    facts = {"stored": (80, 160), "made": now, "version": "0.1.0", **given}
    return Subject("file:///run", run.statement, chronicle(run, faults or []), **facts)


class Seen(HTMLParser):
    """Parses a page into tags and text, like a browser."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def every(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def looked_at(text: str) -> Seen:
    """Parse a page after checks for every page: one script, one style, no event handlers, no external content."""
    found = Seen(text)
    assert len(found.every("script")) == len(found.every("style")) == 1
    known = {"html", "head", "meta", "title", "style", "body", "main", "script", "div", "section", "header", "footer"}
    known |= {"h1", "h2", "h3", "p", "span", "ul", "li", "dl", "dt", "dd", "small", "details", "summary", "svg", "rect"}
    known |= {"table", "thead", "tbody", "tr", "th", "td", "text", "line", "circle", "path"}
    assert {tag for tag, _ in found.tags} <= known
    for _, attributes in found.tags:
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "href", "style", "action")}
    rest = text.replace(style.STYLE, "").replace(style.SCRIPT, "")
    assert not re.search(r"@import|url\(|javascript:", style.STYLE + style.SCRIPT)
    assert "<!--" not in rest and "\u2028" not in rest and "\u202e" not in rest
    return found


# -- the content --


def test_page_has_every_part_of_a_run() -> None:
    """Every chart has a size, a text alternative, and keyboard access."""
    found = looked_at(page(subject(*history())))
    for text in (
        "Where the time went", "Timeline", "How long training waited", "How long a save took to be durable",
        "Interruptions", "Faults", "Restores",
        "Save intervals", "rank 2 ran out of memory",
        "step 110 in file:///run", "not in s3://bucket/run: gone", "a save costs 0.2 s",
        "step 9 in s3://b: damaged", "torch 2.13.0", "4 ranks", "starts 3", "closed",
    ):  # fmt: skip
        assert text in found.text, text
    pictures = [one for one in found.every("svg") if "area" in (one.get("class") or "")]
    assert len(pictures) >= 4
    for one in pictures:
        assert one["role"] == "img" and one["tabindex"] == "0" and len(one["aria-label"] or "") > 20
        assert one["width"] == "100%" and float(one["height"] or 0) > 0
    for tag, attributes in found.tags:  # no element without a position, and no NaN
        for name in ("x", "y", "width", "height", "cx", "cy", "x1", "x2", "d"):
            assert not re.search("nan|inf|e[-+]", attributes.get(name) or "", re.I), (tag, attributes)


def test_bar_adds_up_to_wall_clock() -> None:
    accounts, faults = history()
    one = subject(accounts, faults)
    found = one.statement
    parts = {"trained": found.productive_s, "saving": found.saving_s, "restart": found.cost.restart}
    parts |= {"recompute": found.cost.recompute, "restore": found.cost.restore, "perceive": found.cost.perceive}
    seen = looked_at(page(one))
    cells = [r for r in seen.every("rect") if (r["class"] or "").endswith(" cell")]
    first = list(itertools.takewhile(lambda r: r is cells[0] or r["x"] != "0%", cells))
    widths = {(r["class"] or "").split()[0]: float((r["width"] or "").rstrip("%")) for r in first}
    assert sum(widths.values()) == pytest.approx(100, abs=0.1)
    for name, seconds in parts.items():
        assert widths[name] == pytest.approx(100 * seconds / found.wall_s, abs=0.02)


@pytest.mark.parametrize(
    ("accounts", "words"),
    [
        ([account(1, 100.0, steps=0)], "steps 0"),
        ([account(1, 100.0)], "none in"),
        ([account(1, 100.0, kept=112.0)], "running"),
        ([died(account(1, 100.0))], "ended (crash or kill)"),
        ([replace(account(1, 100.0), end=End("closed", 114.5, 115.0))], "closed"),
        ([replace(account(1, 100.0), boot="", anchor=(-1e11 + 1, 0.0))], "wall-clock"),
    ],
)
def test_page_of_run_with_few_events(accounts: list[Account], words: str) -> None:
    """The page states it; older accounts without data about single saves get a page too."""
    found = looked_at(page(subject(accounts, stored=(), now=WALL + 115)))
    assert words in found.text


def test_hostile_text_is_never_markup() -> None:
    accounts, faults = history()
    for one in accounts:
        one.host, one.url, one.versions = EVIL, EVIL, {EVIL: EVIL}
        one.restores = [replace(r, source=EVIL, why=EVIL) for r in one.restores]
        one.landed = [replace(landed, url=EVIL) for landed in one.landed]
        one.decisions = [replace(d, every={EVIL: 5}, why={EVIL: EVIL}, costs={EVIL: 1.0}) for d in one.decisions]
        one.faults = [replace(each, kind=EVIL, summary=EVIL) for each in one.faults]
    faults[0].kind = faults[0].summary = faults[0].host = faults[0].advice = EVIL
    faults[0].saved = [SavedStep(1, EVIL, EVIL, 1.0, ""), SavedStep(1, EVIL, EVIL, 1.0, EVIL)]
    one = replace(subject(accounts, faults, problems=(EVIL,)), url=EVIL)
    text = page(one)
    found = looked_at(text)
    assert "<script>window.hacked=1</script>" in found.text and "\\u2028" in found.text
    assert len(text.encode()) < 500_000
    label = html.escape(EVIL.split("\u2028")[0], quote=True)
    assert label in text
    bad = text.replace("&lt;script&gt;", "<script>", 1)  # a negative control of the check
    with pytest.raises(AssertionError):
        looked_at(bad)


def test_page_policy_allows_only_its_script_and_style() -> None:
    """They are allowed by digest, and nothing may be fetched."""
    text = page(subject(*history()))
    policy = next(m["content"] for m in Seen(text).every("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert text.index("Content-Security-Policy") < text.index("<style>") < text.index("<script>")


def many(count: int) -> list[Account]:
    """Return this many job attempts, with a million steps in total."""
    found, born, first = [], 0.0, 1
    for number in range(1, count + 1):
        one = rich(number, born, first, 150)
        one.rows = [replace(row, step=first + 16 * n + 15, steps=16) for n, row in enumerate(one.rows)]
        one.step, one.faults = one.rows[-1].step, [seen(one.beat + 0.2)]
        found.append(died(one))
        born, first = one.beat + 30, one.step - 20
    return found


def test_page_of_long_run_stays_small() -> None:
    """500 job attempts and a million steps are aggregated below 2 MB; shortened tables have a note."""
    one = subject(many(500), now=WALL + 500 * 700)
    assert one.statement.steps > 1_000_000 and one.statement.count == 500
    text = page(one)
    assert len(text.encode()) < 2_000_000
    found = looked_at(text)
    assert "The newest 100 of 500 are shown" in found.text and "85 earlier ones" in found.text
    assert len(one.chronicle.curve) < 5000


# -- the data --


def test_ledger_keeps_sample_of_saves_per_tier() -> None:
    """However many there were, they are bounded and spread over the whole time and all tiers, and can be read back."""
    landed: list[LandedSave] = []
    for n in range(10_000):
        landed = thinned([*landed, LandedSave(TIERS[n % 10 == 0], float(n), n, 0.5)])
        assert len(landed) <= MOST_LANDED
    assert (landed[0].step, landed[-1].step) == (0, 9_999)
    assert [one.step for one in landed] == sorted(one.step for one in landed)
    for url in TIERS:
        steps = [one.step for one in landed if one.url == url]
        assert len(steps) > 100 and max(b - a for a, b in itertools.pairwise(steps)) < 400
    one = replace(rich(1, 0.0), landed=landed)
    again = Account.from_bytes(one.to_bytes())
    assert (again.landed, again.stalls, again.versions) == (landed, one.stalls, one.versions)
    assert len(one.to_bytes()) < 100_000


# -- the command --


def test_report_command_writes_all_or_nothing(run: Path, tmp_path: Path) -> None:
    """An existing file is kept unless --force is given. No temporary file is left. - is stdout."""
    write(run, died(rich(1, 0.0)), rich(2, 90.0, 51))
    target = tmp_path / "out" / "report.html"
    with pytest.raises(click.UsageError, match=r"cannot write .*: No such file"):
        raise invoke(run, "-o", target).exception
    target.parent.mkdir()
    result = invoke(run, "-o", target)
    assert result.return_value == 0 and "wrote" in result.stderr and not result.stdout
    text = target.read_text()
    assert "everystep 0.1.0" in looked_at(text).text and f"file://{run}" in text
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~mask
    target.write_text("mine")
    with pytest.raises(click.UsageError, match="exists: give another name"):
        raise invoke(run, "-o", target).exception
    assert target.read_text() == "mine"
    assert invoke(run, "-o", target, "--force").return_value == 0 and "everystep" in target.read_text()
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]
    command = [sys.executable, "-m", "ckpt", "report", str(run), "-o", "-"]
    path = {"PYTHONPATH": f"{REPO}:{REPO / 'backends'}"}
    done = subprocess.run(command, capture_output=True, env={**os.environ, **path}, timeout=120, check=True)
    assert done.stdout.decode().startswith("<!doctype html>") and done.stdout.decode().endswith("</html>\n")
    with pytest.raises(click.UsageError, match="cannot be combined"):
        raise invoke(run, "-o", "-", "--json").exception
    assert json.loads(invoke(run, "--json").stdout)["count"] == 1  # as before


def test_report_replaces_only_regular_files(run: Path, tmp_path: Path) -> None:
    write(run, died(rich(1, 0.0)), rich(2, 90.0, 51))
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    file.write_text("mine")
    link.symlink_to(file)
    for target, more in ((pipe, ()), (pipe, ("--force",)), (link, ())):
        with pytest.raises(click.UsageError, match="exists: give another name"):
            raise invoke(run, "-o", target, *more).exception
    assert stat.S_ISFIFO(pipe.lstat().st_mode) and file.read_text() == "mine"
    assert invoke(run, "-o", link, "--force").return_value == 0
    assert link.is_symlink() and "everystep" in file.read_text()
    assert sorted(path.name for path in tmp_path.iterdir() if path != run) == ["file", "link", "pipe"]


def test_page_of_damaged_run_reports_damage(run: Path, tmp_path: Path) -> None:
    """This covers truncated ledgers, a missing ledger and an unreadable checkpoint. Other folders get no page."""
    none = tmp_path / "none.html"
    assert invoke(run, "-o", none).return_value == 0
    found = looked_at(none.read_text())
    assert "has no run metrics" in found.text and "1: step 1" in found.text

    write(run, died(rich(1, 0.0)), rich(2, 90.0, 51))
    (cut,) = (run / "ledger").glob("2.*")
    cut.write_bytes(cut.read_bytes()[:-40])
    for path in checkpoint_files(run, MANIFEST, INDEX):
        path.unlink()
    (run / "faults").mkdir(exist_ok=True)
    (run / "faults" / "20300101T000000000000.0.json").write_text("{")
    damaged = tmp_path / "damaged.html"
    assert invoke(run, "-o", damaged).return_value == 1
    found = looked_at(damaged.read_text())
    for text in (
        "2.abc.0.json is damaged",
        "20300101T000000000000.0.json is damaged",
        "starts 1",
    ):
        assert text in found.text, text

    for path in (run / "ledger").iterdir():
        path.write_bytes(b"{}")
    assert invoke(run, "-o", tmp_path / "all.html").return_value == 1
    assert "all run metrics" in looked_at((tmp_path / "all.html").read_text()).text
    with pytest.raises(NoCheckpointError):
        raise invoke(tmp_path / "nowhere", "-o", tmp_path / "no.html").exception
    assert not (tmp_path / "no.html").exists()


def test_page_of_a_real_run(run_dir: str, tmp_path: Path) -> None:
    """A page shows what a Checkpointer recorded: stalls, saves in two tiers, tensors with hostile names."""
    model = nn.Linear(16, 16)
    of = {"model": model, "optim": torch.optim.AdamW(model.parameters()), EVIL[:40]: torch.ones(5)}
    tiers = [ckpt.Tier(run_dir, every=2), ckpt.Tier(f"{run_dir}2", every=4)]
    with ckpt.Checkpointer(of, tiers) as cp:
        cp.restore(default=0)
        for step in range(1, 11):
            model(torch.randn(2, 16)).sum().backward()
            of["optim"].step()
            cp.step(step)
    assert invoke(run_dir, "-o", tmp_path / "page.html").return_value == 0
    found = looked_at((tmp_path / "page.html").read_text())
    for text in ("steps 10", f"file://{run_dir}2"):
        assert text in found.text, text
    assert "No data about single saves" not in found.text and f"torch {torch.__version__}" in found.text


# -- a browser --

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a browser that can only read files."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs chromium with its chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in (
        "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", "disable-dev-shm-usage", "proxy-server=127.0.0.1:9",
        f"user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):  # fmt: skip
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    yield driver
    driver.quit()


def show(browser: Any, path: Path, width: int = 1400, scheme: str = "light") -> None:
    browser.get_log("browser")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(path.as_uri())


def evil() -> Subject:
    accounts, faults = history()
    for one in accounts:
        one.host, one.faults = EVIL, [replace(each, summary=EVIL) for each in one.faults]
        one.restores = [replace(r, why=EVIL) for r in one.restores]
    faults[0].summary = EVIL
    return replace(subject(accounts, faults, problems=(EVIL,)), url=EVIL)


def test_browser_draws_page_without_running_content(browser: Any, tmp_path: Path) -> None:
    """The console is empty, nothing is fetched, every chart has a size, and hostile names stay text."""
    path = tmp_path / "page.html"
    path.write_text(page(evil()))
    show(browser, path)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return typeof window.hacked") == "undefined"
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    sizes = browser.execute_script(
        "return Array.from(document.querySelectorAll('svg.area')).map(e => {"
        " const r = e.getBoundingClientRect();"
        " return [r.width, r.height, e.querySelectorAll('rect,path,circle').length]})"
    )
    assert len(sizes) >= 8 and all(width > 200 and height > 20 and marks > 0 for width, height, marks in sizes)
    drawn = browser.execute_script(
        "return Array.from(document.querySelectorAll('svg.area rect')).filter(e =>"
        " e.getBoundingClientRect().width > 0"
        " && getComputedStyle(e).fill !== 'rgb(0, 0, 0)').length"
    )
    assert drawn > 50  # with colors of the style
    assert "<script>window.hacked=1</script>" in browser.execute_script("return document.body.innerText")


def test_negative_control_browser_runs_unescaped_script(browser: Any, tmp_path: Path) -> None:
    """Raw text becomes markup. The page's policy still prevents its execution; without it, the check above fails."""
    text = page(subject(*history()))
    bad = text.replace("<footer>", "<script>window.hacked=1</script><footer>")
    path = tmp_path / "page.html"
    path.write_text(bad)
    show(browser, path)
    assert browser.execute_script("return typeof window.hacked") == "undefined"
    assert any("Content Security Policy" in entry["message"] for entry in browser.get_log("browser"))
    path.write_text(bad.replace("Content-Security-Policy", "X-No-Policy"))
    show(browser, path)
    assert browser.execute_script("return window.hacked") == 1
