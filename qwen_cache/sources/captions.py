"""Captions as they are encoded: tags in another order, the trigger word, a prefix and a suffix.

They change the prompt itself, so a sample's key and its stored prompt are those of the changed one. Marked words stay
marked, wherever they move. Without settings every prompt stays as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import factorial, prod
from typing import Self

from qwen_cache.errors import Notice
from qwen_cache.format.identity import Phrase, content_hash
from qwen_cache.settings.sections import DataConfig
from qwen_cache.sources.rows import Row, unique

PLACEHOLDER = "[trigger]"
"""What the trigger word replaces, as in ai-toolkit."""
PUNCTUATION = ",.;:!?"


@dataclass(frozen=True)
class Marked:
    """A text, and for each of its characters whether it is marked."""

    text: str
    marks: tuple[bool, ...]

    @classmethod
    def of(cls, text: str, spans: Phrase = ()) -> Self:
        return cls(text, tuple(any(begin <= i < end for begin, end in spans) for i in range(len(text))))

    @property
    def spans(self) -> Phrase:
        """The runs of marked characters."""
        edges = [i for i, (a, b) in enumerate(zip((False, *self.marks), (*self.marks, False), strict=True)) if a != b]
        return tuple(zip(edges[::2], edges[1::2], strict=True))

    def part(self, begin: int, end: int) -> Marked:
        return Marked(self.text[begin:end], self.marks[begin:end])

    def stripped(self) -> Marked:
        """Without surrounding white space."""
        begin = len(self.text) - len(self.text.lstrip())
        return self.part(begin, begin + len(self.text.strip()))

    def __add__(self, other: Marked) -> Marked:
        return Marked(self.text + other.text, self.marks + other.marks)

    def replaced(self, old: str, new: str) -> Marked:
        """With `new` for each `old`, marked if any of `old` was."""
        result, position = Marked.of(""), 0
        for match in re.finditer(re.escape(old), self.text):
            marked = any(self.marks[match.start() : match.end()])
            result += self.part(position, match.start()) + Marked(new, (marked,) * len(new))
            position = match.end()
        return result + self.part(position, len(self.text))


@dataclass(frozen=True)
class Captions:
    """What `data` says about captions."""

    trigger_word: str | None = None
    prefix: str = ""
    suffix: str = ""
    orders: int = 0
    """How many orders of a caption's tags become samples; 0 keeps the one of the source."""
    kept_tags: int = 0
    """The first tags that stay where they are."""
    seed: int = 0

    @classmethod
    def of(cls, data: DataConfig) -> Self:
        prefix, suffix = data.prompt_prefix.strip(), data.prompt_suffix.strip()
        trigger_word = (data.trigger_word or "").strip() or None
        return cls(trigger_word, prefix, suffix, data.shuffle_tags, data.keep_tags, data.shuffle_seed)

    @property
    def in_order(self) -> Captions:
        """The same, with the tags of a caption in their own order: for prompts to generate from."""
        return replace(self, orders=0)

    def applied(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with their captions as they are encoded; several rows for several orders of tags."""
        if self == Captions():
            return list(rows)
        taken = dict.fromkeys((row.name for row in rows), 1)
        return [
            replace(row, name=unique(row.name, taken) if i else row.name, prompt=each.text, phrase=each.spans)
            for row in rows
            for i, each in enumerate(self._of(Marked.of(row.prompt, row.phrase)))
        ]

    def notices(self, rows: Sequence[Row]) -> list[Notice]:
        """The rows whose [trigger] stays, as there is no trigger word."""
        what, do = f"prompts have {PLACEHOLDER}, and there is no trigger word", "set data.trigger_word"
        return [Notice(what, (row.name,), do) for row in rows if not self.trigger_word and PLACEHOLDER in row.prompt]

    def text(self, prompt: str) -> str:
        """One prompt with trigger word, prefix and suffix."""
        return self._completed(Marked.of(prompt)).text

    def replaced(self, prompt: str) -> str:
        """One prompt as it is, except that the trigger word replaces [trigger]."""
        return prompt.replace(PLACEHOLDER, self.trigger_word) if self.trigger_word else prompt

    def _of(self, prompt: Marked) -> list[Marked]:
        return [self._completed(each) for each in (self._shuffled(prompt) if self.orders else [prompt])]

    def _completed(self, prompt: Marked) -> Marked:
        if self.trigger_word:
            prompt = prompt.replaced(PLACEHOLDER, self.trigger_word)
            if not re.search(rf"(?<!\w){re.escape(self.trigger_word)}(?!\w)", prompt.text):
                prompt = Marked.of(f"{self.trigger_word} ") + prompt
        prompt = Marked.of(f"{self.prefix} " if self.prefix else "") + prompt.stripped()
        gap = "" if self.suffix.startswith(tuple(PUNCTUATION)) else " "
        return (prompt + Marked.of(gap + self.suffix if self.suffix else "")).stripped()

    def _shuffled(self, prompt: Marked) -> list[Marked]:
        """`orders` orders of the tags, all different, or as many as there are.

        They depend on seed and caption alone: a renamed file is not encoded again.
        """
        commas = [match.start() for match in re.finditer(",", prompt.text)]
        bounds = zip([0, *(comma + 1 for comma in commas)], [*commas, len(prompt.text)], strict=True)
        tags = [tag for tag in (prompt.part(*each).stripped() for each in bounds) if tag.text]
        kept, moved = tags[: self.kept_tags], tags[self.kept_tags :]
        possible = factorial(len(moved)) // prod(map(factorial, Counter(moved).values()))
        found: dict[tuple[Marked, ...], None] = {}
        attempt = 0
        while len(found) < min(self.orders, possible):
            salt = f"{self.seed}\0{attempt}\0{prompt.text}"
            ranked = sorted(range(len(moved)), key=lambda i: content_hash(f"{salt}\0{i}".encode()))
            found[*kept, *(moved[i] for i in ranked)] = None
            attempt += 1
        return [_listed(order) for order in found]


def _listed(tags: Sequence[Marked]) -> Marked:
    result = Marked.of("")
    for number, tag in enumerate(tags):
        result += Marked.of(", " if number else "") + tag
    return result
