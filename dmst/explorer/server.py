"""The routes of `dmst explore`, their limits, and the server itself.

    GET   /  /static/NAME           files of the package, from a table in memory
    GET   /api/start                networks, their state, examples
    GET   /api/images/ID            a picture, PNG                 POST  /api/images   its bytes
    GET   /api/seen/MODEL/IMAGE     as the network sees it, PNG
    POST  /api/look  /api/rates     {"model", "image", "gates"}    POST  /api/keep     {"views": [...], "state": {...}}

No parameter is a path or a URL. One lane (a thread) for each network and one for pictures; at most 64 requests wait for a lane.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

import torch

from dmst.errors import BadImageError, DmstError, OptionError, need
from dmst.explorer.connections import protocol
from dmst.explorer.guard import BROKEN, Guard, is_local
from dmst.explorer.session import PATIENCE, UPLOAD, NotReadyError, NotThereError, Session

WAITING = 64  # requests
TOGETHER = 64 * 2**20  # bytes of all bodies that are under way
QUESTION = 64 * 2**10  # bytes of JSON
BACKLOG = 128  # connections that are accepted at a time, beside those that are open
BODY, KEPT = 30.0, 30  # seconds: for a body to arrive, for a connection that is not used
VIEWS = 4
ASKED = ("model", "image", "gates")
KINDS = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
STATUS = {NotThereError: 404, NotReadyError: 409, BadImageError: 422, DmstError: 422}  # the first that fits


class RefusedError(DmstError):
    """A request that is no question: the status, and why."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Site:
    """The application: its methods are its routes."""

    def __init__(self, session: Session) -> None:
        self.session, self.waiting, self.arriving = session, 0, 0
        self.lanes = {name: ThreadPoolExecutor(1, f"dmst-{name}") for name in (*session.networks, "pictures")}
        self.files = static()
        self.responses = need("starlette.responses", "explore")

    def app(self) -> Any:
        starlette, routing = need("starlette.applications", "explore"), need("starlette.routing", "explore")
        exceptions = need("starlette.exceptions", "explore")
        routes: dict[tuple[str, str], Callable[..., Any]] = {
            ("GET", "/"): self.file,
            ("GET", "/static/{name}"): self.file,
            ("GET", "/api/start"): self.start,
            ("GET", "/api/images/{image}"): self.shown,
            ("GET", "/api/seen/{model}/{image}"): self.seen,
            ("POST", "/api/images"): self.upload,
            ("POST", "/api/look"): self.look,
            ("POST", "/api/rates"): self.rates,
            ("POST", "/api/keep"): self.keep,
        }
        app = starlette.Starlette(
            routes=[routing.Route(path, route, methods=[method]) for (method, path), route in routes.items()],
            exception_handlers={DmstError: self.refuse, exceptions.HTTPException: self.nothing, Exception: self.broken},
        )
        app.router.redirect_slashes = False
        return app

    def load(self) -> None:
        """In the background, each network in its own lane."""
        for id in self.session.networks:
            self.lanes[id].submit(self.session.load, id)

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)
        self.session.close()

    # --- routes ------------------------------------------------------------------------------------------------------

    async def file(self, request: Any) -> Any:
        name = request.path_params.get("name", "index.html")
        if name not in self.files:
            raise NotThereError("there is nothing here")
        raw, kind = self.files[name]
        return self.responses.Response(raw, media_type=kind)

    async def start(self, request: Any) -> Any:
        return self.json(self.session.start())

    async def shown(self, request: Any) -> Any:
        return self.responses.Response(self.session.picture(request.path_params["image"]).shown, media_type="image/png")

    async def seen(self, request: Any) -> Any:
        network = self.session.network(request.path_params["model"])
        picture = self.session.picture(request.path_params["image"])
        return self.responses.Response(await self.turn("pictures", network.seen, picture), media_type="image/png")

    async def upload(self, request: Any) -> Any:
        if request.headers.get("content-type", "").lower().startswith("multipart/"):
            raise RefusedError(415, "send the bytes of the file alone, not a form")
        raw = await self.body(request, UPLOAD)
        with contextlib.suppress(TimeoutError):  # those that are not ready by then are told of when they are asked
            async with asyncio.timeout(PATIENCE):
                while not self.session.settled():
                    await asyncio.sleep(0.05)
        return self.json(await self.turn("pictures", self.session.add, raw))

    async def look(self, request: Any) -> Any:
        return self.json(await self.asked(question(await self.body(request), ASKED), "look"))

    async def rates(self, request: Any) -> Any:
        return self.json(await self.asked(question(await self.body(request), ASKED), "rates"))

    async def keep(self, request: Any) -> Any:
        from dmst.explorer import keep

        told = question(await self.body(request), ("views", "state"))
        views, state = told.get("views"), told.get("state", {})
        if not isinstance(views, list) or not 1 <= len(views) <= VIEWS or not isinstance(state, dict):
            raise RefusedError(422, f"views must be a list of 1 to {VIEWS} views, and state an object")
        kept = []
        for each in views:
            if not isinstance(each, dict):
                raise RefusedError(422, "a view must be an object with model, image and gates")
            look, rates = await self.asked(each, "look"), await self.asked(each, "rates")
            picture = self.session.picture(each["image"])
            seen = await self.turn("pictures", self.session.network(each["model"]).seen, picture)
            kept.append({"look": look, "rates": rates, "picture": picture.shown, "seen": seen})
        page = await self.turn("pictures", keep.page, self.session.start(), kept, state)
        headers = {"content-disposition": 'attachment; filename="dmst-view.html"'}
        return self.responses.HTMLResponse(page, headers=headers)

    async def body(self, request: Any, most: int = QUESTION) -> bytes:
        """All of it, or 413 as soon as it is too much; 503 while the bodies of all requests together are."""
        declared = request.headers.get("content-length", "0")
        words = f"more than {most:,} bytes were sent: that is the limit"
        if not declared.isdigit() or int(declared[:20]) > most:
            raise RefusedError(413, words)
        found = bytearray()
        try:
            async with asyncio.timeout(BODY):
                async for chunk in request.stream():
                    found += chunk
                    self.arriving += len(chunk)
                    if len(found) > most:
                        raise RefusedError(413, words)
                    if len(found) > QUESTION and self.arriving > TOGETHER:
                        raise RefusedError(503, "too many pictures are being sent at once: try again in a moment")
        except TimeoutError:
            raise RefusedError(400, f"the request did not arrive within {BODY:g} s") from None
        except need("starlette.requests", "explore").ClientDisconnect:
            raise RefusedError(400, "the request ended too early") from None
        finally:
            self.arriving -= len(found)
        return bytes(found)

    # --- pieces ------------------------------------------------------------------------------------------------------

    async def asked(self, told: dict[str, Any], what: str) -> dict[str, Any]:
        model, image = (_text(told, name) for name in ("model", "image"))
        network, picture = self.session.network(model), self.session.picture(image)
        return await self.turn(model, getattr(network, what), picture, told.get("gates", {}))

    async def turn(self, lane: str, work: Callable[..., Any], *args: Any) -> Any:
        if self.waiting >= WAITING:
            raise RefusedError(503, f"{WAITING} requests are waiting already: try again in a moment")
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.lanes[lane], work, *args)
        finally:
            self.waiting -= 1

    def json(self, told: Any, status: int = 200) -> Any:
        text = json.dumps(told, allow_nan=False, separators=(",", ":"))
        return self.responses.Response(text.encode(), status, media_type="application/json")

    async def refuse(self, request: Any, error: Exception) -> Any:
        status = getattr(error, "status", None) or next(code for kind, code in STATUS.items() if isinstance(error, kind))
        more = {"state": error.state} if isinstance(error, NotReadyError) else {}
        return self.json({"error": str(error)} | more, status)

    async def nothing(self, request: Any, error: Exception) -> Any:
        return self.json({"error": "there is nothing here"}, 404)

    async def broken(self, request: Any, error: Exception) -> Any:
        return self.json({"error": BROKEN}, 500)


def question(raw: bytes, keys: Sequence[str]) -> dict[str, Any]:
    """The JSON of a request: an object with no other keys than these."""
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError):
        raise RefusedError(400, "the request is not JSON") from None
    if not isinstance(told, dict):
        raise RefusedError(422, "the request must be a JSON object")
    if unknown := [key for key in told if key not in keys]:
        raise RefusedError(422, f"unknown key {unknown[0][:40]!r}: known are {', '.join(keys)}")
    return told


def _text(told: dict[str, Any], name: str) -> str:
    if not isinstance(told.get(name), str):
        raise RefusedError(422, f"{name} must be text")
    return told[name]


def static() -> dict[str, tuple[bytes, str]]:
    """The page's files, read once: name -> bytes and kind."""
    files = (resources.files("dmst.explorer") / "static").iterdir()
    return {file.name: (file.read_bytes(), KINDS[f".{file.name.rpartition('.')[2]}"]) for file in files}


# --- the server ------------------------------------------------------------------------------------------------------


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise OptionError(
            f"{host} port {port} cannot be listened to ({error.strerror}): --port 0 takes any free one."
        ) from error


def server_of(site: Site, host: str, token: str = "") -> Any:
    uvicorn = need("uvicorn", "explore")
    config = uvicorn.Config(
        Guard(site.app(), host, token),
        access_log=False,
        log_level="error",
        server_header=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=KEPT,
        backlog=BACKLOG,
        lifespan="off",
        ws="none",
        loop="asyncio",
        http=protocol(),
    )
    return uvicorn.Server(config)


def serve(
    models: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    browser: bool = True,
    device: torch.device | str = "cpu",
    tell: Callable[[str], None] = print,
) -> None:
    """Until Ctrl-C."""
    for module in ("starlette", "uvicorn"):
        need(module, "explore")
    site = Site(Session(models, device))
    try:
        with listening(host, port) as bound:
            token = "" if is_local(host) else secrets.token_hex(32)
            link = link_to(host, bound.getsockname()[1], token)
            server = server_of(site, host, token)
            torch.set_num_threads(max(1, torch.get_num_threads() // len(models)))  # the lanes share the cores
            site.load()
            tell(f"{link}  (Ctrl-C ends it)")
            if browser:
                threading.Thread(target=webbrowser.open, args=(link,), daemon=True).start()  # some take their time
            server.run(sockets=[bound])
    except KeyboardInterrupt:
        pass
    finally:
        site.close()


def link_to(host: str, port: int, token: str) -> str:
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"#token={token}" if token else "")
