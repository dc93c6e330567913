"""How long the page of `dmst explore` takes to follow a hand, measured in the page: from the event to the painted frame.

    python benchmarks/explorer.py [--rounds 40] [--json FILE] [--docs FILE]

A real server and a real Chromium share the machine. Each time is performance.now() from the event to the second animation frame
after the page shows the new numbers, so up to two frames (33 ms at 60 Hz) are waiting for the screen. No head, gate or picture
is asked for twice: no answer comes from memory. Only the small picture that a second network sees is fetched ahead, as the page
always does when it is idle. Milliseconds belong to one machine and one moment; the bars are those of the page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("dmst_cifar10", "tost_cifar10")
BEGIN, END = "<!-- begin results/cpu/explorer.json -->", "<!-- end results/cpu/explorer.json -->"
BAR, FIRST = 150, 1000  # ms: an interaction, p95; the first paint

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
QUIET = (
    """() => timed(() => {}, () => [...document.querySelectorAll(".panel")].every((p) => p.dataset.rates === p.dataset.key))"""
)
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


def markdown(told: dict[str, Any]) -> str:
    """The figures as docs/explore.md shows them."""
    lines = ["| from the event to the painted frame, ms | median | p95 | largest |", "|---|---|---|---|"]
    lines += [f"| {row['what']} | {row['median']:.0f} | {row['p95']:.0f} | {row['largest']:.0f} |" for row in told["rows"]]
    facts = told["facts"]
    first = f"First paint of the page: {facts['first_paint']:.0f} ms."
    where = f"{facts['rounds']} times each, {facts['cores']} CPU cores, load {facts['load']} before, torch {facts['torch']}"
    return "\n".join(lines) + f"\n\n{first} {where}, Chromium {facts['chromium']}.\n"


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


def measure(link: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, float], str]:
    with sync_playwright() as p:
        browser = p.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-background-networking", "--disable-gpu"],
        )
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        page.add_init_script(TIMED)
        page.goto(link)
        page.locator(".panel[data-rates]").wait_for(timeout=60_000)  # the networks are loaded now
        begin = {}
        for name in ("first paint", "first answer"):
            begin[name] = [_begin(page, name) for _ in range(5)]
        found: dict[str, list[float]] = {}
        for name, (script, _) in ACTIONS.items():
            page.goto("about:blank")
            page.goto(f"{link}#image=e2&layer=4&head=0")
            page.locator(".panel[data-rates]").wait_for()
            times = []
            for n in range(rounds + 3):
                times.append(page.evaluate(script, n))
                page.evaluate(QUIET)
            found[name] = times[3:]
        version = browser.version
        browser.close()
    return found, {name: statistics.median(times) for name, times in begin.items()}, version


def _begin(page: Any, name: str) -> float:
    page.reload()
    page.locator(".panel[data-rates]").wait_for()
    if name == "first paint":
        return page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    asked = "performance.getEntriesByType('resource').filter((each) => each.name.endsWith('/api/look'))[0].responseEnd"
    return page.evaluate(asked)


def p95(times: list[float]) -> float:
    return statistics.quantiles(times, n=20, method="inclusive")[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path)
    ask = parser.parse_args()
    start, load = time.time(), os.getloadavg()[0]
    with serving() as link:
        found, begin, version = measure(link, ask.rounds)
    table = Table("from the event to the painted frame, ms", "median", "p95", "largest", "bar for p95")
    rows = []
    for name, times in found.items():
        bar = ACTIONS[name][1]
        row = {"what": name, "median": statistics.median(times), "p95": p95(times), "largest": max(times), "bar": bar}
        rows.append({key: round(each, 1) if isinstance(each, float) else each for key, each in row.items()})
        table.add_row(name, *(f"{row[key]:.0f}" for key in ("median", "p95", "largest")), "" if bar is None else str(bar))
    table.add_row("first paint of the page", f"{begin['first paint']:.0f}", "", "", f"{FIRST} (median)")
    table.add_row("first answer is there (networks loaded, picture seen before)", f"{begin['first answer']:.0f}", "", "", "")
    facts = {
        "model": MODELS[0],
        "rounds": ask.rounds,
        "cores": os.cpu_count(),
        "load": round(load, 1),
        "first_paint": round(begin["first paint"], 1),
        "first_answer": round(begin["first answer"], 1),
        "chromium": version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "note": "server and browser on the same cores; headless, no GPU; ms of one machine at one moment",
    }
    console = Console(width=110)
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), f"({time.time() - start:.0f} s)")
    if ask.json:
        ask.json.parent.mkdir(parents=True, exist_ok=True)
        ask.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    if ask.docs:
        before, _, after = ask.docs.read_text().partition(BEGIN)
        ask.docs.write_text(before + BEGIN + "\n" + markdown({"facts": facts, "rows": rows}) + END + after.partition(END)[2])
    missed = [row["what"] for row in rows if row["bar"] and row["p95"] > row["bar"]]
    missed += ["first paint"] * (begin["first paint"] > FIRST)
    if missed:
        console.print(f"over the bar: {', '.join(missed)}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
