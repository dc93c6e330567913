"""The page of `dmst explore`, in a real Chromium against the real server: what it shows is what the networks compute.

Every page of every test is watched: no console error, no breach of its policy, no dialog, no request to anyone but the server.
"""

from __future__ import annotations

import base64
import io
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dmst.analysis import groups, membership
from dmst.analysis.intervene import forced_gates, groups_off, switched_off
from dmst.engine.prepare import read_weights
from dmst.models import VisionModel, create_model, save_model
from dmst.photos import PHOTOS
from dmst.words import visible
from tests.networks import enliven

pytest.importorskip("starlette", reason="dmst explore needs Starlette: pip install 'dmst[explore]'")
playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright==1.65.0")

from dmst.explorer import server  # noqa: E402
from dmst.explorer.session import Session  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium")

MODELS = ("dmst_cifar10", "tost_cifar10", "dmst_digits")
WATCH = """
window.__violations = [];
document.addEventListener("securitypolicyviolation", (e) => window.__violations.push(`${e.violatedDirective} ${e.blockedURI}`));
"""
RUN = "window.__canary=1"
ATTACKS = [
    f"<script>{RUN}</script>", f"<img src=x onerror={RUN}>", f"\"><img src=x onerror={RUN}>",
    f"</script><script>{RUN}</script>",
    f"]]><script>{RUN}</script>", f"<a href=javascript:{RUN}>x</a>", f"</title><script>{RUN}</script>", f"`;{RUN};`",
    f"\u2028{RUN}\u2029", f"\u202e<img src=x onerror={RUN}>",
]  # fmt: skip


@contextmanager
def serving(models: list[str], token: str = "") -> Iterator[tuple[str, server.Site]]:
    site = server.Site(Session(models))
    bound = server.listening("127.0.0.1", 0)
    running = server.server_of(site, "127.0.0.1", token)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
    thread.start()
    site.load()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/", site
    finally:
        running.should_exit = True
        thread.join(20)
        site.close()
        bound.close()


@pytest.fixture(scope="module")
def here() -> Iterator[tuple[str, server.Site]]:
    with serving(list(MODELS)) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    arguments = ["--no-sandbox", "--disable-background-networking", "--disable-gpu"]
    with playwright.sync_playwright() as p:
        found = p.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield found
        found.close()


Open = Callable[..., Any]
Routes = dict[str, Callable[[Any], None]]


@pytest.fixture
def watched(browser: Any) -> Iterator[Open]:
    """Pages that must stay clean; `expected` is what a test provokes in the console."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def open_page(link: str, *, expected: str = "(?!)", routes: Routes | None = None, **options: Any) -> Any:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        own = re.match(r"\w+://[^/]*/", link)[0]  # type: ignore[index]
        page.add_init_script(WATCH)
        page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("pageerror", lambda error: wrong.append(f"error {error}"))

        def heard(said: Any) -> None:
            if said.type == "error" and not re.search(expected, said.text):
                wrong.append(f"console {said.text}")

        def asked(sent: Any) -> None:
            if not sent.url.startswith((own, "blob:", "data:")):
                wrong.append(f"asked {sent.url}")

        for path, answer in (routes or {}).items():
            page.route(path, answer)
        page.on("console", heard)
        page.on("request", asked)
        page.goto(link)
        return page

    yield open_page
    for context in contexts:
        for page in context.pages:
            wrong += page.evaluate("window.__violations.map((each) => `policy ${each}`)")
            if page.evaluate("window.__canary") is not None:
                wrong.append("a text was run")
        context.close()
    assert not wrong


@pytest.fixture
def look_at(here: tuple[str, server.Site], watched: Open) -> Open:
    def open_page(fragment: str = "image=e1", **options: Any) -> Any:
        page = watched(f"{here[0]}#{fragment}", **options)
        settled(page, 2 if "with=" in fragment else 1)
        return page

    return open_page


def settled(page: Any, panels: int = 1, gates: str | None = None) -> None:
    """Until every panel shows what was asked last, its rates too."""
    wanted = "" if gates is None else f'[data-gates="{gates}"]'
    page.locator(f".panel[data-rates]{wanted}").nth(panels - 1).wait_for()


@pytest.fixture(scope="module")
def networks() -> dict[str, VisionModel]:
    return {name: read_weights(name).eval() for name in MODELS}


@pytest.fixture
def image(here: tuple[str, server.Site]) -> Callable[..., torch.Tensor]:
    """A picture as a network takes it."""

    def found(picture: str = "e1", model: str = "dmst_cifar10") -> torch.Tensor:
        id, site = f"m{MODELS.index(model)}", here[1]
        return site.lanes[id].submit(site.session.networks[id].prepared, site.session.picture(picture)).result(60)

    return found


def probabilities(model: VisionModel, image: torch.Tensor) -> list[float]:
    with torch.inference_mode():
        return model(image).double().softmax(-1)[0].tolist()


def shown_top(page: Any, panel: int = 0) -> dict[str, float]:
    rows = page.locator(".panel").nth(panel).locator(".top5 li").all_inner_texts()
    return {row.split("\n")[0]: float(row.split("\n")[1].replace("<", "").rstrip(" %")) / 100 for row in rows}


def assert_top(page: Any, model: VisionModel, wanted: list[float], panel: int = 0) -> None:
    shown = shown_top(page, panel)
    assert list(shown) == [model.class_names[i] for i in np.argsort(wanted)[::-1][: len(shown)]]
    for name, value in shown.items():
        assert value == pytest.approx(wanted[model.class_names.index(name)], abs=1.01e-3)


def pixels(page: Any, selector: str = ".map") -> np.ndarray:
    """What a canvas shows, (h, w, 3), on white."""
    drawn = page.locator(selector).first.evaluate("(canvas) => canvas.toDataURL()")
    shown = Image.open(io.BytesIO(base64.b64decode(drawn.partition(",")[2]))).convert("RGBA")
    return np.asarray(Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown).convert("RGB"))


def middles(drawn: np.ndarray, rows: int, columns: int) -> np.ndarray:
    tall, wide = drawn.shape[0] // rows, drawn.shape[1] // columns
    return drawn[tall // 2 :: tall, wide // 2 :: wide]


def png_of(seed: int, size: tuple[int, int] = (60, 40)) -> bytes:
    out, wide, tall = io.BytesIO(), *size
    coarse = np.random.default_rng(seed).integers(0, 255, (tall // 10, wide // 10, 3), np.uint8)
    Image.fromarray(coarse).resize(size).save(out, "PNG")
    return out.getvalue()


# --- what is shown is what was computed ---------------------------------------------------------------------------------


def test_the_page_begins_with_the_cat_and_the_answer_of_the_network(look_at: Open, networks: dict, image: Callable) -> None:
    page = look_at("")
    wanted = probabilities(networks["dmst_cifar10"], image("e0"))
    assert_top(page, networks["dmst_cifar10"], wanted)
    examples = page.locator(".example:visible")
    assert examples.all_inner_texts() == list(PHOTOS)
    assert [each.get_attribute("title") for each in examples.all()] == [f"{name}: {credit}" for name, credit in PHOTOS.items()]
    assert page.locator(".example[aria-pressed=true]").inner_text() == page.locator("#picture-name").inner_text() == "cat"
    assert page.locator("#picture-name").get_attribute("title") == PHOTOS["cat"]
    assert (np.ptp(pixels(page, "#thumb").astype(int), -1) > 20).any()  # in colour
    first, second = sorted(wanted)[::-1][:2]
    assert f"Margin {first - second:.3f}" in page.locator(".margin").inner_text()
    assert page.locator(".said").get_attribute("aria-live") == "polite"
    assert page.locator(".wait").is_hidden()
    page.locator("#model-0").select_option(label="dmst_digits")
    page.locator(".example", has_text="seven").click()
    page.locator('.panel[aria-label="dmst_digits"][data-rates*="\\"e6"]').wait_for()
    assert_top(page, networks["dmst_digits"], probabilities(networks["dmst_digits"], image("e6", "dmst_digits")))
    assert page.locator(".said").inner_text().startswith("7, ")


@pytest.mark.browser
def test_every_layer_paints_the_memberships_of_the_trace(look_at: Open, networks: dict, image: Callable) -> None:
    page = look_at("image=e2&strength=1&layer=0&head=0")
    with torch.inference_mode():
        trace = networks["dmst_cifar10"].trace(image("e2"))
    for layer in range(9):
        head = (3 * layer) % 8
        page.locator("#layer").fill(str(layer))
        page.locator("#heads input").nth(head).check()
        wanted = membership.colour(membership.maps(trace, layer)[0, head])
        assert abs(middles(pixels(page), 8, 8).astype(int) - wanted).max() <= 1, (layer, head)
        panel = page.locator(".panel").first
        assert (panel.get_attribute("data-layer"), panel.get_attribute("data-head")) == (str(layer), str(head))
        gate = trace.layers[layer].parts.gate[0]
        for k, words in enumerate(page.locator(".tile .words").all_inner_texts()):
            assert words == "silent" if gate[k] == 0 else words in (f"{gate[k]:.2f}", "< 0.01"), (layer, k)


# --- interventions ------------------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_a_head_switched_off_moves_the_answer_as_intervene_says(look_at: Open, networks: dict, image: Callable) -> None:
    page, model = look_at("image=e2&layer=5&head=0"), networks["dmst_cifar10"]
    before = probabilities(model, image("e2"))
    page.locator(".tile .switch").nth(0).click()
    settled(page, gates="5.0:0")
    with switched_off(model, {5: [0]}):
        now = probabilities(model, image("e2"))
    assert_top(page, model, now)
    rows = page.locator(".changed tbody tr").all_inner_texts()
    assert len(rows) >= 5
    for row in rows:
        name, old, fresh, change = row.split("\t")
        index = model.class_names.index(name)
        shown = [
            float(each.replace("\N{MINUS SIGN}", "-").replace("<", "").rstrip(" %")) / 100 for each in (old, fresh, change)
        ]
        assert shown == pytest.approx([before[index], now[index], now[index] - before[index]], abs=1.01e-3)
    assert page.locator(".tile").nth(0).locator(".words").inner_text() == "off"
    assert page.locator("svg.dots .spot.off").count() == 1
    assert page.locator("svg.rates path.before").count() == 1
    page.locator("#reset").click()
    settled(page, gates="")
    assert_top(page, model, before)
    assert page.locator(".changed table").is_hidden()
    assert page.locator("#reset").is_disabled()


@pytest.mark.browser
def test_a_forced_gate_is_the_gate(look_at: Open, networks: dict, image: Callable) -> None:
    page, model = look_at("image=e1&layer=6&head=2"), networks["dmst_cifar10"]
    page.locator(".gate-number").fill("0.75")
    settled(page, gates="6.2:0.75")
    with forced_gates(model, {6: {2: 0.75}}):
        assert_top(page, model, probabilities(model, image("e1")))
    assert page.locator(".tile").nth(2).locator(".words").inner_text() == "set 0.75"
    assert page.locator(".gate-range").input_value() == "0.75"
    page.locator(".gate-range").fill("0.2")
    settled(page, gates="6.2:0.2")
    assert page.locator(".tile.forced").count() == 1
    page.keyboard.press("Escape")
    page.locator(".off-here").click()
    settled(page, gates="")


@pytest.mark.browser
def test_two_networks_side_by_side_on_one_picture(look_at: Open, networks: dict, image: Callable) -> None:
    page = look_at("model=dmst_cifar10&with=tost_cifar10&image=e2&layer=4&head=1&strength=1")
    for i, name in enumerate(MODELS[:2]):
        assert_top(page, networks[name], probabilities(networks[name], image("e2", name)), i)
    second = page.locator(".panel").nth(1)
    assert second.locator(".dial").is_hidden()
    assert "no gate" in second.locator(".heads-words").inner_text()
    second.locator(".switch").nth(1).click()
    second.and_(page.locator('[data-gates="4.1:0"]')).wait_for()
    with switched_off(networks["tost_cifar10"], {4: [1]}):
        assert_top(page, networks["tost_cifar10"], probabilities(networks["tost_cifar10"], image("e2", "tost_cifar10")), 1)
    assert second.locator(".tile .words").all_inner_texts() == ["on", "off", *["on"] * 6]
    assert second.locator(".dial").is_hidden()
    assert page.locator(".panel").first.get_attribute("data-gates") == ""
    page.locator("#model-1").select_option(label="dmst_digits")
    page.locator('.panel[aria-label="dmst_digits"] .map').wait_for()
    page.locator("#layer").fill("8")
    assert [each.get_attribute("data-layer") for each in page.locator(".panel").all()] == ["8", "3"]
    page.locator("#model-1").select_option("")
    assert page.locator(".panel").count() == 1


# --- groups -------------------------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_groups_are_regions_and_each_can_be_switched_off(tmp_path: Path, watched: Open) -> None:
    torch.manual_seed(1)
    sizes = {"dim": 24, "depth": 3, "num_heads": 3, "groups": 16, "key_rotary": "none", "num_classes": 5}
    model = enliven(create_model("gmst_cifar", **sizes)).eval()
    model.head.weight.data *= 5  # so that the answer needs a group
    model.blocks[2].operator.out.weight.data *= 20
    model.class_names = ("ant", "bee", "cow", "dog", "eel")
    with serving([str(save_model(model, tmp_path / "grouped")), "dmst_digits"]) as (link, site):
        page = watched(f"{link}#image=e2&layer=1&head=0&strength=1&patch=none")
        settled(page)
        image = site.lanes["m0"].submit(site.session.networks["m0"].prepared, site.session.picture("e2")).result(60)
        with torch.inference_mode():
            trace = model.trace(image)
            pull = groups.pull(model, trace, 2)[0, 1]
        plain = membership.enlarge(membership.picture(image[0]), 20)
        group, strength = membership.groups(trace, 2), membership.maps(trace, 2)
        assert group is not None and len(group[0, 1].unique()) > 1

        def differs(head: int, selector: str = ".map") -> np.ndarray:
            wanted = membership.segmentation(plain, group[0, head], strength[0, head], strength=1.0)
            return abs(middles(pixels(page, selector), 8, 8).astype(int) - middles(wanted, 8, 8)).max(-1)

        assert differs(0).max() > 50  # another layer
        page.locator("#layer").fill("2")
        for head in (0, 2, 1):
            page.locator("#heads input").nth(head).check()
            assert differs(head).max() <= 3, head
        assert page.locator(".legend").is_hidden() and page.locator(".group-words").is_hidden()
        assert page.locator("#map-name").inner_text() == "groups"

        box = page.locator(".map").bounding_box()
        page.locator(".map").click(position={"x": 2.5 * box["width"] / 8, "y": 5.5 * box["height"] / 8})
        mine = int(group[0, 1, 5, 2])
        assert f"row 5, column 2: group {mine}, membership {strength[0, 1, 5, 2]:.3f}" in page.locator(".readout").inner_text()
        words = page.locator(".group-words").inner_text()
        assert words.startswith(f"Group {mine} has mass {groups.mass(trace, 2)[0, 1, mine]:.2f}, of 64 tokens.")
        close = "; ".join(f"row {n // 8}, column {n % 8}" for n in groups.nearest(trace, 2)[0, 1, mine].tolist())
        assert f"nearest to its mean have a dashed frame: {close}." in words
        moved = float(re.search(r"moves this patch by ([\d.e-]+) ", words)[1])  # type: ignore[index]
        assert moved == pytest.approx(pull[5, 2].item(), rel=0.06)

        before = probabilities(model, image)
        switches = page.locator(".groups button")
        assert switches.all_inner_texts() == [str(g) for g in range(16)]
        switches.nth(mine).click()
        settled(page, gates=f"2.1.{mine}:0")
        with groups_off(model, {2: {1: [mine]}}):
            now = probabilities(model, image)
        assert max(abs(a - b) for a, b in zip(before, now, strict=True)) > 0.02
        assert_top(page, model, now)
        assert "You switched off 1 group." in page.locator(".changed-words").inner_text()
        assert "You switched it off" in page.locator(".group-words").inner_text()
        page.keyboard.press("Escape")
        bare = middles(pixels(page), 8, 8).astype(int)
        assert ((np.ptp(bare, -1) <= 1) == (group[0, 1] == mine).numpy()).all()  # grey where the group was
        assert page.locator(".tile").nth(1).locator(".words").inner_text() != "off"
        page.wait_for_url(lambda url: f"2.1.{mine}" in url and "patch=none" in url)
        other = watched(page.evaluate("location.href"))
        settled(other, gates=f"2.1.{mine}:0")
        assert other.locator(".groups [aria-checked=false]").all_inner_texts() == [str(mine)]
        assert (pixels(other) == pixels(page)).all()
        assert page.locator("#reset").inner_text() == "Restore 1 group"
        page.locator("#reset").click()
        settled(page, gates="")
        assert_top(page, model, before)
        page.locator("#model-0").select_option(label="dmst_digits")
        page.locator('.panel[aria-label="dmst_digits"][data-rates]').wait_for()
        assert page.locator(".group-switches").is_hidden() and page.locator(".legend").is_visible()


# --- pictures -----------------------------------------------------------------------------------------------------------


def give(page: Any, how: str, name: str, raw: bytes, kind: str = "image/png") -> None:
    if how == "choose":
        page.locator("#file").set_input_files({"name": name, "mimeType": kind, "buffer": raw})
        return
    page.evaluate(
        """([how, name, kind, bytes]) => {
          const given = new DataTransfer();
          given.items.add(new File([new Uint8Array(bytes)], name, { type: kind }));
          const event = how === "drop" ? new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true })
            : new ClipboardEvent("paste", { clipboardData: given, bubbles: true });
          document.body.dispatchEvent(event);
        }""",
        [how, name, kind, list(raw)],
    )


@pytest.mark.browser
@pytest.mark.parametrize("how", ["choose", "drop", "paste"])
def test_a_picture_is_chosen_dropped_or_pasted(how: str, look_at: Open, networks: dict, image: Callable) -> None:
    page = look_at()
    give(page, how, "mine.png", png_of(1 + len(how)))
    page.locator("#picture-name", has_text="mine.png").wait_for()
    page.locator('.panel[data-rates*="\\"u"]').wait_for()
    id = re.search(r'"image":"(u\w+)"', page.locator(".panel").get_attribute("data-key"))[1]  # type: ignore[index]
    assert page.locator("#picture-size").inner_text() == "60 \N{MULTIPLICATION SIGN} 40 px"
    assert_top(page, networks["dmst_cifar10"], probabilities(networks["dmst_cifar10"], image(id)))
    assert "Reading" not in page.locator("#news").inner_text()


@pytest.mark.browser
def test_what_is_no_picture_is_refused_in_words(look_at: Open) -> None:
    page = look_at(expected="status of 4")
    give(page, "choose", "notes.png", b"these are words, not pixels")
    page.locator("#wrong").wait_for()
    assert "image" in page.locator("#wrong").inner_text() or "picture" in page.locator("#wrong").inner_text()
    assert page.locator("#wrong").get_attribute("role") == "alert"
    page.evaluate("document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: new DataTransfer(), bubbles: true}))")
    assert "never fetches" in page.locator("#wrong").inner_text()
    page.evaluate(
        """() => {
          const given = new DataTransfer();
          given.items.add(new File([new Uint8Array(11 * 2 ** 20)], "huge.png", { type: "image/png" }));
          document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: given, bubbles: true }));
        }"""
    )
    assert page.locator("#wrong").inner_text() == "huge.png has 11.0 MiB. The limit is 10 MiB."
    page.locator(".example").nth(2).click()
    page.locator('.panel[data-rates*="\\"e2"]').wait_for()


# --- when things go wrong -----------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_a_server_that_does_not_answer_is_said_and_tried_again(look_at: Open) -> None:
    page = look_at(expected="ERR_FAILED|status of 503")
    page.route("**/api/look", lambda route: route.abort())
    page.locator(".tile .switch").nth(0).click()
    page.locator(".fault").wait_for()
    assert "still running" in page.locator(".fault").inner_text()
    page.unroute("**/api/look")
    page.route("**/api/look", lambda route: route.fulfill(status=503, json={"error": "<b>64 requests</b> are waiting"}))
    page.locator(".retry").click()
    page.locator(".fault p", has_text="<b>64 requests</b> are waiting").wait_for()
    page.unroute("**/api/look")
    page.locator(".retry").click()
    page.locator('.panel[data-gates$=".0:0"]').wait_for()
    assert page.locator(".fault").is_hidden()


# --- links ---------------------------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_a_link_brings_everything_back(look_at: Open, here: tuple, watched: Open) -> None:
    page = look_at("model=dmst_cifar10&with=tost_cifar10&image=e3")
    page.locator("#layer").fill("6")
    page.locator("#heads input").nth(3).check()
    page.locator("#stretch").check()
    page.get_by_role("radio", name="gradient").check()
    page.locator(".panel").nth(0).locator(".gate-number").fill("0.5")
    page.locator(".panel").nth(1).locator(".switch").nth(2).click()
    page.locator(".map").first.click(position={"x": 30, "y": 50})
    page.locator("select.rate").first.select_option("complete")
    page.locator(".panel").nth(0).and_(page.locator('[data-rates*="0.5"]')).wait_for()
    page.locator(".panel").nth(1).and_(page.locator('[data-gates="6.2:0"]')).wait_for()
    page.wait_for_url(lambda url: "rate=complete" in url and "with-gates=6.2" in url)
    link = page.evaluate("location.href")
    other = watched(link)
    settled(other, 2)
    other.locator(".panel").nth(0).and_(other.locator('[data-gates="6.3:0.5"]')).wait_for()
    told = """() => [[...document.querySelectorAll(".panel")].map((p) => ({...p.dataset})),
      [...document.querySelectorAll(".said, .readout, .see-title, #picture-name")].map((e) => e.textContent),
      ["#layer", "select.rate"].map((each) => document.querySelector(each).value), document.querySelector("#stretch").checked,
      [...document.querySelectorAll("#heads input")].findIndex((e) => e.checked)]"""
    assert other.evaluate(told) == page.evaluate(told)
    assert (pixels(other) == pixels(page)).all()
    assert "gates=6.3" in link and "image=e3" in link


# --- looks, and hands on the keyboard -----------------------------------------------------------------------------------


@pytest.mark.browser
def test_everything_is_done_by_keyboard(look_at: Open) -> None:
    page = look_at("image=e1&layer=5&head=7")
    panel = page.locator(".panel").first
    page.locator(".map").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    assert (panel.get_attribute("data-layer"), panel.get_attribute("data-head")) == ("6", "6")
    page.keyboard.press("2")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowDown")
    assert (panel.get_attribute("data-layer"), panel.get_attribute("data-head")) == ("5", "3")
    page.keyboard.press("x")
    settled(page, gates="5.3:0")
    page.keyboard.press("r")
    settled(page, gates="")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowUp")
    assert "row 3, column 5" in page.locator(".readout").inner_text()
    page.keyboard.press("Escape")
    assert "row" not in page.locator(".readout").inner_text()
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Escape")
    assert page.locator("#help").is_hidden() and panel.get_attribute("data-layer") == "5"
    page.locator("#layer").focus()
    page.keyboard.press("ArrowLeft")
    assert panel.get_attribute("data-layer") == "4"


# --- texts of others ----------------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_hostile_names_of_classes_and_networks_are_text(tmp_path: Path, watched: Open) -> None:
    folders = []
    for i in range(2):
        names = ATTACKS[5 * i : 5 * i + 5]
        model = create_model("dmst_digits", dim=8, depth=2, num_heads=2, num_classes=5, in_chans=3)
        model.class_names = tuple(names)
        folders.append(str(save_model(model, tmp_path / f"{i}{names[1].replace('/', '')}")))
    with serving(folders) as (link, _):
        page = watched(link)
        for i in range(2):
            page.locator("#model-0").select_option(index=i)
            name = Path(folders[i]).name
            page.locator(".panel .top5 li .class").nth(4).wait_for()
            settled(page)
            assert page.locator(".panel .name").text_content() == visible(name)
            shown = page.locator(".top5 .class")
            page.locator(".tile .switch").first.click()
            settled(page, gates="1.0:0")
            assert set(shown.all_text_contents()) == set(map(visible, ATTACKS[5 * i : 5 * i + 5]))
            assert page.locator(".top5 .class *, .name *, tbody th *, option *").count() == 0
