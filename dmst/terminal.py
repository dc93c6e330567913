"""What is printed: a rich console to which every string is plain text, and which prints nothing that a terminal would obey.

    say("one line", "another")             as it is: never wrapped
    Terminal().print(table)                cells, titles and strings are no markup; style comes by `style=` or rich.text.Text

A name in brackets is a name, :smile: is a word, and what is not printable is escaped (dmst/words.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from dmst.words import lines, visible


class Terminal(Console):
    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(lines(text), **options)  # before it is measured

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):  # and what came as Text
            yield segment if segment.control else segment._replace(text=lines(segment.text))


def say(*told: object, err: bool = False, style: str | None = None) -> None:
    """Every argument is a line, also one that holds a line end."""
    console = Terminal(stderr=err)
    for line in told:
        console.print(Text(visible(line)), style=style, soft_wrap=True)
