"""The routes of `dmst explore`, and the server itself.

    GET   /  /static/NAME           files of the package
    GET   /api/start                networks, their state, examples
    GET   /api/images/ID            a picture, PNG                 POST  /api/images   its bytes
    GET   /api/seen/MODEL/IMAGE     as the network sees it, PNG
    POST  /api/look  /api/rates     {"model", "image", "gates"}, gates and groups that are off (session.changes_of)

No parameter is a path or a URL. One thread for each network and one for pictures: forcing a gate changes the network, and one
picture is decoded at a time. Uvicorn refuses what comes beyond CONNECTIONS.
"""

from __future__ import annotations

import asyncio
import json
import mimetypes
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from dmst.errors import DmstError, OptionError
from dmst.explorer.guard import LOOPBACK, Guard
from dmst.explorer.session import UPLOAD, RefusedError, Session

CONNECTIONS = 64
QUESTION = 64 * 2**10  # bytes of JSON
KEPT = 30  # seconds for a connection that is not used


class Site:
    """The application: its methods are its routes."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lanes = {name: ThreadPoolExecutor(1, f"dmst-{name}") for name in (*session.networks, "pictures")}

    def app(self) -> Starlette:
        mimetypes.add_type("text/javascript", ".js")  # some Windows machines say text/plain, which no browser runs
        app = Starlette(
            routes=[
                Route("/", self.page),
                Mount("/static", StaticFiles(packages=[("dmst.explorer", "static")])),
                Route("/api/start", self.start),
                Route("/api/images/{image}", self.shown),
                Route("/api/seen/{model}/{image}", self.seen),
                Route("/api/images", self.upload, methods=["POST"]),
                Route("/api/look", self.answer, methods=["POST"]),
                Route("/api/rates", self.answer, methods=["POST"]),
            ],
            exception_handlers={DmstError: refuse, HTTPException: nothing, ClientDisconnect: nothing, Exception: broken},
        )
        app.router.redirect_slashes = False
        return app

    def load(self) -> None:
        """In the background, each network in its own lane."""
        for id, network in self.session.networks.items():
            self.lanes[id].submit(network.load)

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)

    async def page(self, request: Request) -> Response:
        return FileResponse(str(resources.files("dmst.explorer") / "static" / "index.html"))

    async def start(self, request: Request) -> Response:
        return JSONResponse(self.session.start())

    async def shown(self, request: Request) -> Response:
        return Response(self.session.picture(request.path_params["image"]).shown, media_type="image/png")

    async def seen(self, request: Request) -> Response:
        network = self.session.network(request.path_params["model"])
        picture = self.session.picture(request.path_params["image"])
        return Response(await self.turn("pictures", network.seen, picture), media_type="image/png")

    async def upload(self, request: Request) -> Response:
        raw = await body(request, UPLOAD)
        return JSONResponse(await self.turn("pictures", self.session.add, raw))

    async def answer(self, request: Request) -> Response:
        told = await question(request)
        network, picture = self.session.network(told["model"]), self.session.picture(told["image"])
        work = network.rates if request.url.path == "/api/rates" else network.look
        return JSONResponse(await self.turn(network.id, work, picture, told.get("gates", {})))

    async def turn(self, lane: str, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.lanes[lane], work, *args)


async def body(request: Request, most: int) -> bytes:
    """All of it, or 413 as soon as it is too much."""
    found = bytearray()
    async for chunk in request.stream():
        found += chunk
        if len(found) > most:
            raise RefusedError(413, f"more than {most:,} bytes were sent: that is the limit")
    return bytes(found)


async def question(request: Request) -> dict[str, Any]:
    try:
        told = json.loads(await body(request, QUESTION))
    except (ValueError, RecursionError):
        raise RefusedError(400, "the request is not JSON") from None
    if not isinstance(told, dict) or not all(isinstance(told.get(name), str) for name in ("model", "image")):
        raise RefusedError(422, "a question must be an object with the texts model and image, and with gates")
    return told


async def refuse(request: Request, error: Exception) -> Response:
    more = {"state": state} if (state := getattr(error, "state", None)) else {}
    return JSONResponse({"error": str(error)} | more, getattr(error, "status", 422))


async def nothing(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "there is nothing here"}, 404)


async def broken(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "something went wrong; the terminal shows the error"}, 500)


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


def server_of(site: Site, host: str, token: str = "") -> uvicorn.Server:
    config = uvicorn.Config(
        Guard(site.app(), host, token),
        access_log=False,
        log_level="error",
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=KEPT,
        lifespan="off",
        ws="none",
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
    site = Site(Session(models, device))
    try:
        with listening(host, port) as bound:
            token = "" if host in LOOPBACK else secrets.token_hex(32)
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
