"""Checks what the page and a report show against the metrics of the runs: page.sh describes it."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time

from browser import Browser
from check import check, failures, ready, serving

# Records the texts that each canvas shows, and the last file offered for download.
SPY = """
const fillText = CanvasRenderingContext2D.prototype.fillText, clearRect = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) { (this.canvas.shown ??= []).push([text, this.textAlign]); return fillText.call(this, text, x, y, ...more); };
CanvasRenderingContext2D.prototype.clearRect = function (...all) { this.canvas.shown = []; return clearRect.apply(this, all); };
const create = URL.createObjectURL;
URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved = text; }); return create(blob); };
"""
# Distance in pixels within which a point counts as under the cursor.
NEAR = 12
SINGULAR = r"\b1 (ranks|steps|runs|machines|events|lines|tokens|checkpoints|restarts|sequences|rounds)\b"
UNITS = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "%": 0.01, "µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400,
         "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400]
LOG_TIMES = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 86400]


def write_runs(folder, count):
    """Writes runs of up to 400 steps: the first on one rank, then a killed one, one with NaN and one of a single step."""
    special = ["one-rank", "killed", "not-a-number", "single"]
    for number in range(count):
        name = special[number] if number < 4 else f"sweep.lr-{number * 1e-4:.4f}.seed-{number}"
        run = folder / name
        run.mkdir(parents=True)
        (run / "run.json").write_text(json.dumps({"kiln_run": 1, "build": "0.1.0", "device": "CPU"}))
        (run / "config.toml").write_text(
            f"[train]\nsteps = 400\nranks = {1 if number == 0 else 4}\nseed = {number}\n[optim]\nlr = {(number + 1) * 1e-4:.4f}\n"
            f"[model.attention.rotary]\nbase = {10_000 * (1 + number % 2)}\n[model]\npreset = \"10m\"\n")
        every, evaluation = 1 + 4 * (number % 2), 25 + 15 * (number % 3)
        last = {"killed": 150, "single": 1}.get(name, 400 - 7 * (number % 5) if number > 4 else 400)
        lines = []
        for step in range(1, last + 1):
            wave = math.sin(step * (number + 3))
            loss = 2 + number / 10 + 6 / math.sqrt(step) + 0.05 * wave
            if step % every == 0 or step == 1:
                lines.append({"step": step, "time": 1.76e9 + 20 * step, "loss": None if name == "not-a-number" and step > 300 else round(loss, 5), "grad_norm": round(1 / step + 0.01, 5),
                              "lr": 3e-4 * min(1, step / 100), "tokens_per_s": 1000 + number + 10 * wave, "tokens": 1024 * step, "mfu": 0.4 + 0.01 * wave,
                              "peak_bytes": 2**33 + number * 2**24, "step_s": 0.1, "data_s": 0.01, "forward_s": 0.02, "backward_s": 0.04,
                              "optimizer_s": 0.01, "other_s": 0.0, "wait_s": 0.02, "layers.3.attention.output.rms": wave + 2})
            if step % evaluation == 0:
                lines.append({"step": step, "time": 1.76e9 + 20 * step, "val_loss": round(loss + 0.1, 5)})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / "metrics.jsonl").write_text(text + ('{"step":151,"lo' if name == "killed" else ""))
        event = lambda step, kind, text: {"time": 1.76e9 + 20 * step, "step": step, "kind": kind, "text": text}
        events = [event(0, "start", "training begins")] + [event(step, "checkpoint", f"saved in checkpoints/fsdp_cpt{step}") for step in range(100, last + 1, 100)]
        if last > 120:
            events += [event(120, "skipped", "the gradient was not finite: the update was skipped"), event(100, "resume", "resumed from fsdp_cpt100 <b>")]
        (run / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in sorted(events, key=lambda one: one["step"])))
        code = "\n    if x:\n        return [1,\n                2]\n"
        (run / "samples.jsonl").write_text(json.dumps({"step": last, "prompt": "def f(x):", "text": code}) + "\n")


def series(folder, key):
    """Returns the steps and the values of a metric in each run, from the files."""
    found = {}
    for run in sorted(folder.iterdir()):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
        values = {line["step"]: line[key] for line in lines if key in line}
        if values:
            found[run.name] = values
    return found


def text_of(value):
    """Formats a loss as the page does."""
    return "not finite" if value is None else f"{value:.{5 if value < 0.1 else 4}f}"


def is_same(shown, value):
    """True if a shown loss is the value, up to rounding."""
    if value is None or not re.fullmatch(r"[\d.]+", shown):
        return shown == text_of(value)
    return abs(float(shown) - value) < 1.01 * 10 ** -len(shown.partition(".")[2])


def find(title):
    """JavaScript for the chart with a title."""
    return f"[...document.querySelectorAll('.chart')].find((one) => one.querySelector('h3').textContent === {title!r})"


def legend(browser, title):
    entries = browser.value(f"[...{find(title)}.querySelector('.legend').children].map((one) => [one.querySelector('.key + span').textContent, one.querySelector('b').textContent])")
    return {name: value for name, value in entries}


def move(browser, title, share, from_bottom=60):
    """Moves the mouse over a chart, and returns its width and the position in it."""
    left, top, width, height = browser.value(f"(() => {{ const over = {find(title)}.querySelector('.u-over'); over.scrollIntoView({{block: 'center'}}); const box = over.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; }})()")
    x = left + share * width
    for shift in (3, 0):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + (shift if share < 0.5 else -shift), y=top + height - from_bottom)
    time.sleep(0.05)
    return width, x - left


def away(browser):
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    time.sleep(0.05)


def expected_at(values, step, per_step):
    """Returns the value of the point that is nearest to a step, or an empty text."""
    if step > max(values):
        return None, False
    nearest = min(values, key=lambda one: (abs(one - step), one))
    return values[nearest], abs(nearest - step) * per_step <= NEAR


def hovering(browser, folder, title, key):
    every = series(folder, key)
    steps = sorted({step for values in every.values() for step in values})
    last = legend(browser, title)
    wrong = [name for name, values in every.items() if not is_same(last[name], values[max(values)])]
    check(not wrong and set(last) == set(every), f"{title} of {len(every)} runs: the last values are those of the files {[(name, last.get(name)) for name in wrong] or ''}")
    for share in (0.0, 0.11, 0.25, 0.333, 0.5, 0.62, 0.75, 0.99):
        width, x = move(browser, title, share)
        place = browser.value(f"{find(title)}.querySelector('.place').textContent")
        if not place.startswith("Step "):
            check(False, f"{title} at {share}: hovering shows a step: {place!r}")
            continue
        step = int(place[5:].replace(",", ""))
        per_step = width / max(1, steps[-1] - steps[0])
        nearest = min(abs((one - steps[0]) * per_step - x) for one in steps)
        wrong = [] if abs((step - steps[0]) * per_step - x) <= nearest + 1.5 else [f"step {step} is not at the cursor"]
        for name, shown in legend(browser, title).items():
            value, is_near = expected_at(every[name], step, per_step)
            if (shown != "") != is_near or (is_near and not is_same(shown, value)):
                wrong.append(f"{name}: {shown!r} instead of {text_of(value) if is_near else ''!r}")
        check(not wrong, f"{title} of {len(every)} runs at step {step}: values are those of the files {wrong or ''}")
    shown = legend(browser, title)
    # The page asks for news every second.
    time.sleep(1.5)
    check(legend(browser, title) == shown, f"{title}: the values at the cursor stay while the page is refreshed")
    away(browser)
    check(legend(browser, title) == last, f"{title}: without the cursor, the last values are shown")


def amount(label):
    """Parses a label of an axis, such as `1 h 30 min` or `2.5 k`."""
    parts = re.findall(r"([-−]?[\d.,]+(?:e-?\d+)?)\s*([A-Za-zµ%]*)", label)
    return sum(float(number.replace(",", "").replace("−", "-")) * UNITS[unit] for number, unit in parts)


def is_round(step, kinds=(1, 2, 5)):
    """True for 1, 2 and 5 times powers of ten."""
    return step > 0 and any(abs(step / 10 ** math.floor(math.log10(step) + 1e-9) - kind) < 1e-6 for kind in kinds)


def ticking(browser, what, is_log=(False, False), is_time=False):
    for title, labels in browser.value("""[...document.querySelectorAll('.chart:not([hidden])')].filter((one) => one.querySelector('canvas')).map((one) =>
            [one.querySelector('h3').textContent, one.querySelector('canvas').shown.filter(([text]) => !'▲●✕■'.includes(text))])"""):
        wrong = []
        for (align, name), log in zip((("center", "horizontal"), ("right", "vertical")), is_log):
            texts = [text for text, how in labels if how == align and text]
            values = [amount(text) for text in texts]
            if len(set(texts)) != len(texts) or len(set(values)) != len(values):
                wrong.append(f"{name} marks are not distinct: {texts}")
            if len(texts) < 2 and not (log and name == "horizontal"):
                wrong.append(f"{name} marks are too few: {texts}")
            steps = [b - a for a, b in zip(sorted(values), sorted(values)[1:])]
            is_bytes = any("iB" in text for text in texts)
            if log:
                size = lambda value, text: value / UNITS[text.split()[-1]] if is_bytes else value
                bad = [text for value, text in zip(values, texts) if not (value in LOG_TIMES if is_time and name == "horizontal" else is_round(size(value, text)))]
                wrong += [f"{name} marks are not 1-2-5: {texts}"] if bad else []
            elif steps:
                even = max(steps) - min(steps) < 1e-6 * max(map(abs, values))
                fits = steps[0] in TIMES if is_time and name == "horizontal" else math.log2(steps[0]) % 1 == 0 if is_bytes else is_round(round(steps[0], 12))
                wrong += [] if even and fits else [f"{name} marks are not round: {texts}"]
        check(not wrong, f"{what}: marks of {title} {wrong or ''}")


def words(browser, what):
    """Checks that one thing is never called several."""
    found = re.findall(f".*{SINGULAR}.*", browser.value("document.body.innerText"))
    check(not re.search(SINGULAR, browser.value("document.body.innerText")), f"{what}: one thing is no plural {found or ''}")


def prefer(browser, base, **options):
    browser.open(base)
    browser.wait("document.readyState === 'complete'")
    browser.value("localStorage.clear()")
    for key, value in options.items():
        browser.value(f"localStorage.setItem('kiln.{key}', JSON.stringify({json.dumps(value)}))")


def open_curves(browser, base):
    ready(browser, f"{base}#/curves")
    browser.wait("document.querySelectorAll('.chart canvas').length >= 6")
    time.sleep(0.3)


def served(browser, base, folder, count):
    names = sorted(run.name for run in folder.iterdir())
    prefer(browser, base, compared=names, detail=names[0], theme="")
    open_curves(browser, base)
    looks = browser.value(f"[...{find('Training loss')}.querySelectorAll('.legend .key')].map((key) => key.className + key.style.getPropertyValue('--key'))")
    check(len(set(looks)) == count, f"{count} runs look different")
    hovering(browser, folder, "Training loss", "loss")
    hovering(browser, folder, "Validation loss", "val_loss")
    ticking(browser, f"{count} runs by step")
    for axis in ("tokens", "time"):
        prefer(browser, base, compared=names, detail=names[0], theme="", axis=axis)
        open_curves(browser, base)
        ticking(browser, f"{count} runs by {axis}", is_time=axis == "time")
    for axis in ("step", "time"):
        prefer(browser, base, compared=names, detail=names[0], theme="", logY=True, axis=axis)
        open_curves(browser, base)
        browser.value("[...document.querySelectorAll('.check')].find((one) => one.textContent === 'Logarithmic axis').querySelector('input').click()")
        time.sleep(0.6)
        ticking(browser, f"{count} runs on logarithmic axes by {axis}", is_log=(True, True), is_time=axis == "time")

    # Zoomed to a few steps, where labels would repeat if they were rounded.
    prefer(browser, base, compared=names[:1], detail=names[0], theme="")
    open_curves(browser, base)
    left, top, width = browser.value(f"(() => {{ const box = {find('Training loss')}.querySelector('.u-over').getBoundingClientRect(); return [box.left, box.top, box.width]; }})()")
    for kind, share in (("mousePressed", 0.3), ("mouseMoved", 0.32), ("mouseReleased", 0.34)):
        browser.call("Input.dispatchMouseEvent", type=kind, x=left + share * width, y=top + 50, button="left", buttons=1, clickCount=1)
    time.sleep(0.6)
    ticking(browser, "zoomed in")


def operating(browser, base, folder):
    """Marks of events, CSV, the search for runs, and columns of settings."""
    names = sorted(run.name for run in folder.iterdir())
    losses = series(folder, "loss")
    prefer(browser, base, compared=names, detail=names[0], theme="")
    open_curves(browser, base)
    # Step 100 of 1 to 400.
    move(browser, "Training loss", 99 / 399, from_bottom=5)
    told = browser.value(f"{find('Training loss')}.querySelector('.tip').innerText")
    check("step 100: saved in checkpoints/fsdp_cpt100" in told, f"the events at a sign are read: {told!r}")
    away(browser)
    check(browser.value(f"{find('Training loss')}.querySelector('.tip').hidden"), "and hidden elsewhere")
    browser.value(f"[...{find('Training loss')}.querySelectorAll('button')].find((one) => one.textContent === 'CSV').click()")
    lines = browser.wait("window.saved").splitlines()
    rows = {int(line.split(",")[0]): line.split(",")[1:] for line in lines[1:]}
    head = [name.strip('"') for name in lines[0].split(",")[1:]]
    wrong = [(step, name) for step, cells in rows.items() for name, cell in zip(head, cells)
             if cell != ("" if step not in losses[name] else "NaN" if losses[name][step] is None else f"{losses[name][step]:g}") and
             not (cell and step in losses[name] and losses[name][step] is not None and abs(float(cell) - losses[name][step]) < 1e-4)]
    check(head == names and not wrong and sorted(rows) == sorted({step for values in losses.values() for step in values}), f"the CSV of a chart has the values of the files {wrong[:5] or ''}")

    chips = "[...document.querySelectorAll('.chip')].filter((one) => !one.hidden).map((one) => one.textContent)"
    seek = lambda text: browser.value(f"(() => {{ const box = document.querySelector('#picker input[type=search]'); box.value = {text!r}; box.dispatchEvent(new Event('input')); }})()")
    press = lambda name: browser.value(f"[...document.querySelectorAll('#picker button')].find((one) => one.textContent === {name!r}).click()")
    compared = "[...document.querySelectorAll('.chip :checked')].map((one) => one.closest('.chip').dataset.run)"
    seek("seed-1[0-3]$")
    matching = [name for name in names if re.search("seed-1[0-3]$", name)]
    check(browser.value(chips) == matching, f"runs are found by a regular expression: {browser.value(chips)}")
    seek("")
    press("None")
    check(browser.value(compared) == [], "no run is compared after None")
    seek("seed-1[0-3]$")
    press("All")
    seek("(")
    check(browser.value(chips) == [], "half a regular expression is text")
    check(browser.value(compared) == matching, "the listed runs are compared after All")
    browser.wait(f"{find('Training loss')}.querySelectorAll('.legend li').length === {len(matching)}")

    ready(browser, base)
    heads = browser.wait("document.querySelector('th.setting') && [...document.querySelectorAll('th.setting')].map((one) => one.textContent)")
    check(heads == ["model.attention.rotary.base", "optim.lr", "train.ranks", "train.seed"], f"settings that differ are columns: {heads}")
    for is_down in (False, True):
        browser.value("[...document.querySelectorAll('th.setting .sort')].find((one) => one.textContent === 'optim.lr').click()")
        rates = browser.value("[...document.querySelectorAll('tbody tr')].slice(0, 20).map((one) => Number(one.children[10].textContent))")
        check(rates == sorted(rates, reverse=is_down), f"runs are sorted by a setting, {'down' if is_down else 'up'}")
    wbr = browser.value("document.querySelector('th.setting').innerHTML.includes('attention.<wbr>rotary.<wbr>base')")
    check(wbr, "keys may break after their dots")


def machines(browser, base):
    prefer(browser, base, compared=["one-rank"], detail="one-rank", theme="")
    found = {}
    for view in ("ranks", "timeline", "memory"):
        ready(browser, f"{base}#/{view}")
        place = "[...[...document.querySelectorAll('table')].find((one) => one.textContent.includes('Machine') && one.querySelector('tbody td')).querySelectorAll('thead th')].findIndex((one) => one.textContent === 'Machine')"
        found[view] = browser.wait(f"document.querySelector('tbody td') && [...document.querySelectorAll('table')].find((one) => one.textContent.includes('Machine')).querySelector('tbody tr').children[{place}].textContent")
        words(browser, f"{view} of one rank")
    check(set(found.values()) == {"node-0"}, f"a machine has one name: {found}")
    keys = browser.value("[...document.querySelectorAll('.panel .legend')].map((one) => one.textContent)")
    check(any("Rank 0" in text for text in keys), f"the memory chart has a legend of its ranks: {keys}")


def reported(browser, program, folder, place):
    subprocess.run([os.path.abspath(program), folder.name, "--report", place.name], cwd=folder.parent, check=True)
    base = (place / "report.html").absolute().as_uri()
    open_curves(browser, base)
    hovering(browser, folder, "Training loss", "loss")
    hovering(browser, folder, "Validation loss", "val_loss")
    for view in ("overview", "results", "configuration", "text", "events"):
        ready(browser, f"{base}#/{view}")
        time.sleep(0.2)
        words(browser, f"{view} of a report of {folder.name}")
    return base


def show(browser, base, names, views, shots, prefix, is_report=False):
    """Takes screenshots of whole views, and checks that they fit."""
    for width in (1280, 1920, 390):
        for theme in ("light", "dark"):
            browser.size(width, 900, theme)
            if not is_report:
                prefer(browser, base, compared=names, detail=names[0], theme="")
            for view in views:
                ready(browser, f"{base}#/{view}")
                time.sleep(0.4)
                wide = browser.value("document.documentElement.scrollWidth")
                check(wide <= width, f"{prefix} {view} fits {width} px ({theme})")
                words(browser, f"{prefix} {view}")
                if shots:
                    browser.size(width, min(6000, browser.value("document.documentElement.scrollHeight")), theme)
                    time.sleep(0.5)
                    browser.screenshot(shots / f"{prefix}-{view}-{width}-{theme}.png")
                    browser.size(width, 900, theme)
    browser.size(1280, 900)


def main():
    program, work = sys.argv[1], pathlib.Path(sys.argv[2])
    shots = pathlib.Path(sys.argv[3]) if len(sys.argv) > 3 else None
    if shots:
        shots.mkdir(parents=True, exist_ok=True)
    browser = Browser()
    browser.size(1280, 900)
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=SPY)
    for count in (1, 8, 20):
        folder = work / f"runs-{count}"
        write_runs(folder, count)
        names = sorted(run.name for run in folder.iterdir())
        with serving(program, folder, steps=0) as base:
            served(browser, base, folder, count)
            if count == 1:
                machines(browser, base)
            if count == 20:
                operating(browser, base, folder)
            views = ["overview", "curves", "results", "configuration", "text", "events"] + ["ranks", "timeline", "memory"] * (count == 1)
            show(browser, base, names, views, shots, f"page-{count}")
            browser.open("about:blank")
            browser.wait("location.href === 'about:blank'")
        base = reported(browser, program, folder, work / f"report-{count}")
        show(browser, base, names, ["curves", "results", "configuration"], shots, f"report-{count}", is_report=True)
    complaints, requests = browser.complaints(), browser.requests()
    check(not complaints, f"the console has no complaint {complaints or ''}")
    outside = [url for url in requests if not re.match(r"(http://127\.0\.0\.1:|file:|data:|about:|blob:)", url)]
    check(not outside, f"nothing is loaded from elsewhere {outside or ''}")
    browser.close()
    print(f"{len(failures)} failed")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
