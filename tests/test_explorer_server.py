"""The server of `dmst explore` on a real socket: its numbers are those of `analysis`, and it gives nothing else away.

Every answer in this file passes `ask`, which looks for the headers, and in errors for JSON without paths or tracebacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import dmst
from dmst import cli
from dmst.analysis import certify, layer_rates, membership
from dmst.analysis.intervene import forced_gates, switched_off
from dmst.analysis.membership import attention_received, enlarge
from dmst.analysis.scored import orders_of
from dmst.engine.classify import classify
from dmst.engine.prepare import read_weights
from dmst.errors import MissingExtraError, NonFiniteError
from dmst.explorer import server as serving
from dmst.explorer import session as sessions
from dmst.explorer.connections import Limits
from dmst.explorer.guard import HEADERS, Guard
from dmst.explorer.server import Site, listening, server_of
from dmst.explorer.session import Session
from dmst.models import Trace, VisionModel, create_model, save_model
from dmst.photos import PHOTOS
from tests.cases import excite

SMALL: dict[str, Any] = {"dim": 24, "depth": 2, "num_heads": 3, "img_size": 32, "patch_size": 8, "num_classes": 7}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "m1": ("dmst_cifar", {}),
    "m2": ("tost_cifar", {}),
    "m3": ("vit_tiny", {}),
    "m4": ("vit_cifar", {}),
    "m5": ("vit_cifar", {"operator": "xca"}),
    "m6": ("dmst_cifar", {"mode": "proximal"}),
}
SECRET = "canary-5f1d"


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """One server in this process, and a client of it."""

    def __init__(self, session: Session, host: str = "127.0.0.1", token: str = "") -> None:
        self.session, self.site = session, Site(session)
        self.socket = listening("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.server = server_of(self.site, host, token)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.site.close()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(
        self, method: str, path: str, body: Any = None, line: http.client.HTTPConnection | None = None, **more: str
    ) -> Answer:
        """A header is a keyword with _ for -; "" leaves it out. JSON where the body is no bytes."""
        headers = {name.replace("_", "-"): text for name, text in ({"X_Dmst": "1"} | more).items() if text}
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        own = line or self.connect()
        try:
            own.putrequest(method, path, skip_host="Host" in more, skip_accept_encoding=True)
            for name, text in headers.items():
                own.putheader(name, text)
            if sent is not None and "Content-Length" not in headers:
                own.putheader("Content-Length", str(len(sent)))
            own.endheaders(sent)
            return checked(own.getresponse())
        finally:
            if line is None:
                own.close()

    def look(self, model: str, image: str, gates: Any = None, what: str = "look", **more: Any) -> dict[str, Any]:
        found = self.ask("POST", f"/api/{what}", {"model": model, "image": image, "gates": gates or {}}, **more)
        assert found.status == 200, found
        return found.json

    def give(self, raw: bytes) -> Answer:
        return self.ask("POST", "/api/images", raw)


def checked(response: http.client.HTTPResponse) -> Answer:
    found = Answer(response.status, {name.lower(): text for name, text in response.getheaders()}, response.read())
    for name, text in HEADERS.items():
        assert found.headers[name] == text
    assert not [name for name in found.headers if name.startswith("access-control") or name == "server"]
    if found.status >= 400:
        assert found.headers["content-type"] == "application/json"
        assert set(found.json) <= {"error", "state"} and found.json["error"]
    if not found.body.startswith((b"<!", b"\x89PNG")):
        places = [str(Path(dmst.__file__).parents[1]), tempfile.gettempdir(), os.getcwd(), SECRET]
        for trace in (b"Traceback", b'File "', b"site-packages", *(each.encode() for each in places)):
            assert trace not in found.body
    assert SECRET.encode() not in found.body
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("networks")
    for i, (name, options) in enumerate(NETWORKS.values()):
        torch.manual_seed(i)
        model = create_model(name, **SMALL | options)
        excite(model)
        save_model(model, root / f"{name}{i}")
    broken = root / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    return {id: root / f"{name}{i}" for i, (id, (name, _)) in enumerate(NETWORKS.items())} | {"m7": broken}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Server]:
    made = Server(Session(["dmst_digits", *map(str, folders.values())]))
    made.site.load()
    for network in made.session.networks.values():
        assert network.ready.wait(60)
    yield made
    made.close()


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, VisionModel]:
    """Loaded apart from the server."""
    return {"m0": read_weights("dmst_digits")} | {id: read_weights(folders[id]) for id in NETWORKS}


def until(done: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)
    return done()


def traced(model: VisionModel, raw: bytes, folder: Path) -> tuple[Tensor, Trace, list[tuple[str, float]]]:
    """As `dmst classify` sees these bytes."""
    (folder / "photo").write_bytes(raw)
    (answer,) = classify(model, [folder / "photo"], traced=True)
    assert answer.image is not None and answer.trace is not None
    return answer.image, answer.trace, answer.top


def near(values: Tensor) -> Any:
    return pytest.approx(values.detach().double().numpy(), rel=2e-4, abs=2e-6)


def encoded(pixels: np.ndarray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(out, kind, **options)
    return out.getvalue()


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[0]).integers(0, 256, shape, dtype=np.uint8)


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_start_says_what_there_is(server: Server, models: dict[str, VisionModel]) -> None:
    told = server.ask("GET", "/api/start").json
    assert told["version"] == dmst.__version__ and told["upload_limit"] == 10 * 2**20
    assert [each["id"] for each in told["examples"]] == [f"e{i}" for i in range(7)]
    assert [each["name"] for each in told["examples"]] == [*PHOTOS, "seven"] and told["examples"][0]["name"] == "cat"
    assert [each["credit"] for each in told["examples"]][:6] == list(PHOTOS.values())
    assert [each["digit"] for each in told["examples"]] == [False] * 6 + [True]
    assert (told["examples"][0]["width"], told["examples"][0]["height"]) == (385, 256)
    for each in told["models"][:-1]:
        model = models[each["id"]]
        assert each["state"] == "ready" and each["words"] == ""
        assert each["parameters"] == sum(weight.numel() for weight in model.parameters())
        assert (each["operator"], each["depth"], each["heads"]) == (
            model.config.operator,
            len(model.blocks),
            model.config.num_heads,
        )
        assert (
            each["channels"] == model.config.in_chans
            and each["classes"] == model.config.num_classes
            and tuple(each["image_size"]) == model.config.img_size
        )
    assert [each["gates"] for each in told["models"]] == [True, True, False, False, False, False, True, None]


def test_a_network_that_fails_is_told_of(server: Server) -> None:
    failed = server.ask("GET", "/api/start").json["models"][-1]
    assert (
        failed["state"] == "failed" and failed["name"] == "broken" and "broken" in failed["words"] and failed["depth"] is None
    )
    for what in ("look", "rates"):
        said = server.ask("POST", f"/api/{what}", {"model": "m7", "image": "e0", "gates": {}})
        assert said.status == 409 and said.json["state"] == "failed"
    assert server.ask("GET", "/api/seen/m7/e0").status == 409


@pytest.mark.parametrize("id", ["m0", *NETWORKS])
def test_a_look_is_the_trace(server: Server, models: dict[str, VisionModel], id: str, tmp_path: Path) -> None:
    """Of an example, and of a picture that was given: prepared as `dmst classify` prepares it."""
    for picture in ("e0", server.give(encoded(noise(61, 83, 3), "JPEG")).json["image"]):
        raw = server.ask("GET", f"/api/images/{picture}").body
        _, trace, top = traced(models[id], raw, tmp_path)
        told = server.look(id, picture)
        assert (told["model"], told["image"], told["gates"]) == (id, picture, {})
        shares = trace.logits[0].double().softmax(-1)
        assert told["probabilities"] == near(shares) and told["margin"] == pytest.approx(top[0][1] - top[1][1], abs=1e-5)
        assert [each["class"] for each in told["top"]] == [name for name, _ in top]
        assert [each["probability"] for each in told["top"]] == [told["probabilities"][each["index"]] for each in told["top"]]
        assert told["grid"] == list(trace.grid) and told["prefix"] == trace.prefix and len(told["layers"]) == len(trace.layers)
        for number, (layer, real) in enumerate(zip(told["layers"], trace.layers, strict=True)):
            if real.parts.membership is not None:
                assert layer["kind"] == "membership" and (layer["low"], layer["high"]) == (0, 1)
                assert np.array(layer["maps"]) == near(real.parts.membership[0, :, trace.prefix :])
                assert "ember" in layer["means"]
            else:
                received = attention_received(trace, number)
                assert layer["kind"] == "attention" and layer["low"] == 0
                assert np.array(layer["maps"]) == near(torch.zeros(0) if received is None else received[0])
                assert layer["high"] == (1 if received is None else pytest.approx(received.max().item(), rel=1e-4))
            gate = None if real.parts.gate is None else near(real.parts.gate[0])
            assert layer["gate"] == gate and layer["computed_gate"] == gate


@pytest.mark.parametrize("id", ["m0", *NETWORKS])
def test_rates_are_those_of_analysis(server: Server, models: dict[str, VisionModel], id: str, tmp_path: Path) -> None:
    model = models[id]
    image, _, _ = traced(model, server.ask("GET", "/api/images/e1").body, tmp_path)
    for gates in ({}, {"1": {"2": 0.0}}):
        told = server.look(id, "e1", gates, what="rates")
        with forced_gates(model, {int(i): {int(k): g for k, g in row.items()} for i, row in gates.items()}):
            rates, certificate = layer_rates(model, image), certify(model, image)
            slope = orders_of(model, image)["gradient"][0]
        for name, row in told["rates"].items():
            assert row == [None if np.isnan(x) else pytest.approx(x, rel=1e-4, abs=1e-5) for x in rates.mean[name]]
        assert set(told["rates"]) == {"variational", "complete", "coding", "active"} and told["convention"] == rates.convention
        most = slope.abs().max().item()
        assert told["gradient"]["map"] == near(slope)
        assert (told["gradient"]["low"], told["gradient"]["high"]) == pytest.approx((-most, most), rel=1e-4)
        change = [None if each is None else each.total["frozen"].mean for each in certificate.layers]
        assert told["change"] == [x if x is None else pytest.approx(x, rel=1e-3, abs=1e-5) for x in change]
        if any(certificate.layers):
            for i, (each, words) in enumerate(zip(certificate.layers, told["certificates"], strict=True)):
                assert each is not None
                how = "lowers" if each.total["frozen"].mean < 0 else "raises"
                assert words.startswith(
                    f"Layer {i} {how} its own rate by {abs(each.total['frozen'].mean):#.2g} nats for this picture"
                )
                assert ("guarantees" in words) == bool(each.guaranteed)
        else:
            assert told["certificates"] == [certificate.missing]


def test_forced_gates_are_those_of_intervene(server: Server, models: dict[str, VisionModel], tmp_path: Path) -> None:
    raw = server.ask("GET", "/api/images/e2").body
    plain = server.look("m0", "e2")
    for asked in ({"1": {"0": 0.25, "3": 1.5}}, {"0": {"2": 0.0}, "2": {"1": 0.7}}, {"3": {"1": -2}}):
        gates = {int(i): {int(k): float(g) for k, g in row.items()} for i, row in asked.items()}
        with forced_gates(models["m0"], gates):
            _, trace, _ = traced(models["m0"], raw, tmp_path)
        told = server.look("m0", "e2", asked)
        assert told["gates"] == asked and told["probabilities"] == near(trace.logits[0].softmax(-1))
        for i, (layer, real) in enumerate(zip(told["layers"], trace.layers, strict=True)):
            assert layer["gate"] == near(real.parts.gate[0]) and np.array(layer["maps"]) == near(real.parts.membership[0])
            own = models["m0"].blocks[i].operator.decompose(real.normed, grid=trace.grid).gate[0]
            assert layer["computed_gate"] == near(own)
    assert server.look("m0", "e2") == plain  # nothing is left behind


@pytest.mark.parametrize("id", NETWORKS)
def test_heads_switched_off_are_those_of_intervene(
    server: Server, models: dict[str, VisionModel], id: str, tmp_path: Path
) -> None:
    raw = server.ask("GET", "/api/images/e1").body
    with switched_off(models[id], {0: [1], 1: [0, 2]}):
        _, trace, _ = traced(models[id], raw, tmp_path)
    told = server.look(id, "e1", {"0": {"1": 0}, "1": {"0": 0.0, "2": 0}})
    assert told["probabilities"] == near(trace.logits[0].softmax(-1))
    assert told["probabilities"] != server.look(id, "e1")["probabilities"]


def test_what_has_no_gate_is_not_weighed(server: Server) -> None:
    said = server.ask("POST", "/api/look", {"model": "m4", "image": "e0", "gates": {"0": {"1": 0.5}}})
    assert said.status == 422 and "has no gate" in said.json["error"]


def test_numbers_that_are_none_are_null(server: Server) -> None:
    """A picture of infinities: no picture is, but a network may make them of one."""
    endless = sessions.Picture("u0", 1, 1, b"", {id: torch.full((1, 3, 32, 32), torch.inf) for id in ("m1", "m4")})
    server.session._uploads["u0"] = endless
    for id in ("m1", "m4"):
        said = server.ask("POST", "/api/look", {"model": id, "image": "u0", "gates": {}})
        assert said.status == 422 and "answers this picture with NaN or infinity" in said.json["error"]  # never a prediction
        assert server.look(id, "u0", what="rates")["rates"]["coding"] == [None, None]
    assert server.look("m1", "e0", {"0": {"0": 1e6, "1": -1e6}})["probabilities"][0] is not None


def test_seen_is_what_the_network_takes(server: Server, models: dict[str, VisionModel], tmp_path: Path) -> None:
    for id in ("m0", "m1"):
        image, _, _ = traced(models[id], server.ask("GET", "/api/images/e1").body, tmp_path)
        answer = server.ask("GET", f"/api/seen/{id}/e1")
        assert answer.headers["content-type"] == "image/png"
        shown = np.asarray(Image.open(io.BytesIO(answer.body)).convert("RGB"))
        side = image.shape[-1]
        assert shown.shape[0] == shown.shape[1] >= 256 and shown.shape[0] % side == 0
        step = shown.shape[0] // side
        assert np.array_equal(shown, enlarge(membership.picture(image[0]), step))


def test_a_picture_is_shown_no_larger_than_it_needs(server: Server) -> None:
    for pixels, size in ((noise(40, 1300, 3), (512, 16)), (noise(30, 20, 3), (20, 30))):
        said = server.give(encoded(pixels)).json
        assert (said["height"], said["width"]) == pixels.shape[:2] and re.fullmatch("u[0-9a-f]{32}", said["image"])
        answer = server.ask("GET", f"/api/images/{said['image']}")
        assert answer.headers["content-type"] == "image/png" and Image.open(io.BytesIO(answer.body)).size == size


def test_the_oldest_pictures_go(server: Server) -> None:
    first = server.give(encoded(noise(9, 9, 3))).json["image"]
    assert server.look("m1", first)["top"]
    for _ in range(sessions.UPLOADS):
        last = server.give(encoded(noise(9, 9, 3))).json["image"]
    assert server.ask("GET", f"/api/images/{first}").status == 404 and server.ask("GET", f"/api/images/{last}").status == 200
    assert server.ask("POST", "/api/look", {"model": "m1", "image": first, "gates": {}}).status == 404
    assert len(server.session._uploads) == sessions.UPLOADS


def test_keep_is_one_file(server: Server) -> None:
    views = [{"model": "m0", "image": "e0", "gates": {"1": {"1": 0}}}, {"model": "m1", "image": "e0", "gates": {}}]
    said = server.ask("POST", "/api/keep", {"views": views, "state": {"layer": 1, "words": "</script><b>\ud800"}})
    assert said.status == 200 and said.headers["content-type"].startswith("text/html")
    assert said.headers["content-disposition"] == 'attachment; filename="dmst-view.html"'
    assert b"</script><b>" not in said.body
    for bad in ([], views * 3, {}, [1], [{"model": 1}], None):
        assert server.ask("POST", "/api/keep", {"views": bad, "state": {}}).status == 422
    assert server.ask("POST", "/api/keep", {"views": views, "state": []}).status == 422
    assert (
        server.ask("POST", "/api/keep", {"views": [{"model": "m0", "image": "none", "gates": {}}], "state": {}}).status == 404
    )


# --- what is refused -------------------------------------------------------------------------------------------------

UP = ["..", "%2e%2e", "..%2f", "%2e%2e%2f", "..\\", "%5c..", "....//", "%252e%252e", "..;", "%c0%ae%c0%ae", "..%00", ".%2e"]
TRAVERSALS = [
    f"{up}/{up}/{end}" for up in UP for end in ("canary.txt", "etc/passwd", "session.py", "%63anary.txt", "canary.txt%00.js")
]


@pytest.mark.parametrize(
    "route", ["/", "/static/", "/api/images/", "/api/seen/", "/api/seen/m0/", "/api/start/", "/static/app.js/"]
)
def test_no_path_leads_out(server: Server, route: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 of them a route; `ask` looks for the canary, which lies where the server was started and where its files are."""
    assert len(TRAVERSALS) == 60
    (tmp_path / "canary.txt").write_text(SECRET)
    monkeypatch.chdir(tmp_path)
    line = server.connect()
    for path in [
        *TRAVERSALS,
        str(tmp_path / "canary.txt"),
        f"file://{tmp_path}/canary.txt",
        "//127.0.0.1/canary.txt",
        "__init__.py",
    ]:
        assert server.ask("GET", route + path, line=line).status in (400, 404)
        if line.sock is None:
            line = server.connect()
    line.close()


def test_the_page_comes_from_a_table(server: Server) -> None:
    assert server.ask("GET", "/").headers["content-type"] == "text/html; charset=utf-8"
    for name, (raw, kind) in serving.static().items():
        answer = server.ask("GET", f"/static/{name}")
        assert answer.status == 200 and answer.body == raw and answer.headers["content-type"] == kind


def test_nothing_else_is_there(server: Server) -> None:
    for path in ("/docs", "/redoc", "/openapi.json", "/api", "/api/", "/api/start/", "/static", "/static/", "/favicon.ico"):
        assert server.ask("GET", path).status == 404
    for method, path in (
        ("POST", "/"),
        ("PUT", "/api/look"),
        ("GET", "/api/look"),
        ("DELETE", "/api/images/e0"),
        ("OPTIONS", "/api/look"),
    ):
        assert server.ask(method, path).status == 404


STRANGERS = ["evil.example", "127.0.0.1.evil.example", "evil.example:80", "127.0.0.1@evil.example", "", "localhost/", "[::1",
             "192.168.1.5", "0.0.0.0"]  # fmt: skip


@pytest.mark.parametrize("host", STRANGERS)
def test_other_names_are_refused(server: Server, host: str) -> None:
    for path in ("/", "/api/start", "/static/app.js", "/nothing"):
        assert server.ask("GET", path, Host=host).status in (400, 403)
    assert server.ask("POST", "/api/look", {"model": "m0", "image": "e0", "gates": {}}, Host=host).status in (400, 403)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "LOCALHOST", "[::1]:80"])
def test_own_names_are_known(server: Server, host: str) -> None:
    assert server.ask("GET", "/api/start", Host=host).status == 200
    assert server.ask("GET", "/api/start", Host=host, Origin=f"http://{host}").status == 200


def test_two_names_are_one_too_many(server: Server) -> None:
    assert raw_ask(server, b"GET /api/start HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n").status in (400, 403)
    both = {
        "method": "GET",
        "path": "/",
        "headers": [(b"host", b"127.0.0.1"), (b"host", b"evil.example")],
    }  # h11 refuses it too
    assert Guard(None).refusal(both) and not Guard(None).refusal(both | {"headers": both["headers"][:1]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1", "http://localhost"]
)
def test_other_pages_may_not_ask(server: Server, origin: str) -> None:
    for method, path in (("GET", "/api/start"), ("POST", "/api/look"), ("OPTIONS", "/api/look")):
        assert server.ask(method, path, b"{}", Origin=origin, Host=f"127.0.0.1:{server.port}").status == 403


def test_a_post_says_that_it_is_ours(server: Server) -> None:
    for path in ("/api/look", "/api/rates", "/api/images", "/api/keep"):
        for header in ("", "2", "true"):
            said = server.ask("POST", path, {"model": "m0", "image": "e0", "gates": {}}, X_Dmst=header)
            assert said.status == 403 and "X-Dmst" in said.json["error"]


def test_other_machines_need_the_token(tmp_path: Path) -> None:
    token = "ab" * 32
    made = Server(Session(["dmst_digits"]), host="0.0.0.0", token=token)
    try:
        for given in ("", "ab" * 31, "ab" * 31 + "ac", "\xe9" * 64, token.upper()):
            for method, path in (
                ("GET", "/api/start"),
                ("GET", "/api/images/e0"),
                ("POST", "/api/look"),
                ("GET", "/api/nothing"),
            ):
                assert made.ask(method, path, b"{}" if method == "POST" else None, X_Dmst_Token=given).status == 403
        assert made.ask("GET", "/api/start", X_Dmst_Token=token).json["models"][0]["state"] == "waiting"
        said = made.ask("POST", "/api/look", {"model": "m0", "image": "e0", "gates": {}}, X_Dmst_Token=token)
        assert said.status == 409 and said.json["state"] == "waiting"
        assert made.ask("GET", "/").status == 200  # the page itself, which brings it
        assert made.ask("GET", "/", Host="192.168.1.5:80").status == 200  # an address cannot be rebound
        assert made.ask("GET", "/", Host="evil.example").status == 403
    finally:
        made.close()


def test_the_link_has_the_token() -> None:
    assert serving.link_to("127.0.0.1", 80, "") == "http://127.0.0.1:80/"
    assert serving.link_to("::1", 80, "") == "http://[::1]:80/"
    assert serving.link_to("0.0.0.0", 80, "ab") == f"http://{socket.gethostname()}:80/#token=ab"
    assert not Guard(None, "10.0.0.7").knows("10.0.0.8") and Guard(None, "10.0.0.7").knows("10.0.0.7:80")  # type: ignore[arg-type]


def raw_ask(server: Server, sent: bytes) -> Answer:
    with socket.create_connection(("127.0.0.1", server.port), 20) as line:
        line.sendall(sent)
        response = http.client.HTTPResponse(line)
        response.begin()
        return checked(response)


@pytest.mark.parametrize(
    "sent", [b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 99_999, b"GET / HTTP/1.1\r\nHost 127\r\n\r\n"]
)
def test_what_is_no_http_gets_the_headers_too(server: Server, sent: bytes) -> None:
    assert raw_ask(server, sent).status in (400, 403)


POST = "POST {} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Dmst: 1\r\n"


@pytest.mark.parametrize(
    ("path", "most"), [("/api/images", sessions.UPLOAD), ("/api/look", serving.QUESTION), ("/api/keep", serving.QUESTION)]
)
def test_too_much_is_refused(server: Server, path: str, most: int) -> None:
    head = POST.format(path)
    declared = raw_ask(server, f"{head}Content-Length: {most + 1}\r\n\r\n".encode())
    assert declared.status == 413 and f"{most:,}" in declared.json["error"]
    assert raw_ask(server, f"{head}Content-Length: {'9' * 30}\r\n\r\n".encode()).status in (400, 413)
    with socket.create_connection(("127.0.0.1", server.port), 20) as line:
        line.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        with contextlib.suppress(ConnectionError):  # it closes as soon as it is too much
            for _ in range(most // 65536 + 1):
                line.sendall(chunk)
        response = http.client.HTTPResponse(line)
        response.begin()
        assert checked(response).status == 413


def test_as_much_as_is_allowed_is_read(server: Server) -> None:
    raw = encoded(noise(30, 30, 3), "BMP")
    assert server.give(raw + bytes(sessions.UPLOAD - len(raw))).status == 200


def test_forms_are_not_taken(server: Server) -> None:
    said = server.ask("POST", "/api/images", b"--x\r\n", Content_Type="Multipart/form-data; boundary=x")
    assert said.status == 415 and "form" in said.json["error"]


def png_of(width: int, height: int, data: bytes = b"", depth: int = 8, colour: int = 2) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


HOSTILE = {
    "empty": b"",
    "bytes": bytes(range(256)) * 40,
    "bomb": png_of(30_000, 30_000),
    "largest sides": png_of(2**31 - 1, 2**31 - 1),
    "nothing wide": png_of(0, 10),
    "bomb of zeros": png_of(7071, 7071, bytes(1000)),
    "wide": encoded(noise(2, 601, 3)),
    "cut png": encoded(noise(50, 50, 3))[:-400],
    "cut jpeg": encoded(noise(50, 50, 3), "JPEG")[:200],
    "32 bits": encoded(Image.new("I", (9, 9)), "TIFF"),
    "floats": encoded(Image.new("F", (9, 9)), "TIFF"),
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='10' height='10'><image href='/etc/passwd'/></svg>",
    "page": b"<!doctype html><title>x</title>",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "zip": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_pictures_are_refused(server: Server, kind: str) -> None:
    said = server.give(HOSTILE[kind])
    assert said.status == 422 and said.json["error"].startswith("the picture: it ")


def test_mutated_pictures_do_no_harm(server: Server) -> None:
    chance = random.Random(0)
    sources = [encoded(noise(24, 24, 3)), encoded(noise(24, 24, 3), "JPEG")]
    seen = set()
    for i in range(200):
        raw = bytearray(sources[i % 2])
        for _ in range(chance.randint(1, 8)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        said = server.give(bytes(raw[: chance.randint(1, len(raw))]) if i % 5 == 0 else bytes(raw))
        seen.add(said.status)
        assert said.status in (200, 422)
    assert seen == {200, 422} and server.look("m1", "e0")["top"]


QUESTION: dict[str, Any] = {"model": "m0", "image": "e0", "gates": {}}
WRONG: dict[str, tuple[int, Any]] = {
    "no json": (400, b"{"),
    "no bytes": (400, b""),
    "no text": (400, b"\xff\xfe{}"),
    "nan": (400, b'{"model": "m0", "image": "e0", "gates": {"0": {"0": NaN}}}'),
    "deep": (400, b"[" * 60_000),
    "digits": (400, b'{"model": ' + b"9" * 60_000 + b"}"),
    "list": (422, []),
    "null": (422, None),
    "no keys": (422, {}),
    "other keys": (422, QUESTION | {"path": "/etc/passwd"}),
    "number for a model": (422, QUESTION | {"model": 0}),
    "list for a picture": (422, QUESTION | {"image": ["e0"]}),
    "no such model": (404, QUESTION | {"model": "m99"}),
    "path for a model": (404, QUESTION | {"model": "../dmst_digits"}),
    "no such picture": (404, QUESTION | {"image": "e99"}),
    "link for a picture": (404, QUESTION | {"image": "http://127.0.0.1/x.png"}),
    "lone surrogate": (404, QUESTION | {"image": "\ud800"}),
    "long name": (404, QUESTION | {"image": "x" * 60_000}),
    "gates as a list": (422, QUESTION | {"gates": []}),
    "gates as text": (422, QUESTION | {"gates": "all"}),
    "layer as a list": (422, QUESTION | {"gates": {"0": [1]}}),
    "no such layer": (422, QUESTION | {"gates": {"4": {"0": 0}}}),
    "layer below 0": (422, QUESTION | {"gates": {"-1": {"0": 0}}}),
    "no such head": (422, QUESTION | {"gates": {"0": {"4": 0}}}),
    "leading zero": (422, QUESTION | {"gates": {"00": {"0": 0}}}),
    "other digits": (422, QUESTION | {"gates": {"\u0661": {"0": 0}}}),
    "no layer": (422, QUESTION | {"gates": {"": {"0": 0}}}),
    "bool for a gate": (422, QUESTION | {"gates": {"0": {"0": True}}}),
    "null for a gate": (422, QUESTION | {"gates": {"0": {"0": None}}}),
    "text for a gate": (422, QUESTION | {"gates": {"0": {"0": "0"}}}),
    "endless gate": (422, b'{"model": "m0", "image": "e0", "gates": {"0": {"0": 1e999}}}'),
    "too long": (413, b" " * (serving.QUESTION + 1)),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_questions_that_are_none(server: Server, kind: str) -> None:
    status, body = WRONG[kind]
    sent = json.dumps(body).encode() if not isinstance(body, bytes) else body
    for what in ("look", "rates"):
        assert server.ask("POST", f"/api/{what}", sent).status == status


def test_wrong_ids(server: Server) -> None:
    for path in (
        "/api/images/u" + "0" * 32,
        "/api/images/m0",
        "/api/seen/m9/e0",
        "/api/seen/e0/m0",
        "/api/seen/m0/e99",
        "/api/images/e0/e1",
    ):
        assert server.ask("GET", path).status == 404


def test_what_goes_wrong_inside_stays_inside(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.session, "start", lambda: 1 / 0)
    said = server.ask("GET", "/api/start")
    assert said.status == 500 and "ZeroDivisionError" not in said.json["error"]
    assert until(lambda: "ZeroDivisionError" in caplog.text)


def test_what_is_around_the_application() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "lifespan"
        await send("through")

    async def said(kind: str) -> list[Any]:
        found: list[Any] = []

        async def send(message: Any) -> None:
            found.append(message)

        scope = {"type": kind, "method": "GET", "path": "/", "headers": [(b"host", b"localhost")]}
        await Guard(app)(scope, None, send)  # type: ignore[arg-type]
        return found

    assert asyncio.run(said("lifespan")) == ["through"]
    assert asyncio.run(said("websocket")) == [{"type": "websocket.close", "code": 1008}]
    start, body = asyncio.run(said("http"))  # the application fails before it answers
    assert start["status"] == 500 and set(json.loads(body["body"])) == {"error"}
    assert {name.decode() for name, _ in start["headers"]} >= set(HEADERS)


# --- many at once ----------------------------------------------------------------------------------------------------


def test_64_wait_and_the_next_is_told_so(server: Server) -> None:
    gate = threading.Event()
    server.site.lanes["m0"].submit(gate.wait)
    try:
        with ThreadPoolExecutor(serving.WAITING) as clients:
            waiting = [clients.submit(server.look, "m0", "e0") for _ in range(serving.WAITING)]
            assert until(lambda: server.site.waiting == serving.WAITING)
            said = server.ask("POST", "/api/look", QUESTION)
            assert said.status == 503 and "64 requests are waiting" in said.json["error"]
            assert server.ask("GET", "/api/start").status == 200
            gate.set()
            told = [each.result() for each in waiting]
    finally:
        gate.set()
    assert all(each == told[0] for each in told) and server.site.waiting == 0 and server.look("m0", "e0") == told[0]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_32_clients_get_what_one_gets(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks with and without forced gates, rates, pictures, state, uploads; few answers are kept. 50 requests each, and of
    eight more, after which there is no more memory held than before."""
    monkeypatch.setattr(sessions, "KEPT", 4)
    gates: list[dict[str, Any]] = [{}, {"0": {"1": 0.0}}, {"2": {"0": 0.5, "3": 0.0}}, {"3": {"2": 0.25}}]
    questions = [("POST", "/api/look", QUESTION | {"gates": g, "image": f"e{i}"}) for g in gates for i in range(6)]
    questions += [("POST", "/api/rates", QUESTION | {"gates": g}) for g in gates]
    questions += [("GET", path, None) for path in ("/api/start", "/api/images/e1", "/api/seen/m1/e2", "/", "/api/images/none")]
    alone = [server.ask(*each)[::2] for each in questions]
    raw = encoded(noise(20, 20, 3))

    def client(number: int, requests: int) -> list[tuple[int, Any]]:
        chance, line, found = random.Random(number), server.connect(), []
        for _ in range(requests - 1):
            i = chance.randrange(len(questions))
            method, path, body = questions[i]
            found.append((i, server.ask(method, path, body, line=line)[::2]))
        found.append((-1, server.ask("POST", "/api/images", raw, line=line)[::2]))
        line.close()
        return found

    def everybody(count: int, requests: int) -> None:
        with ThreadPoolExecutor(count) as clients:
            answers = [each for found in clients.map(client, range(count), [requests] * count) for each in found]
        assert len(answers) == requests * count
        assert {i for i, _ in answers} == {-1, *range(len(questions))}
        for i, (status, body) in answers:
            assert status == 200 if i < 0 else (status, body) == alone[i]

    everybody(32, 50)
    before = resident()
    everybody(8, 50)
    assert resident() - before < 20 * 2**20


def test_slow_sockets_hold_up_nobody(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """80 of them, more than may wait: a head that never ends, a body that never comes, an answer that is never read."""
    head = POST.format("/api/look")
    starts = [
        b"GET / HT",
        f"{head}Content-Length: 60\r\n\r\n{{".encode(),
        f"{POST.format('/api/images')}Content-Length: 9\r\n\r\n1".encode(),
    ]
    body = json.dumps(QUESTION)
    starts.append(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    with contextlib.ExitStack() as lines:
        for i in range(80):
            line = lines.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
            line.sendall(starts[i % len(starts)])
        start = time.monotonic()
        assert server.look("m0", "e1")["top"] and server.give(encoded(noise(8, 8, 3))).status == 200
        assert time.monotonic() - start < 10
    assert until(lambda: not server.server.server_state.connections) and caplog.text == ""


NARROW = """
import resource
from dmst.explorer.connections import Limits
from dmst.explorer.server import Site, listening, server_of
from dmst.explorer.session import Session

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
site = Site(Session(["dmst_digits"]), Limits(head=1, body=0.5, kept=0.5))
bound = listening("127.0.0.1", 0)
print(bound.getsockname()[1], flush=True)
server_of(site, "127.0.0.1").run(sockets=[bound])
"""


@pytest.fixture(scope="module")
def narrow() -> Iterator[SimpleNamespace]:
    """A server in a process that may open 256 descriptors, as on a Mac, and is soon tired of waiting. It prints no error."""
    run = subprocess.Popen([sys.executable, "-c", NARROW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    port = int(run.stdout.readline())
    made = SimpleNamespace(
        port=port,
        connect=lambda: http.client.HTTPConnection("127.0.0.1", port, timeout=5),
        descriptors=lambda: len(os.listdir(f"/proc/{run.pid}/fd")),
    )
    assert Server.ask(made, "GET", "/").status == 200  # type: ignore[arg-type]
    yield made
    run.terminate()
    assert run.communicate(timeout=20)[1] == ""


WHOLE = b"GET /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
HALF_BODY = f"{POST.format('/api/look')}Content-Length: 6000\r\n\r\n{{".encode()
UNREAD = WHOLE.replace(b"/nothing", b"/api/images/e0") * 40
HALF_OPEN: dict[str, tuple[int, bytes, bytes, bytes]] = {  # how many, a whole request, half of one, what drips after it
    "silent": (300, b"", b"", b""),
    "a head that drips": (300, b"", b"GET / HTTP/1.1\r\nX: ", b"x"),
    "half a body": (300, b"", HALF_BODY, b""),
    "a refused body that drips": (300, b"", HALF_BODY.replace(b"X-Dmst: 1", b"X-Dmst: 2"), b" "),
    "kept": (300, WHOLE, b"", b""),
    "kept, a head that drips": (300, WHOLE, b"GET / HTTP/1.1\r\nX: ", b"x"),
    "answers that are not read": (8, b"", UNREAD, b""),
}


@pytest.mark.parametrize("kind", HALF_OPEN)
def test_half_open_connections_hold_up_nobody(narrow: Any, kind: str) -> None:
    """A client that comes later is answered while they are there, and they are closed though they still drip."""
    count, whole, half, drop = HALF_OPEN[kind]
    before = narrow.descriptors()
    with contextlib.ExitStack() as lines:
        held = []
        for _ in range(count):
            held.append(lines.enter_context(socket.create_connection(("127.0.0.1", narrow.port), 2)))
            if whole:
                held[-1].sendall(whole)
                assert held[-1].recv(4096).startswith(b"HTTP/1.1 404")

        def send(what: bytes) -> None:
            for line in held:
                with contextlib.suppress(ConnectionError):  # the oldest are closed already
                    line.sendall(what)

        send(half)
        for _ in range(3):
            start = time.monotonic()
            assert Server.ask(narrow, "GET", "/api/start").status == 200
            assert time.monotonic() - start < 2
            send(drop)

        def closed() -> bool:
            send(drop)
            return bool(narrow.descriptors() <= before)

        assert until(closed, 5), narrow.descriptors()


def test_a_crowd_at_the_door_holds_up_nobody(narrow: Any) -> None:
    """300 connect in one moment: a system that must drop one of them, or the client after them, lets it wait 1 s."""
    for _ in range(4):
        with contextlib.ExitStack() as lines:
            crowd = [lines.enter_context(socket.socket()) for _ in range(300)]
            for line in crowd:
                line.setblocking(False)
            for line in crowd:
                line.connect_ex(("127.0.0.1", narrow.port))
            start = time.monotonic()
            assert Server.ask(narrow, "GET", "/api/start").status == 200
            assert time.monotonic() - start < 0.9


def test_the_next_head_has_its_own_time(narrow: Any) -> None:
    """It begins before the time between requests is over, and ends after it."""
    with contextlib.closing(narrow.connect()) as line:
        assert Server.ask(narrow, "GET", "/api/start", line=line).status == 200
        for part in (WHOLE[:9], WHOLE[9:]):
            time.sleep(0.3)
            line.sock.sendall(part)
        assert line.sock.recv(12) == b"HTTP/1.1 404"


def test_a_question_that_is_being_answered_gives_way_to_nobody(server: Server) -> None:
    gate = threading.Event()
    server.site.lanes["m0"].submit(gate.wait)
    try:
        with ThreadPoolExecutor(1) as client, contextlib.ExitStack() as lines:
            waiting = client.submit(server.look, "m0", "e0")
            assert until(lambda: server.site.waiting == 1)
            for _ in range(Limits().connections + 20):
                lines.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
            assert server.ask("GET", "/api/start").status == 200
            assert len(server.server.server_state.connections) <= Limits().connections
            gate.set()
            assert waiting.result()["top"]
    finally:
        gate.set()


def test_a_body_that_does_not_come_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.site, "limits", Limits(body=0.2))
    said = raw_ask(server, f"{POST.format('/api/look')}Content-Length: 60\r\n\r\n{{".encode())
    assert said.status == 400 and "0.2 s" in said.json["error"]


def test_nothing_is_written(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter tells of every file that is opened to write, and of every folder that is made."""
    monkeypatch.chdir(tmp_path)
    written: list[Any] = []
    watching = True

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if watching and (event in ("os.mkdir", "os.rename", "tempfile.mkstemp") or (event == "open" and _writes(args))):
            written.append((event, args))

    sys.addaudithook(watch)
    try:
        given = server.give(encoded(noise(300, 200, 3), "JPEG")).json["image"]
        server.give(b"broken")
        for what in ("look", "rates"):
            server.look("m0", given, {"1": {"1": 0.5}}, what=what)
        server.ask("GET", f"/api/seen/m0/{given}")
        server.ask("POST", "/api/keep", {"views": [QUESTION], "state": {}})
    finally:
        watching = False
    assert written == [] and list(tmp_path.iterdir()) == []


def _writes(args: tuple[Any, ...]) -> bool:
    mode, flags = args[1], args[2] if isinstance(args[2], int) else 0
    return (isinstance(mode, str) and bool(set(mode) & set("wax+"))) or bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def test_bodies_of_all_requests_together_are_limited(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = encoded(noise(300, 300, 3))
    assert len(raw) > serving.QUESTION and server.give(raw).status == 200
    monkeypatch.setattr(serving, "TOGETHER", len(raw) // 2)
    said = server.give(raw)
    assert said.status == 503 and "at once" in said.json["error"]
    assert (
        server.ask("POST", "/api/look", QUESTION).status == 200 and server.site.arriving == 0
    )  # small ones still come through


def test_networks_of_one_name_can_be_told_apart(tmp_path: Path) -> None:
    folders = [tmp_path / name / "final" for name in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    assert sessions.names_of([*map(str, folders), "dmst_digits"]) == ["a/final", "b/final", "dmst_digits"]
    assert sessions.names_of([str(folders[0])] * 2) == ["a/final (0)", "a/final (1)"]


def test_a_network_that_came_late_says_so() -> None:
    session = sessions.Session(["dmst_digits"])
    given = session.add(encoded(noise(20, 20, 3)))["image"]
    session.load("m0")
    with pytest.raises(sessions.NotThereError, match="came before dmst_digits was loaded"):
        session.network("m0").look(session.picture(given), {})
    session.close()


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "dmst", "explore", "--model", "dmst_digits", "--no-open", "--host", "0.0.0.0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        assert run.stdout is not None
        link = run.stdout.readline()
        told = re.fullmatch(r"http://[^ ]+:(\d+)/#token=([0-9a-f]{64})  \(Ctrl-C ends it\)\n", link)
        assert told, link
        one = SimpleNamespace(
            port=int(told[1]), connect=lambda: http.client.HTTPConnection("127.0.0.1", int(told[1]), timeout=60)
        )
        deadline, state = time.monotonic() + 60, ""
        while state != "ready" and time.monotonic() < deadline:
            state = Server.ask(one, "GET", "/api/start", X_Dmst_Token=told[2]).json["models"][0]["state"]  # type: ignore[arg-type]
            time.sleep(0.05)
        assert state == "ready"
        idle = socket.create_connection(("127.0.0.1", one.port), 20)  # which does not hold it up
        run.send_signal(signal.SIGINT)
        out, error = run.communicate(timeout=20)
        idle.close()
        assert (run.returncode, out, error) == (0, "", "")
        assert list(tmp_path.iterdir()) == []
    finally:
        run.kill()
        run.communicate()


def test_what_the_command_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*words: str) -> str:
        return str(CliRunner().invoke(cli.app, ["explore", "--no-open", *words]).exception)

    assert "nowhere is not there: name a saved model" in said("--model", "nowhere")
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1 port {port} cannot be listened to" in said("--model", "dmst_digits", "--port", str(port))
    assert "cannot be listened to" in said("--model", "dmst_digits", "--host", "no.such.host.invalid")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dmst\[explore\]'"):
        serving.serve(["dmst_digits"])


def test_the_browser_is_opened_at_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    told: list[str] = []
    monkeypatch.setattr(serving.webbrowser, "open", opened.append)
    monkeypatch.setattr(serving, "server_of", lambda *_: SimpleNamespace(run=lambda sockets: sockets[0].close()))
    serving.serve(["dmst_digits"], tell=told.append)
    assert until(lambda: len(opened) == 1) and told == [f"{opened[0]}  (Ctrl-C ends it)"]


def test_a_prediction_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    model = create_model("dmst_digits", pretrained=True)
    with torch.no_grad():
        model.norm.weight.fill_(3e38)  # finite, and what comes of it is not
    save_model(model, tmp_path / "bad")
    session = Session([str(tmp_path / "bad")])
    try:
        session.load("m0")  # the network itself is whole
        with pytest.raises(NonFiniteError, match="dmst_digits answers this picture with NaN or infinity"):
            session.network("m0").look(session.picture("e0"), {})
    finally:
        session.close()


def test_a_network_without_a_classifier_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(create_model("dmst_digits", num_classes=0), tmp_path / "bare")
    (tmp_path / "odd").mkdir()
    session = Session([str(tmp_path / "bare"), str(tmp_path / "odd")])
    try:
        for id in session.networks:
            session.load(id)
        told = session.start()["models"]
        assert [each["state"] for each in told] == ["failed", "failed"]
        assert "bare has no classifier" in told[0]["words"] and str(tmp_path) not in json.dumps(told)
        assert str(tmp_path) in capsys.readouterr().err
    finally:
        session.close()
