r"""Which words of an instruction are meant: all of them, those between marks, or a phrase given beside it.

`make [[the red car]] blue` marks a span; several marks together are one phrase. `\[[` and `\]]` are the brackets
themselves; a backslash before anything else is an ordinary character. Marks that are open, empty or nested are
refused, and so is a phrase that is not there exactly once. Words become tokens by their characters, never by cutting
the phrase into tokens of its own: how a word is cut depends on what stands before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from qwen_cache.errors import SourceError

Span = tuple[int, int]
"""Characters from `start` to before `end`."""

_MARK = re.compile(r"\\(\[\[|\]\])|\[\[|\]\]")
_LITERAL = r"write \[[ or \]] where the brackets are meant themselves"


def parse(prompt: str, where: object | None = None) -> tuple[str, list[Span]]:
    """The prompt without its marks, and the spans that they enclosed; `where` names the sample in an error."""
    text, spans, opened, end = "", [], None, 0
    for mark in _MARK.finditer(prompt):
        text += prompt[end : mark.start()]
        end = mark.end()
        if mark[1]:
            text += mark[1]
        elif mark[0] == "[[":
            if opened is not None:
                raise SourceError(
                    "[[ within [[", where=where, found=prompt, do=f"close the first with ]], or {_LITERAL}"
                )
            opened = len(text)
        else:
            if opened is None:
                raise SourceError("]] without [[", where=where, found=prompt, do=f"open it with [[, or {_LITERAL}")
            if not text[opened:].strip():
                raise SourceError("nothing is between [[ and ]]", where=where, found=prompt, do="mark words, or none")
            spans.append((opened, len(text)))
            opened = None
    if opened is not None:
        raise SourceError("[[ without ]]", where=where, found=prompt, do=f"close it with ]], or {_LITERAL}")
    return text + prompt[end:], spans


def find(prompt: str, phrase: str, where: object | None = None) -> Span:
    """Where `phrase` stands in a prompt without marks; it must be there exactly once."""
    if not phrase.strip():
        raise SourceError("the phrase is empty", where=where)
    starts = [match.start() for match in re.finditer(f"(?={re.escape(phrase)})", prompt)]
    if not starts:
        raise SourceError(
            f"the phrase {phrase!r} is not in the prompt",
            where=where,
            found=repr(prompt),
            do="give it letter by letter as it stands there",
        )
    if len(starts) > 1:
        raise SourceError(
            f"the phrase {phrase!r} is in the prompt {len(starts)} times",
            where=where,
            found=repr(prompt),
            do=f"mark the one that is meant in the prompt: [[{phrase}]]",
        )
    return starts[0], starts[0] + len(phrase)


def token_positions(tokenizer: Any, text: str, spans: Sequence[Span], where: object | None = None) -> list[int]:
    """The tokens of `text` that share a character other than a space with the spans, in order."""
    meant = [any(start <= i < end for start, end in spans) and not text[i].isspace() for i in range(len(text))]
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    positions = [position for position, (start, end) in enumerate(offsets) if any(meant[start:end])]
    if not positions:  # an accent that the tokenizer joined with its letter: it stands behind what the token says
        before = [position for position, (_, end) in enumerate(offsets) if 0 < end <= spans[0][0]] if any(meant) else []
        positions = before[-1:]
    if not positions:
        raise SourceError("no token belongs to the phrase", where=where, found=f"characters {spans} of {text!r}")
    return positions
