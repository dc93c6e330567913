"""Who may ask, and what every answer carries: around the whole application, so that errors pass through it too.

Host       a name that this server was started for, against DNS rebinding: a stranger's name that leads here is refused
Origin     if there is one, this very page
X-Dmst: 1  with every POST: another site's page cannot send it without asking first, and asking is refused
token      with everything under /api, where the server listens to other machines
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]{2,45}\]|[a-z0-9_.-]{1,253})(:[0-9]{1,5})?")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::", "")


class Guard:
    def __init__(self, app: ASGIApp, host: str = "127.0.0.1", token: str = "") -> None:
        self.app, self.token = app, token
        self.names = {*LOOPBACK, host.lower()} | ({socket.gethostname().lower()} if host in EVERYWHERE else set())
        self.any_address = host in EVERYWHERE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                mine = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *mine]
            await send(message)

        refusal = self.refusal(scope)
        app = JSONResponse({"error": refusal}, 403) if refusal else self.app
        await app(scope, receive, sending)

    def refusal(self, scope: Scope) -> str:
        """Why this request is not answered; "" if it is."""
        found: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        hosts, origins = found.get("host", []), found.get("origin", [])
        if len(hosts) != 1 or not self.knows(hosts[0]):
            return "this server has another name: use the link that the terminal shows"
        if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in origins):
            return "pages of other sites may not use this server"
        if scope["method"] not in ("GET", "HEAD") and found.get("x-dmst") != ["1"]:
            return "the header X-Dmst: 1 is missing"
        given = found.get("x-dmst-token", [""])[0].encode("latin-1")
        if self.token and scope["path"].startswith("/api") and not hmac.compare_digest(given, self.token.encode()):
            return "the token is missing or wrong: use the link that the terminal shows"
        return ""

    def knows(self, host: str) -> bool:
        told = HOST.fullmatch(host.lower())
        name = told["name"].strip("[]") if told else ""
        return bool(name) and (name in self.names or (self.any_address and _is_address(name)))


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False
