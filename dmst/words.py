"""Words from outside, made safe to show: the names of classes, files, folders, models and datasets, and what quotes them.

    visible(text)    one line, for a terminal: what is not printable is written as Python escapes it, as in "\\x1b]0;title\\x07"
    lines(text)      the same for text of several lines
    short(text)      the same, the middle left out where it is long
    fitting(name)    as much of a file's name as leaves room for an ending; no display, so nothing is escaped

Not printable are control characters, what turns the direction of a line, what has no width, and halves of characters: the bytes
of a file name that are not UTF-8, shown as \\xff. `dmst.terminal` prints nothing that did not pass here. JSON needs none of
this: json.dumps escapes by itself, and its reader gets the very name back.
"""

from __future__ import annotations

import os

NAME = 4 * 255  # letters: the longest name of a file, every byte of it escaped
FILE = 200  # bytes of a name: the longest is 255, and endings, numbers and what stages a file come to it


def visible(text: object) -> str:
    text = str(text)
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def lines(text: object) -> str:
    return "\n".join(map(visible, str(text).split("\n")))


def short(text: object, most: int = NAME) -> str:
    """The middle is left out: names that are long are often told apart by their ends."""
    text, tail = visible(text), most // 3
    return text if len(text) <= most else f"{text[: most - tail - 1]}…{text[-tail:]}"


def fitting(name: str) -> str:
    raw = os.fsencode(name)
    return name if len(raw) <= FILE else raw[:FILE].decode(errors="ignore")  # not half a character


def _escaped(c: str) -> str:
    byte = ord(c) - 0xDC00  # of a file name that is not UTF-8, as os.fsdecode keeps it
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else c.encode("unicode_escape").decode()
