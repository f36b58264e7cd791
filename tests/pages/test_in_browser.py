"""The pages in a real Chromium: drawn without a network, for mouse, keyboard and screen reader, and up to date."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from partwise.pages.follow_run import FolderFollower
from partwise.pages.live_server import LivePage, LiveServer
from partwise.pages.report import report
from partwise.runs.folder import Folder
from partwise.runs.lock import has_writer

EVIL = "<img src=x onerror=document.title='evil'>"
INK = """(() => { // of the canvas of a chart: how many pixels have each colour of a group
    const canvas = document.querySelector('[data-chart="training"] canvas'), seen = {};
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    const channel = (hex, k) => parseInt(hex.slice(2 * k + 1, 2 * k + 3), 16);
    const near = (at, hex) => [0, 1, 2].every((k) => Math.abs(channel(hex, k) - data[at + k]) < 9);
    for (const place of [0, 1]) {
        const hex = getComputedStyle(document.documentElement).getPropertyValue(`--c${place}`).trim();
        seen[place] = 0;
        for (let at = 0; at < data.length; at += 4) seen[place] += data[at + 3] > 200 && near(at, hex);
    }
    return seen;
})()"""
READOUT = "document.querySelector('[data-chart=\"training\"] .readout').textContent"
CONTRAST = """(() => { // the least contrast of any text with what is behind it
    const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const shares = [0.2126, 0.7152, 0.0722];
    const light = (rgb) => shares.reduce((sum, share, i) => sum + share * linear(rgb[i] / 255), 0);
    const behind = (node) => {
        const color = parse(getComputedStyle(node).backgroundColor);
        return color.length === 3 || color[3] === 1 ? color : behind(node.parentElement);
    };
    let least = [99, ''];
    for (const node of document.querySelectorAll('main *, header *, footer')) {
        const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.textContent.trim());
        if (!own || node.closest('svg') || !node.offsetParent) continue;
        const pair = [light(parse(getComputedStyle(node).color)), light(behind(node))];
        const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
        if (ratio < least[0]) least = [ratio, node.outerHTML.slice(0, 80)];
    }
    return least;
})()"""
FOCUSED = """(() => {
    const here = document.activeElement, style = getComputedStyle(here);
    return [here.className || here.id || here.dataset.zoom || here.tagName, style.outlineStyle, style.outlineWidth];
})()"""


@pytest.fixture(scope="module")
def file(runs, tmp_path_factory):
    """The URL of a report on two groups of runs, one of which has an evil name."""
    folder = tmp_path_factory.mktemp("report")
    evil = shutil.copytree(runs["private"], folder / EVIL)
    plain = [runs[f"plain-{seed}"] for seed in range(3)]
    return f"file://{report([*plain, evil], folder / 'report.html')}"


@pytest.fixture(scope="module")
def page(chromium, file):
    return chromium.open(file, offline=True)


@pytest.fixture(autouse=True)
def as_it_was(request):
    """All of a chart, all groups, no mouse."""
    if "page" in request.fixturenames:
        page = request.getfixturevalue("page")
        page.show(offline=True)
        page.run(
            "document.querySelectorAll('[data-group][aria-pressed=false]').forEach((each) => each.click()); 0"
        )
        page.run("document.querySelectorAll('[data-zoom=all]').forEach((each) => each.click()); 0")
        page.mouse("Moved", 2, 2)


def place_of(page, selector):
    element = f"document.querySelector({json.dumps(selector)})"
    page.run(f"{element}.scrollIntoView({{block: 'center'}}); 0")
    box = page.run(f"(({{x, y, width, height}}) => [x, y, width, height])({element}.getBoundingClientRect())")
    return dict(zip(("x", "y", "width", "height"), box, strict=True))


def span(page):
    """The rounds that the chart of the training loss shows."""
    return page.run("document.querySelector('[data-chart=\"training\"]').dataset.span").split(" ")


def test_it_opens_without_a_network_and_without_complaints(page, file):
    assert page.requests() == [file]
    assert page.problems() == []
    assert page.run("document.title").startswith("fed_recon on planted")
    assert page.run("document.querySelectorAll('canvas').length") == page.run(
        "document.querySelectorAll('[data-chart]').length"
    )
    ink = page.run(INK)
    assert ink["0"] > 50
    assert ink["1"] > 50


def test_values_are_shown_where_the_mouse_is(page):
    assert "round" not in page.run(READOUT)
    box = place_of(page, '[data-chart="training"] .u-over')
    page.mouse("Moved", box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    told = page.run(READOUT)
    assert re.match(r"round 1[23]", told)
    assert re.search(r"plain \d+\.\d{4} \(\d+\.\d{4} to \d+\.\d{4}\)", told)
    assert EVIL in told


def test_groups_can_be_hidden(page):
    page.run("document.querySelector('[data-group=\"0\"]').click(); 0")
    assert page.run("document.querySelector('[data-group=\"0\"]').getAttribute('aria-pressed')") == "false"
    page.wait(f"{INK}[0] === 0")
    assert page.run(INK)["1"] > 50
    assert "plain" not in page.run(READOUT)
    page.run("document.querySelector('[data-group=\"0\"]').click(); 0")
    page.wait(f"{INK}[0] > 50")


def test_a_stretch_is_chosen_with_the_mouse_the_buttons_and_the_keys(page):
    assert span(page) == ["1", "24"]
    box = place_of(page, '[data-chart="training"] .u-over')
    middle = box["y"] + box["height"] / 2
    left, right = (box["x"] + share * box["width"] for share in (0.25, 0.75))
    page.mouse("Pressed", left, middle, pressed=True)
    for x in (left + 20, right):
        page.mouse("Moved", x, middle, pressed=True)
    page.mouse("Released", right, middle)
    page.wait("document.querySelector('[data-chart=\"training\"]').dataset.span !== '1 24'")
    low, high = map(float, span(page))
    assert 5 < low < 9
    assert 16 < high < 20
    page.run("document.querySelector('[data-chart=\"training\"] [data-zoom=all]').click(); 0")
    page.wait("document.querySelector('[data-chart=\"training\"]').dataset.span === '1 24'")
    page.run("document.querySelector('[data-chart=\"training\"] .plot').focus(); 0")
    page.press("+")
    page.wait("document.querySelector('[data-chart=\"training\"]').dataset.span === '6.75 18.25'")
    page.press("ArrowRight")
    first = page.run(READOUT)
    page.press("ArrowRight")
    assert first.startswith("round ")
    assert page.run(READOUT) != first


def test_dark_and_light(chromium, file):
    page = chromium.open(file, dark=True)
    paper = lambda: page.run("getComputedStyle(document.body).backgroundColor")
    dark = paper()
    assert page.text("theme") == "Light"  # what it makes of the page
    assert page.run(INK)["0"] > 50
    assert page.run(CONTRAST)[0] >= 4.5
    page.click("theme")
    assert paper() != dark
    page.wait(f"{INK}[0] > 50")
    page.click("theme")
    assert paper() == dark
    assert page.problems() == []


@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_and_can_be_read(page, width):
    page.show(width, 800, offline=True)
    page.wait(f"innerWidth === {width}")
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; }); 0")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    ratio, where = page.run(CONTRAST)
    assert ratio >= 4.5, where
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = false; }); 0")


def test_the_keyboard_reaches_everything(chromium, file):
    page = chromium.open(file)
    reached = []
    for _ in range(24):
        page.press("Tab")
        name, *outline = page.run(FOCUSED)
        assert (name, outline) == (name, ["solid", "2px"])
        reached.append(name)
    assert reached[:4] == ["skip", "theme", "chip", "chip"]
    assert {"in", "out", "all", "plot", "SUMMARY"} <= set(reached)
    page.run("document.getElementById('theme').focus(); 0")
    before = page.run("getComputedStyle(document.body).backgroundColor")
    page.press("Enter")
    assert page.run("getComputedStyle(document.body).backgroundColor") != before
    page.press("Enter")


def test_a_screen_reader_is_told_everything(page):
    tree = page.tree()
    named = lambda role: [name for each, name in tree if each == role]
    assert named("main")
    assert named("banner")
    assert named("contentinfo")
    assert named("navigation") == ["Runs that the charts show"]
    assert {"fed_recon on planted", "Learning", "Validation rmse", "Privacy", "Settings"} <= set(
        named("heading")
    )
    assert "Metrics of the test clients, over all their examples" in named("table")
    assert all(named("button"))
    charts = [name for role, name in tree if role in ("image", "img") and "Arrow keys" in name]
    folded = page.run("document.querySelectorAll('details:not([open]) [data-chart]').length")
    assert len(charts) == page.run("document.querySelectorAll('[data-chart]').length") - folded > 3
    page.run("document.querySelector('[data-chart=\"training\"] details').open = true; 0")
    assert any(
        name.startswith("Training loss") for name in [name for role, name in page.tree() if role == "table"]
    )


def test_a_live_page_shows_what_is_new_without_loading_again(chromium, copy):
    folder = Folder(copy("plain-0", EVIL))
    records = folder.records()
    (folder.path / "summary.json").rename(folder.path / "kept.json")
    folder.replace_records(records[:4])
    server = LiveServer(LivePage(FolderFollower(folder.path)))
    try:
        page = chromium.open(server.url)
        page.run("window.sameLoad = true; 0")
        page.wait("document.querySelector('.facts dd').textContent === '4 of 24'")
        assert page.run("document.querySelectorAll('[data-chart]').length") == 1  # nothing was evaluated yet
        folder.append(records[4:15])
        page.wait("document.querySelector('.facts dd').textContent === '15 of 24'")
        page.wait("document.querySelector('[data-chart=\"training\"]').dataset.span === '1 15'")
        page.wait("document.querySelectorAll('[data-chart]').length === 5")
        page.run("document.querySelector('[data-chart=\"training\"] details').open = true; 0")
        folder.append(records[15:])
        page.wait("document.querySelector('[data-chart=\"training\"]').dataset.span === '1 24'")
        assert page.run("document.querySelector('[data-chart=\"training\"] details').open")
        (folder.path / "kept.json").rename(folder.path / "summary.json")
        page.wait("document.querySelector('.state').textContent.startsWith('finished')")
        page.wait("document.getElementById('tests') !== null")
        assert page.run("window.sameLoad")
        assert page.run("document.querySelector('img')") is None
        assert page.problems() == []
    finally:
        server.close()
    page.wait("document.querySelector('.state').textContent.includes('has ended')")


def test_a_run_is_watched_while_it_trains(chromium, tmp_path):
    """The whole journey: `partwise train` and `partwise watch` in processes of their own."""
    given = {
        "data.num_clients": 200,
        "data.num_items": 60,
        "simulation.lanes": 2,
        "simulation.evaluate_every": 100,
    }
    sets = [f"--set={key}={value}" for key, value in given.items()]
    run = [sys.executable, "-m", "partwise.cli"]
    train = subprocess.Popen(
        [*run, "train", "planted", "--rounds", "600", "--out", "run", "--quiet", *sets],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ,
    )  # fmt: skip
    watch = None
    try:
        while not has_writer(tmp_path / "run") and train.poll() is None:
            time.sleep(0.02)
        watch = subprocess.Popen(
            [*run, "watch", "run", "--no-open"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        page = chromium.open(watch.stdout.readline().strip())
        page.run("window.sameLoad = true; 0")
        rounds = (
            "Number((document.querySelector('.facts dd')?.textContent || '0').replace(',', '').split(' ')[0])"
        )
        page.wait(f"{rounds} > 0")
        first = page.run(rounds)
        page.wait(f"{rounds} > {first}")
        page.wait("document.querySelector('.state').textContent.startsWith('finished')")
        assert page.run("document.querySelector('.sentence').textContent").startswith(
            "fed_recon was trained on planted"
        )
        assert page.run("window.sameLoad")
        assert page.problems() == []
        assert train.wait(300) == 0, train.stderr.read().decode()
    finally:
        for process in filter(None, (watch, train)):
            process.terminate()
            process.wait(300)
