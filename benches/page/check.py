"""The checks of check.sh: the page of made-up runs, for its user and for unauthorised clients."""

import contextlib
import http.client
import http.server
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse

from browser import Browser

VIEWS = ["overview", "curves", "ranks", "timeline", "memory", "results", "configuration", "text", "events"]
SMALL = ["baseline-adamw", "long-context", "muon"]
LARGE = "large-64-ranks"
MOST_SECONDS = 2.0
MOST_PNG = 200_000

failures = []


def check(is_right, what):
    print(("ok      " if is_right else "FAILED  ") + what, flush=True)
    if not is_right:
        failures.append(what)


@contextlib.contextmanager
def serving(program, runs, token=None, steps=1_000_000):
    environment = dict(os.environ, **({"KILN_PAGE_TOKEN": token} if token else {}))
    # The page shows the folder as it was given, so it does not contain the temporary path.
    runs = pathlib.Path(runs).absolute()
    runs.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([os.path.abspath(program), runs.name, "127.0.0.1:0", str(steps)], stdout=subprocess.PIPE, text=True,
                               env=environment, cwd=runs.parent)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def ready(browser, url):
    """Opens an address in a fresh page, and returns the seconds until its view was drawn."""
    browser.open("about:blank")
    browser.wait("location.href === 'about:blank'")
    begun = time.monotonic()
    browser.open(url)
    browser.wait("window.kilnReady && [...document.querySelectorAll('main canvas')].some((one) => one.width > 0)"
                 if "timeline" in url or url.endswith("/") or "curves" in url else "window.kilnReady", 60)
    return time.monotonic() - begun


def choose(browser, base, compared, detail, theme=""):
    """Returns the data that the browser stores for the page."""
    browser.open(base)
    browser.wait("document.readyState === 'complete'")
    browser.value(f"localStorage.setItem('kiln.compared', JSON.stringify({compared!r}));"
                  f"localStorage.setItem('kiln.detail', JSON.stringify({detail!r}));"
                  f"localStorage.setItem('kiln.theme', JSON.stringify({theme!r}))")


def timed(what, measure):
    """Checks the shortest of three times, since other work on the machine only makes them longer."""
    times = []
    while len(times) < 3 and (not times or min(times) >= MOST_SECONDS):
        times.append(measure())
    check(min(times) < MOST_SECONDS, f"{what} in {min(times):.2f} s" + (f", of {times}" if times[1:] else ""))


def cold(program, runs):
    """Returns the seconds from the start of the server until the first curve is drawn."""
    browser = Browser()
    browser.size(1280, 900)
    with serving(program, runs) as url:
        # The server prints its address when it begins to read the runs.
        took = ready(browser, url)
    browser.close()
    return took


def reading(browser, base):
    choose(browser, base, SMALL + [LARGE], LARGE)
    for view in ("", "#/curves", "#/ranks", "#/timeline", "#/memory"):
        timed(f"{view or 'overview'} with 1,000,000 steps and 64 ranks is drawn", lambda: ready(browser, base + view))
    ready(browser, base + "#/ranks")
    check(browser.wait("document.querySelectorAll('tbody tr').length") == 64, "64 ranks are listed")

    choose(browser, base, SMALL, SMALL[0])
    ready(browser, base)
    step = "document.querySelector('.card:nth-child(2) .value').firstChild.textContent"
    before = browser.value(step)
    browser.wait(f"{step} !== {before!r}")
    check(True, f"the page follows a running run: step {before}, then {browser.value(step)}")

    ready(browser, base + "#/curves")
    names = browser.value("[...document.querySelector('.chart .legend').querySelectorAll('li:not(.place)')].map((one) => one.firstChild.nextSibling.textContent)")
    check(names == SMALL, f"three runs are compared: {names}")
    colours = browser.value("""(() => {
        const canvas = document.querySelector('.chart canvas'), pen = canvas.getContext('2d');
        const pixels = pen.getImageData(0, 0, canvas.width, canvas.height).data;
        const keys = [...document.querySelectorAll('.chart .legend .key')].slice(0, 3).map((key) => getComputedStyle(key).backgroundColor.match(/\\d+/g).map(Number));
        return keys.map((key) => { for (let i = 0; i < pixels.length; i += 4) if (key.every((part, j) => Math.abs(part - pixels[i + j]) < 24) && pixels[i + 3] > 200) return true; return false; });
    })()""")
    check(colours == [True] * 3, f"each in its colour: {colours}")
    browser.value("document.querySelector('.chip input').click()")
    browser.wait("document.querySelector('.chart .legend').querySelectorAll('li:not(.place)').length === 2")
    check(True, "a click removes a run from the comparison")


def operating(browser, base):
    choose(browser, base, SMALL, LARGE)
    ready(browser, base)
    press = lambda key, code=0: [browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)
                                 for kind in ("keyDown", "keyUp")]
    press("Tab", 9)
    check(browser.value("document.activeElement.className") == "skip", "the first stop of the tab key skips to the content")
    for _ in range(4):
        press("Tab", 9)
    check(browser.value("document.activeElement.closest('nav') !== null"), "then the colours, then the views")
    browser.value("document.querySelector('nav a[href=\"#/curves\"]').focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    browser.wait("document.querySelector('[aria-current]').textContent === 'Curves'")
    browser.wait("document.querySelectorAll('.chart .plot canvas').length > 0")
    browser.value("document.querySelector('.chart .plot').focus()")
    press("ArrowLeft", 37)
    told = browser.wait("document.querySelector('.chart .place').textContent.startsWith('Step') && document.querySelector('.chart .place').textContent")
    check(True, f"arrow keys read a curve: {told}")
    browser.value("document.querySelector('.chart details').open = true")
    check(browser.wait("document.querySelectorAll('.chart details tbody tr').length") > 10, "a curve is a table as well")
    browser.value("location.hash = '#/ranks'")
    browser.wait("document.querySelectorAll('tbody tr').length === 64")
    browser.value("[...document.querySelectorAll('.sort')].find((one) => one.textContent === 'Peak memory').click()")
    check(browser.value("document.querySelector('[aria-sort=descending]').textContent") == "Peak memory", "ranks are sorted by a column")
    browser.value("location.hash = '#/timeline'")
    browser.wait("document.querySelector('canvas')?.width > 400 && document.querySelector('.headed h2').textContent.includes('step')")
    browser.value("document.querySelector('canvas').focus()")
    for _ in range(3):
        press("ArrowRight", 39)
    told = browser.wait("document.querySelector('.told').textContent.startsWith('Rank 0') && document.querySelector('.told').textContent")
    check(True, f"arrow keys read the timeline: {told}")


UNNAMED = """[...document.querySelectorAll('input, select, button, canvas, [role=img], a')].filter((one) =>
    one.getClientRects().length && !one.closest('[role=img] *') && !(one.labels?.length || one.textContent.trim() || one.getAttribute('aria-label'))).map((one) => one.outerHTML)"""


def fitting(browser, base, shots):
    for theme in ("light", "dark"):
        browser.size(360, 760, theme, 2)
        choose(browser, base, SMALL, LARGE)
        for view in VIEWS:
            ready(browser, f"{base}#/{view}")
            time.sleep(0.5)
            wide, unnamed = browser.value("document.documentElement.scrollWidth"), browser.value(UNNAMED)
            check(wide <= 360 and not unnamed, f"{view} fits 360 px ({theme}), and all controls have names {unnamed or ''}")
            check(browser.value("document.querySelectorAll('h1').length === 1 && document.querySelectorAll('main, nav[aria-label]').length === 2 && document.documentElement.lang === 'en'"),
                  f"{view} has its landmarks ({theme})")
            if shots and (view, theme) in (("overview", "light"), ("ranks", "dark")):
                browser.screenshot(shots / f"page-phone-{view}.png")


def screenshots(browser, base, shots):
    for view, theme, detail, height in [
        ("overview", "light", "baseline-adamw", 1000), ("overview", "dark", LARGE, 1000), ("curves", "light", SMALL[0], 1100),
        ("ranks", "light", LARGE, 900), ("timeline", "light", LARGE, 1120), ("memory", "dark", LARGE, 800),
        ("configuration", "light", SMALL[0], 700), ("text", "light", "muon", 820), ("events", "dark", "baseline-adamw", 700),
    ]:
        browser.size(1200, height, theme)
        choose(browser, base, SMALL, detail)
        ready(browser, f"{base}#/{view}")
        time.sleep(1.0)
        browser.screenshot(shots / f"page-{view}-{theme}.png")
    for shot in sorted(shots.glob("page-*.png")):
        check(shot.stat().st_size < MOST_PNG, f"{shot.name} has {shot.stat().st_size // 1000} kB")


def crowded(browser, base):
    """Checks that a hundred stalled clients do not slow the page down."""
    address = urllib.parse.urlparse(base)
    request = f"GET / HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode()
    clients = []
    for number in range(100):
        client = socket.create_connection((address.hostname, address.port))
        client.sendall(request * 5 if number % 2 else request[:-4])
        clients.append(client)
    timed("with 100 stalled clients, the page is drawn", lambda: ready(browser, base))
    for client in clients:
        client.close()


def strangers(program, runs):
    token = "a-token-of-this-check"
    with serving(program, runs, token) as url:
        base = url.split("?")[0]
        address = urllib.parse.urlparse(base)

        def status(path, **headers):
            connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
            connection.request("GET", path, headers=headers)
            return connection.getresponse().status

        bearer = {"Authorization": f"Bearer {token}"}
        for path in ("/", "/metrics", "/api/runs"):
            told = [status(path), status(path, Authorization="Bearer no"), status(path, **bearer, Host="evil.example"),
                    status(path, **bearer, Origin="http://evil.example"), status(path, **bearer)]
            check(told == [401, 401, 421, 403, 200], f"{path}: no token, a wrong one, a forged host, another origin, the token: {told}")

        browser = Browser()
        browser.size(1000, 800)
        ready(browser, url)
        check(browser.value("location.search") == "" and browser.value("document.cookie") == "", "the token is not in the address, and no script can read the cookie")
        ready(browser, base)
        check(True, "the browser has a cookie from then on")

        button = "[...document.querySelectorAll('.controls button')]"
        names = browser.value(f"{button}.map((one) => one.textContent)")
        check(names == ["Save a checkpoint", "Save and end"], f"a server with --control has buttons: {names}")
        browser.value(f"{button}[0].click()")
        told = "document.querySelector('.controls [role=status]').textContent"
        browser.wait(f"{told} === 'Told: checkpoint.'")
        browser.value(f"window.confirm = () => false; {button}[1].click()")
        check(browser.value(told) == "Told: checkpoint.", "ending a run asks for confirmation, and does nothing without it")
        browser.value(f"window.confirm = () => true; {button}[1].click()")
        check(browser.wait(f"{told} === 'Told: quit.'"), "commands are sent with the cookie")

        page = (f"<!doctype html><title>other</title><iframe src='{base}'></iframe><script>"
                f"fetch('{base}api/runs', {{credentials: 'include'}}).then((answer) => answer.text()).then((text) => window.got = text, (error) => window.got = 'nothing: ' + error)</script>")

        class Other(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(page.encode())

            def log_message(self, *_):
                pass

        other = http.server.HTTPServer(("127.0.0.1", 0), Other)
        threading.Thread(target=other.serve_forever, daemon=True).start()
        browser.open(f"http://localhost:{other.server_port}/")
        got = browser.wait("window.got")
        check(got.startswith("nothing"), f"a page of another site gets {got}")
        other.shutdown()
        browser.close()


def write_sweep(folder):
    """Twenty runs: one stopped early, one diverged, one of a single step."""
    for number in range(20):
        run = folder / f"sweep-{number:02}"
        run.mkdir(parents=True)
        (run / "run.json").write_text(json.dumps({"kiln_run": 1, "build": "0.1.0", "device": "CPU"}))
        strategy = "NO_SHARD" if number % 2 else "FULL_SHARD"
        (run / "config.toml").write_text(f"[train]\nsteps = 400\nranks = 2\nseed = {number}\n[optim]\nlr = {(number + 1) * 1e-4:.4f}\n[shard]\nstrategy = \"{strategy}\"\n")
        lines = []
        for step in range(1, {1: 101, 3: 2}.get(number, 401)):
            loss = None if number == 2 and step > 300 else 2 + (6 - number / 10) / step
            lines.append({"step": step, "time": 1.76e9 + step, "loss": loss, "grad_norm": 1 / step, "lr": 1e-3, "tokens_per_s": 1000 + number + step % 5,
                          "tokens": 1024 * step, "mfu": 0.4, "peak_bytes": 2**30 + number * 2**24, "step_s": 0.1, "data_s": 0.01, "forward_s": 0.02,
                          "backward_s": 0.04, "optimizer_s": 0.01, "other_s": 0.0, "wait_s": 0.02})
            if step % 100 == 0:
                lines.append({"step": step, "val_loss": 2.1 + 5 / step})
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": "</script><script>document.title = 'obeyed'</script>", "text": "<b>bold</b>"}) + "\n")


def reported(program, work, shots):
    """Checks a report, which is the page without a server: complete with twenty runs, and it loads nothing."""
    write_sweep(work / "sweep")
    subprocess.run([os.path.abspath(program), "sweep", "--report", "report"], cwd=work, check=True)
    base = (work / "report/report.html").absolute().as_uri()
    browser = Browser()
    browser.size(1280, 900)
    ready(browser, f"{base}#/curves")
    legend = "[...document.querySelector('.chart .legend').children].map((one) => one.textContent)"
    names = browser.wait(legend)
    all_names = [f"sweep-{number:02}" for number in range(20)]
    check([name.split(" ")[0] for name in names] == all_names, f"the legend of a report has all of 20 runs: {len(names)}")
    looks = browser.value("new Set([...document.querySelectorAll('.chart:first-child .legend .key')].map((key) => key.className + key.style.getPropertyValue('--key'))).size")
    check(looks == 20, f"all runs look different: {looks}")

    # Reads the values at the last step, which three runs have not reached or survived.
    browser.value("document.querySelector('.chart .plot').focus()")
    for key in ("Home", "End"):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
    browser.wait("document.querySelector('.chart .place').textContent === 'Step 400'")
    values = dict(name.split(" ", 1) for name in browser.value(legend))
    ended = {name: value for name, value in values.items() if value in ("", "not finite")}
    check(ended == {"sweep-01": "", "sweep-02": "not finite", "sweep-03": ""}, f"runs that ended earlier have no value at the last step: {ended}")
    check(values["sweep-00"] == f"{2 + 6 / 400:.4f}", f"the value of a run is that of its metrics: {values['sweep-00']}")
    browser.value("document.querySelector('.chart details').open = true")
    browser.wait("document.querySelectorAll('.chart details tbody tr').length === 20")
    table = browser.value("[...document.querySelectorAll('.chart details tbody tr')].slice(0, 2).map((row) => row.lastChild.textContent)")
    check(table == [f"{2 + 6 / 400:.4f}", "–"], f"a table of 20 runs has them as rows, without values that a run never reached: {table}")

    ready(browser, f"{base}#/results")
    rows = browser.wait("document.querySelectorAll('.panel:first-child tbody tr').length")
    told = browser.value("document.querySelector('main').textContent")
    check(rows == 20 and "not finite" in told and "recorded up to step 1 of 400" in told, "results name what diverged and what is missing")
    check("the same bits at" not in told and "differs from step 1 on" in told, "losses of strategies are compared")
    ready(browser, f"{base}#/configuration")
    heads = browser.wait("[...document.querySelectorAll('.panel:first-child thead th')].map((one) => one.textContent)")
    check(heads == ["Run", "optim.lr", "shard.strategy", "train.seed"], f"settings of 20 runs are columns: {heads}")
    ready(browser, f"{base}#/text")
    check(browser.wait("document.title") == "Text · Kiln", "the page does not execute text of a run")
    views = browser.value("[...document.querySelectorAll('nav a')].map((one) => one.textContent)")
    check(views == ["Overview", "Curves", "Results", "Configuration", "Text", "Events"], f"runs that have ended have no ranks to show: {views}")
    for width, theme in ((1280, "light"), (1920, "dark"), (390, "light")):
        browser.size(width, 900, theme)
        for view in ("overview", "curves", "results", "configuration", "text", "events"):
            ready(browser, f"{base}#/{view}")
            time.sleep(0.3)
            wide = browser.value("document.documentElement.scrollWidth")
            check(wide <= width, f"{view} of a report fits {width} px ({theme})")
            if shots:
                browser.screenshot(shots / f"report-{view}-{width}.png")
    complaints, requests = browser.complaints(), browser.requests()
    check(not complaints, f"the console of a report has no messages {complaints or ''}")
    outside = [url for url in requests if not url.startswith((base, "data:", "about:"))]
    check(not outside, f"a report loads nothing {outside or ''}")
    browser.close()


def main():
    program, runs = sys.argv[1:3]
    shots = pathlib.Path(sys.argv[3]) if len(sys.argv) > 3 else None
    with serving(program, runs):
        pass
    timed("from the start of the server, the first curve of a million steps is drawn", lambda: cold(program, runs))
    with serving(program, runs) as base:
        browser = Browser()
        browser.size(1280, 900)
        reading(browser, base)
        operating(browser, base)
        crowded(browser, base)
        fitting(browser, base, shots)
        if shots:
            screenshots(browser, base, shots)
        complaints, requests = browser.complaints(), browser.requests()
        check(not complaints, f"the console has no messages {complaints or ''}")
        outside = [url for url in requests if not url.startswith((base, "data:", "about:"))]
        check(not outside, f"of {len(requests)} requests none went to another host {outside or ''}")
        browser.close()
        metrics = http.client.HTTPConnection(urllib.parse.urlparse(base).netloc)
        metrics.request("GET", "/metrics")
        text = metrics.getresponse().read()
        used = set(re.findall(r"kiln_[a-z_]+", pathlib.Path("configs/grafana/kiln.json").read_text()))
        unknown = used - set(re.findall(r"# TYPE (\S+)", text.decode()))
        check(not unknown, f"/metrics has all {len(used)} names that the dashboard for Grafana uses {unknown or ''}")
        promtool = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
        check(promtool.returncode == 0, f"promtool takes {text.count(bytes([10]))} lines of /metrics {promtool.stderr.decode() or promtool.stdout.decode()}")
    strangers(program, runs)
    reported(program, pathlib.Path(runs).parent, None)
    print(f"{len(failures)} failed")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
