"""How long the page of `dmst explore` takes to follow a hand, measured in the page: from the event to the painted frame.

    python benchmarks/explorer.py [--rounds 40] [--json results/cpu/explorer.json]

A real server and a real Chromium share the machine. Each time is performance.now() from the event to the second animation frame
after the page shows the new numbers, so up to two frames (33 ms at 60 Hz) are waiting for the screen. No head, gate or picture
is asked for twice: no answer comes from memory. The exit status is 1 if the 95th percentile of a row is above its bar.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import measure
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("dmst_cifar10", "tost_cifar10")
BAR = 150  # ms

TIMED = """
window.timed = async (act, done) => {
  const frame = () => new Promise(requestAnimationFrame);
  const begin = performance.now();
  act();
  while (!done()) await new Promise((next) => setTimeout(next));
  await frame();
  await frame();
  return performance.now() - begin;
};
window.panel = (i = 0) => document.querySelectorAll(".panel")[i];
window.put = (element, value) => {
  element.value = value;
  element.dispatchEvent(new Event("input", { bubbles: true }));
};
window.fresh = async (n) => {
  const reset = document.getElementById("reset");
  if (!reset.disabled) await timed(() => reset.click(), () => panel().dataset.gates === "" && panel().dataset.rates);
  await timed(() => put(document.getElementById("layer"), n % 9), () => true);
  return document.querySelectorAll(".tile .switch")[Math.floor(n / 9) % 8];
};
window.give = (seed) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 320, height: 240 });
  const pen = canvas.getContext("2d");
  for (let i = 0; i < 60; i++) {
    pen.fillStyle = `hsl(${(seed * 47 + i * 31) % 360} 60% ${20 + (i * 7 + seed * 13) % 60}%)`;
    pen.fillRect((i * 53 + seed * 17) % 300, (i * 29 + seed * 11) % 220, 60, 50);
  }
  return new Promise((done) => canvas.toBlob((file) => {
    const given = new DataTransfer();
    given.items.add(new File([file], `${seed}.png`, { type: "image/png" }));
    done(() => document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: given, bubbles: true })));
  }));
};
"""

LAYER = "(n) => timed(() => put(document.getElementById('layer'), n % 9), () => panel().dataset.layer === String(n % 9))"
HEAD = """(n) => timed(() => document.querySelectorAll('#heads input')[n % 8].click(),
  () => panel().dataset.head === String(n % 8))"""
PATCH = """(n) => {
  const map = document.querySelector(".map"), box = map.getBoundingClientRect();
  const title = document.querySelector(".through-title"), old = title.textContent;
  const at = (share, from, size) => from + size * (((share * 5) % 8) + 0.5) / 8;
  const event = { clientX: at(n, box.left, box.width), clientY: at(n >> 3, box.top, box.height), bubbles: true };
  return timed(() => map.dispatchEvent(new MouseEvent("click", event)), () => title.textContent !== old);
}"""
TOGGLE = """async (n) => {
  const head = await fresh(n), old = panel().dataset.gates;
  return timed(() => head.click(), () => panel().dataset.gates !== old);
}"""
CURVE = """async (n) => {
  const head = await fresh(n), old = panel().dataset.gates;
  return timed(() => head.click(), () => panel().dataset.gates !== old && panel().dataset.rates === panel().dataset.key);
}"""
FORCE = """(n) => timed(() => put(document.querySelector(".gate-number"), ((n * 7 + 3) % 997) / 1000),
  () => panel().dataset.gates.endsWith(`:${((n * 7 + 3) % 997) / 1000}`))"""
SECOND = """async (n) => {
  const select = document.getElementById("model-1");
  const choose = (value) => { select.value = value; select.dispatchEvent(new Event("change")); };
  choose("");
  const old = panel().dataset.key, drop = await give(n);
  await timed(drop, () => panel().dataset.key !== old && panel().dataset.rates === panel().dataset.key);
  const image = JSON.parse(panel().dataset.key).image;
  return timed(() => choose("m1"), () => panel(1)?.dataset.key?.includes(image));
}"""
PICTURE = """async (n) => {
  const old = panel().dataset.key, drop = await give(1000 + n);
  return timed(drop, () => panel().dataset.key !== old);
}"""
QUIET = "() => timed(() => {}, () => [...document.querySelectorAll('.panel')].every((p) => p.dataset.rates === p.dataset.key))"
ACTIONS = {  # name -> (script, its bar in ms)
    "scrub the layers": (LAYER, BAR),
    "scrub the heads": (HEAD, BAR),
    "click a patch": (PATCH, BAR),
    "switch a head: answer and maps": (TOGGLE, BAR),
    "switch a head: rate curve too": (CURVE, None),
    "force a gate": (FORCE, BAR),
    "a new picture, dropped": (PICTURE, None),
    "a second network beside the first": (SECOND, BAR),
}


@contextmanager
def serving() -> Iterator[str]:
    command = [sys.executable, "-m", "dmst", "explore", "--no-open", "--port", "0"]
    models = [each for name in MODELS for each in ("--model", name)]
    running = subprocess.Popen([*command, *models], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        yield running.stdout.readline().split()[0]
    finally:
        running.terminate()
        running.wait(20)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    ask = parser.parse_args()
    rows = measure.Rows("explorer", ask, ("what",))
    with serving() as link, sync_playwright() as play:
        flags = ["--no-sandbox", "--disable-background-networking", "--disable-gpu"]
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        page.add_init_script(TIMED)
        for name, (script, bar) in ACTIONS.items():
            page.goto("about:blank")
            page.goto(f"{link}#image=e2&layer=4&head=0")
            page.locator(".panel[data-rates]").wait_for(timeout=60_000)
            times = []
            for n in range(ask.rounds + 3):
                times.append(page.evaluate(script, n))
                page.evaluate(QUIET)
            p95 = statistics.quantiles(times[3:], n=20, method="inclusive")[-1]
            rows.add({"what": name, "median": statistics.median(times[3:]), "p95": p95, "largest": max(times[3:]), "bar": bar})
        browser.close()
    raise SystemExit(1 if any(row["bar"] and row["p95"] > row["bar"] for row in rows.rows) else 0)


if __name__ == "__main__":
    main()
