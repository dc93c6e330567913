"""What a client may hold: a connection is a descriptor, of which a process may have as few as 256.

At most MOST connections are open. A new one takes the place of the one whose client has kept us waiting longest: for the rest
of a request, for the next one, or for an answer to be read. One whose answer is being computed is never closed for another.
"""

from __future__ import annotations

from typing import Any

from dmst.errors import need

MOST = 96


def protocol() -> Any:
    """Uvicorn's, with that rule."""
    plain: Any = need("uvicorn.protocols.http.h11_impl", "explore").H11Protocol
    h11 = need("h11", "explore")

    class Protocol(plain):
        since = 0.0  # of the connection, or of its last answer

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.since = self.loop.time()
            waiting = [each for each in self.connections if each.waits()]
            if len(self.connections) > MOST and waiting:
                longest = min(waiting, key=lambda each: each.since)
                self.connections.discard(longest)  # now, so that the next one takes another's place
                longest.transport.abort()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.since = self.loop.time()

        def waits(self) -> bool:
            """Whether the client is to do something now."""
            answered = self.cycle is None or self.cycle.response_complete
            return answered or self.flow.write_paused or self.conn.their_state is h11.SEND_BODY

    return Protocol
