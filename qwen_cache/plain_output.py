"""The streams and consoles of both programs: no control character reaches a terminal or a log that is not rich's own.

Everything that this process prints goes through one of the two: usage errors, tracebacks, warnings and the libraries'
logs through `PlainStream`, our own messages, tables and progress lines through `PlainConsole`. What another process or
native code writes to the same descriptor is out of reach.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from qwen_cache.plain_text import without_controls

_CURSOR_UP = re.compile(r"\n*(?:\x1b\[A)+")  # tqdm's, between lines: the whole of a `write`, never a part of it


class PlainStream:
    """A text stream that shows control characters escaped; everything but writing is that of the stream below.

    `rich_proxied_file` is the name under which rich's consoles look for the stream below.
    """

    def __init__(self, below: Any) -> None:
        self.rich_proxied_file = below

    def write(self, text: str) -> int:
        if self.rich_proxied_file.isatty() and _CURSOR_UP.fullmatch(text):
            self.rich_proxied_file.write(text)
        else:  # tqdm begins its line with a return
            line = text.lstrip("\r")
            middle = line.rstrip("\r")
            begin, end = text[: len(text) - len(line)], line[len(middle) :]
            self.rich_proxied_file.write(begin + without_controls(middle) + end)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


class PlainConsole(Console):
    """rich's console on stdout or stderr; of the text that it is given, control characters are shown escaped."""

    def __init__(self, *, stderr: bool, soft_wrap: bool, quiet: bool = False) -> None:
        stream: Any = sys.stderr if stderr else sys.stdout
        while (below := getattr(stream, "rich_proxied_file", None)) is not None:  # of PlainStream, of a progress line
            stream = below
        super().__init__(file=stream, stderr=stderr, highlight=False, emoji=False, soft_wrap=soft_wrap, quiet=quiet)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(without_controls(segment.text), segment.style)


def install_plain_streams() -> None:
    """Let stdout and stderr of this process show control characters escaped, until it ends."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, PlainStream):
            setattr(sys, name, PlainStream(stream))
