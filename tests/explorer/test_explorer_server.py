"""The server of `dmst explore` on a real socket: its numbers are those of `analysis`, and it gives nothing else away.

Every answer in this file passes `ask`, which looks for the headers, and in errors for JSON without paths or tracebacks.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
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
from dmst.analysis import certify, groups, layer_rates, membership
from dmst.analysis.intervene import forced_gates, groups_off
from dmst.analysis.membership import attention_received, enlarge
from dmst.analysis.scored import orders_of
from dmst.engine.classify import classify
from dmst.engine.prepare import read_weights
from dmst.explorer import server as serving
from dmst.explorer import session as sessions
from dmst.explorer.guard import HEADERS, Guard
from dmst.explorer.server import Site, listening, server_of
from dmst.explorer.session import Session
from dmst.models import Trace, VisionModel, create_model, save_model
from dmst.photos import PHOTOS
from tests.cases import excite

SMALL: dict[str, Any] = {"dim": 24, "depth": 2, "num_heads": 3, "img_size": 32, "patch_size": 8, "num_classes": 7}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "m1": ("dmst_cifar", {}),
    "m2": ("vit_tiny", {}),
    "m3": ("vit_cifar", {"operator": "xca"}),
    "m4": ("gmst_cifar", {"groups": 4}),
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
    return {id: root / f"{name}{i}" for i, (id, (name, _)) in enumerate(NETWORKS.items())} | {"m5": broken}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Server]:
    made = Server(Session(["dmst_digits", *map(str, folders.values())]))
    made.site.load()
    for id in made.session.networks:
        made.site.lanes[id].submit(int).result(60)  # after the load
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
    assert [each["name"] for each in told["examples"]] == [*PHOTOS, "seven"] and told["examples"][0]["name"] == "cat"
    assert [each["digit"] for each in told["examples"]] == [False] * 6 + [True]
    for each in told["models"][:-1]:
        config = models[each["id"]].config
        assert each["state"] == "ready" and each["words"] == ""
        assert (each["operator"], each["depth"], each["heads"]) == (config.operator, config.depth, config.num_heads)
        assert (each["channels"], each["classes"]) == (config.in_chans, config.num_classes)
    assert [each["gates"] for each in told["models"]] == [True, True, False, False, True, None]


def test_a_network_that_fails_is_told_of(server: Server) -> None:
    failed = server.ask("GET", "/api/start").json["models"][-1]
    assert (
        failed["state"] == "failed" and failed["name"] == "broken" and "broken" in failed["words"] and failed["depth"] is None
    )
    for what in ("look", "rates"):
        said = server.ask("POST", f"/api/{what}", {"model": "m5", "image": "e0", "gates": {}})
        assert said.status == 409 and said.json["state"] == "failed"
    assert server.ask("GET", "/api/seen/m5/e0").status == 409


@pytest.mark.parametrize("id", ["m0", *NETWORKS])
def test_a_look_is_the_trace(server: Server, models: dict[str, VisionModel], id: str, tmp_path: Path) -> None:
    """Of an example, and of a picture that was given: prepared as `dmst classify` prepares it."""
    for picture in ("e0", server.give(encoded(noise(61, 83, 3), "JPEG")).json["image"]):
        raw = server.ask("GET", f"/api/images/{picture}").body
        _, trace, top = traced(models[id], raw, tmp_path)
        told = server.look(id, picture)
        shares = trace.logits[0].double().softmax(-1)
        assert told["probabilities"] == near(shares) and told["margin"] == pytest.approx(top[0][1] - top[1][1], abs=1e-5)
        assert [each["class"] for each in told["top"]] == [name for name, _ in top]
        assert [each["probability"] for each in told["top"]] == [told["probabilities"][each["index"]] for each in told["top"]]
        assert told["grid"] == list(trace.grid) and told["prefix"] == trace.prefix and len(told["layers"]) == len(trace.layers)
        for number, (layer, real) in enumerate(zip(told["layers"], trace.layers, strict=True)):
            if real.parts.membership is not None:
                assert layer["kind"] == "membership" and (layer["low"], layer["high"]) == (0, 1)
                assert np.array(layer["maps"]) == near(membership.maps(trace, number)[0].flatten(1))
                assert "ember" in layer["means"]
            else:
                received = attention_received(trace, number)
                assert layer["kind"] == "attention" and layer["low"] == 0
                assert np.array(layer["maps"]) == near(torch.zeros(0) if received is None else received[0])
                assert layer["high"] == (1 if received is None else pytest.approx(received.max().item(), rel=1e-4))
            assert ("groups" in layer) == (id == "m4")
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


def test_forced_gates_are_those_of_intervene(server: Server, models: dict[str, VisionModel], tmp_path: Path) -> None:
    raw = server.ask("GET", "/api/images/e2").body
    plain = server.look("m0", "e2")
    for asked in ({"1": {"0": 0.25, "3": 1.5}}, {"0": {"2": 0.0}, "2": {"1": 0.7}}, {"3": {"1": -2}}):
        gates = {int(i): {int(k): float(g) for k, g in row.items()} for i, row in asked.items()}
        with forced_gates(models["m0"], gates):
            _, trace, _ = traced(models["m0"], raw, tmp_path)
        told = server.look("m0", "e2", asked)
        assert told["probabilities"] == near(trace.logits[0].softmax(-1))
        for i, (layer, real) in enumerate(zip(told["layers"], trace.layers, strict=True)):
            assert layer["gate"] == near(real.parts.gate[0]) and np.array(layer["maps"]) == near(real.parts.membership[0])
            own = models["m0"].blocks[i].operator.decompose(real.normed, grid=trace.grid).gate[0]
            assert layer["computed_gate"] == near(own)
    assert server.look("m0", "e2") == plain  # nothing is left behind


def test_groups_are_those_of_analysis(server: Server, models: dict[str, VisionModel], tmp_path: Path) -> None:
    """Also with some of them off: their memberships stay, and what the head does changes."""
    raw, plain = server.ask("GET", "/api/images/e2").body, server.look("m4", "e2")
    pulls = []
    for asked, gates, off in (
        ({}, {}, {}),
        ({"1": {"0": 0.5, "2.3": 0, "2.1": 0.0}}, {1: {0: 0.5}}, {1: {2: [3, 1]}}),
        ({"0": {f"1.{g}": 0 for g in range(4)}}, {0: {1: 0.0}}, {}),  # all groups of a head: the head
    ):
        with forced_gates(models["m4"], gates), groups_off(models["m4"], off):
            _, trace, _ = traced(models["m4"], raw, tmp_path)
            pull = [groups.pull(models["m4"], trace, i)[0].flatten(1) for i in range(2)]
        told = server.look("m4", "e2", asked)
        assert told["probabilities"] == near(trace.logits[0].softmax(-1))
        for i, layer in enumerate(told["layers"]):
            belongs = trace.layers[i].parts.membership[0]
            assert layer["groups"] == belongs.argmax(1).tolist() and np.array(layer["mass"]) == near(belongs.sum(-1))
            assert layer["nearest"] == groups.nearest(trace, i)[0].tolist() and np.array(layer["pull"]) == near(pull[i])
            assert "group" in layer["means"]
        pulls.append(pull)
        rates = server.look("m4", "e2", asked, what="rates")
        assert rates["convention"].startswith("R_mix") and None not in rates["rates"]["variational"]
    assert not pulls[2][0][1].any() and pulls[0][0][1].all()
    assert (pulls[1][1][2] - pulls[0][1][2]).abs().min() > 0 and torch.equal(pulls[1][1][1], pulls[0][1][1])
    assert server.look("m4", "e2") == plain  # nothing is left behind


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


# --- what is refused -------------------------------------------------------------------------------------------------

TRAVERSALS = ["../canary.txt", "%2e%2e/canary.txt", "..%2fcanary.txt", "..\\canary.txt", "....//canary.txt",
              "%252e%252e/canary.txt", "..%00/canary.txt", "session.py", "__init__.py", "//127.0.0.1/canary.txt"]  # fmt: skip


def test_no_path_leads_out(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ask` looks for the canary, which lies where the server was started."""
    (tmp_path / "canary.txt").write_text(SECRET)
    monkeypatch.chdir(tmp_path)
    for route in ("/", "/static/", "/api/images/", "/api/seen/m0/"):
        for path in [*TRAVERSALS, str(tmp_path / "canary.txt")]:
            assert server.ask("GET", route + path).status in (400, 404)


def test_nothing_else_is_there(server: Server) -> None:
    for path in (
        "/api/start/",
        "/favicon.ico",
        "/api/seen/e0/m0",
    ):
        assert server.ask("GET", path).status == 404
    for method, path in (("POST", "/"), ("PUT", "/api/look"), ("GET", "/api/look"), ("OPTIONS", "/api/look")):
        assert server.ask(method, path).status == 404
    assert server.ask("GET", "/").headers["content-type"] == "text/html; charset=utf-8"


def test_other_names_are_refused(server: Server) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "[::1", "192.168.1.5", "0.0.0.0"):
        for path in ("/", "/api/start", "/nothing"):
            assert server.ask("GET", path, Host=host).status in (400, 403)
        assert server.ask("POST", "/api/look", QUESTION, Host=host).status in (400, 403)


def test_own_names_are_known(server: Server) -> None:
    for host in ("127.0.0.1", "localhost:9999", "LOCALHOST", "[::1]:80"):
        assert server.ask("GET", "/api/start", Host=host, Origin=f"http://{host}").status == 200


def test_other_pages_may_not_ask(server: Server) -> None:
    for origin in ("http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1", "http://localhost"):
        for method, path in (("GET", "/api/start"), ("POST", "/api/look"), ("OPTIONS", "/api/look")):
            assert server.ask(method, path, b"{}", Origin=origin, Host=f"127.0.0.1:{server.port}").status == 403


def test_a_post_says_that_it_is_ours(server: Server) -> None:
    for path in ("/api/look", "/api/rates", "/api/images"):
        for header in ("", "2", "true"):
            said = server.ask("POST", path, {"model": "m0", "image": "e0", "gates": {}}, X_Dmst=header)
            assert said.status == 403 and "X-Dmst" in said.json["error"]


def test_other_machines_need_the_token() -> None:
    token = "ab" * 32
    made = Server(Session(["dmst_digits"]), host="0.0.0.0", token=token)
    try:
        for given in ("", "ab" * 31, "ab" * 31 + "ac", "\xe9" * 64):
            assert made.ask("GET", "/api/start", X_Dmst_Token=given).status == 403
            assert made.ask("POST", "/api/look", b"{}", X_Dmst_Token=given).status == 403
        assert made.ask("GET", "/api/start", X_Dmst_Token=token).json["models"][0]["state"] == "waiting"
        assert made.ask("GET", "/", Host="192.168.1.5:80").status == 200  # an address cannot be rebound
        assert made.ask("GET", "/", Host="evil.example").status == 403
    finally:
        made.close()


def test_the_link_has_the_token() -> None:
    assert serving.link_to("127.0.0.1", 80, "") == "http://127.0.0.1:80/"
    assert serving.link_to("::1", 80, "") == "http://[::1]:80/"
    assert serving.link_to("0.0.0.0", 80, "ab") == f"http://{socket.gethostname()}:80/#token=ab"
    assert not Guard(None, "10.0.0.7").knows("10.0.0.8") and Guard(None, "10.0.0.7").knows("10.0.0.7:80")  # type: ignore[arg-type]


POST = "POST {} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Dmst: 1\r\n"


@pytest.mark.parametrize(("path", "most"), [("/api/images", sessions.UPLOAD), ("/api/look", serving.QUESTION)])
def test_too_much_is_refused(server: Server, path: str, most: int) -> None:
    head = POST.format(path)
    with socket.create_connection(("127.0.0.1", server.port), 20) as line:
        line.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        with contextlib.suppress(ConnectionError):  # it closes as soon as it is too much
            for _ in range(most // 65536 + 1):
                line.sendall(chunk)
        response = http.client.HTTPResponse(line)
        response.begin()
        assert checked(response).status == 413


def png_of(width: int, height: int, data: bytes = b"", depth: int = 8, colour: int = 2) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


HOSTILE = {
    "empty": b"",
    "bytes": bytes(range(256)) * 40,
    "bomb": png_of(30_000, 30_000),
    "bomb of zeros": png_of(7071, 7071, bytes(1000)),
    "cut jpeg": encoded(noise(50, 50, 3), "JPEG")[:200],
    "floats": encoded(Image.new("F", (9, 9)), "TIFF"),
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='10' height='10'><image href='/etc/passwd'/></svg>",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
}


def test_hostile_pictures_are_refused(server: Server) -> None:
    for kind, raw in HOSTILE.items():
        said = server.give(raw)
        assert said.status == 422 and said.json["error"].startswith("the picture: it "), kind


QUESTION: dict[str, Any] = {"model": "m0", "image": "e0", "gates": {}}
WRONG: dict[str, tuple[int, Any]] = {
    "no json": (400, b"{"),
    "no text": (400, b"\xff\xfe{}"),
    "deep": (400, b"[" * 60_000),
    "list": (422, []),
    "number for a model": (422, QUESTION | {"model": 0}),
    "no such model": (404, QUESTION | {"model": "../dmst_digits"}),
    "link for a picture": (404, QUESTION | {"image": "http://127.0.0.1/x.png"}),
    "lone surrogate": (404, QUESTION | {"image": "\ud800"}),
    "gates as a list": (422, QUESTION | {"gates": []}),
    "no such layer": (422, QUESTION | {"gates": {"4": {"0": 0}}}),
    "group of a head without": (422, QUESTION | {"gates": {"0": {"0.1": 0}}}),
    "no such group": (422, QUESTION | {"model": "m4", "gates": {"0": {"0.4": 0}}}),
    "no number of a group": (422, QUESTION | {"model": "m4", "gates": {"0": {"0.": 0}}}),
    "half a group": (422, QUESTION | {"model": "m4", "gates": {"0": {"0.1": 0.5}}}),
    "layer below 0": (422, QUESTION | {"gates": {"-1": {"0": 0}}}),
    "bool for a gate": (422, QUESTION | {"gates": {"0": {"0": True}}}),
    "nan": (422, b'{"model": "m0", "image": "e0", "gates": {"0": {"0": NaN}}}'),
    "endless gate": (422, b'{"model": "m0", "image": "e0", "gates": {"0": {"0": 1e999}}}'),
    "too long": (413, b" " * (serving.QUESTION + 1)),
}  # fmt: skip


def test_questions_that_are_none(server: Server) -> None:
    for kind, (status, body) in WRONG.items():
        sent = json.dumps(body).encode() if not isinstance(body, bytes) else body
        assert server.ask("POST", "/api/look", sent).status == status, kind


def test_what_goes_wrong_inside_stays_inside(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.session, "start", lambda: 1 / 0)
    said = server.ask("GET", "/api/start")
    assert said.status == 500 and "ZeroDivisionError" not in said.json["error"]


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.process
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
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert "pip install 'dmst[explore]'" in said()


def test_a_network_without_a_classifier_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(create_model("dmst_digits", num_classes=0), tmp_path / "bare")
    session = Session([str(tmp_path / "bare")])
    session.networks["m0"].load()
    told = session.start()["models"]
    assert told[0]["state"] == "failed"
    assert "bare could not be loaded" in told[0]["words"] and str(tmp_path) not in json.dumps(told)
    assert "has no classifier" in capsys.readouterr().err
