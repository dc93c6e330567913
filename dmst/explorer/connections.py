"""What a client may hold: a connection is a descriptor, of which a process may have as few as 256.

    connections  128    open at once: a new one takes the place of the one whose client has kept us waiting longest
    head         10 s   from the connection, or the first byte after an answer, to the end of a request's head
    body         30 s   from there to the end of its body; the application waits for it, and answers 400 after that
    kept         30 s   after an answer, to read it and to ask again

Bytes that drip move no deadline. A connection whose answer is being computed is never closed for another one.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from dmst.errors import need
from dmst.explorer.guard import unreadable

QUEUE = 1024  # connections that wait to be accepted
BATCH = 16  # of them accepted at a time: three batches may be open before the first has made room


@dataclass(frozen=True)
class Limits:
    connections: int = 128
    head: float = 10.0
    body: float = 30.0
    kept: float = 30.0


def protocol_of(limits: Limits) -> Any:
    """Uvicorn's, which alone has no deadline before the first answer, and none that bytes do not move."""
    plain: Any = need("uvicorn.protocols.http.h11_impl", "explore").H11Protocol
    h11 = need("h11", "explore")
    seconds = {"head": limits.head, "read": limits.kept, "next": limits.kept}

    class Protocol(plain):
        owed, since, deadline = "", 0.0, None  # what the client owes, since when, and the timer

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.note("head")
            if len(self.connections) > limits.connections:
                longest = min((each for each in self.connections if each.owed), key=lambda each: each.since)
                self.connections.discard(longest)  # now, so that the next one takes another's place
                longest.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.deadline = self.deadline and self.deadline.cancel()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self.transport.is_closing():  # else the deadline stands: the last answer may never be read
                self.note("head" if self.conn.their_state is h11.IDLE else self.owed)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.note("next")

        def pause_writing(self) -> None:
            super().pause_writing()
            self.note(self.owed)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.note(self.owed)

        def note(self, between: str) -> None:
            """What the client owes; `between` requests, or while one is answered its body or to read the answers before."""
            what = between
            if self.cycle is not None and not self.cycle.response_complete:
                what = "read" if self.flow.write_paused else "body" if self.conn.their_state is h11.SEND_BODY else ""
            if what != self.owed:
                self.owed, self.since = what, self.loop.time()
                if self.deadline is not None:
                    self.deadline.cancel()
                self.deadline = self.loop.call_later(seconds[what], self.transport.abort) if what in seconds else None

        def send_400_response(self, msg: str) -> None:
            self.transport.write(unreadable())  # with our headers, also where uvicorn answers alone
            self.transport.close()

    return Protocol


def server_with(config: Any) -> Any:
    """Accepts `config.backlog` connections at a time and lets QUEUE wait: asyncio has one number for both."""
    plain: Any = need("uvicorn", "explore").Server

    class Server(plain):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for each in sockets or ():
                each.listen(QUEUE)

    return Server(config)
