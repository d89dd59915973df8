r"""The phrase of an instruction: all of it, the words between marks, or a separately given phrase.

`make [[the red car]] blue` marks a span; several marks together are one phrase. `\[[` and `\]]` are literal brackets;
a backslash before anything else is an ordinary character. Refuses marks that are open, empty or nested, and a phrase
that does not occur exactly once. Words are mapped to tokens by their characters; the phrase is never tokenized by
itself, as the tokens of a word depend on the text before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from qwen_cache.errors import SourceError

Span = tuple[int, int]
"""Characters from `start` up to, not including, `end`."""

_MARK = re.compile(r"\\(\[\[|\]\])|\[\[|\]\]")
_LITERAL = r"write \[[ or \]] for literal brackets"


def has_marks(prompt: str) -> bool:
    """True if `parse` would read a bracket as a mark, or as a literal one."""
    return "[[" in prompt or "]]" in prompt


def parse(prompt: str, where: object | None = None) -> tuple[str, list[Span]]:
    """The prompt without its marks, and the marked spans; `where` names the sample in an error."""
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


def literal(text: str) -> str:
    """The prompt that `parse` reads as this text, without a mark."""
    return text.replace("[[", r"\[[").replace("]]", r"\]]")


def find(prompt: str, phrase: str, where: object | None = None) -> Span:
    """The span of `phrase` in a prompt without marks; SourceError unless it occurs exactly once."""
    if not phrase.strip():
        raise SourceError("the phrase is empty", where=where)
    starts = [match.start() for match in re.finditer(f"(?={re.escape(phrase)})", prompt)]
    if not starts:
        raise SourceError(
            f"the phrase {phrase!r} is not in the prompt",
            where=where,
            found=repr(prompt),
            do="copy it exactly from the prompt",
        )
    if len(starts) > 1:
        raise SourceError(
            f"the phrase {phrase!r} is in the prompt {len(starts)} times",
            where=where,
            found=repr(prompt),
            do=f"name words that occur once, or mark the intended ones in the prompt: [[{phrase}]]",
        )
    return starts[0], starts[0] + len(phrase)


def token_positions(tokenizer: Any, text: str, spans: Sequence[Span], where: object | None = None) -> list[int]:
    """The positions of the tokens of `text` that share a non-space character with the spans, in order."""
    chosen = [any(start <= i < end for start, end in spans) and not text[i].isspace() for i in range(len(text))]
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    positions = [position for position, (start, end) in enumerate(offsets) if any(chosen[start:end])]
    if not positions:  # an accent that the tokenizer merged with its letter is outside the token's offsets
        before = (
            [position for position, (_, end) in enumerate(offsets) if 0 < end <= spans[0][0]] if any(chosen) else []
        )
        positions = before[-1:]
    if not positions:
        raise SourceError("no token belongs to the phrase", where=where, found=f"characters {spans} of {text!r}")
    return positions
