"""Prompts: marked phrases, templates, replacements, and caption files."""

from __future__ import annotations

import csv
import io
import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import factorial, prod
from pathlib import Path
from typing import Any, Protocol, Self

from qwen_cache.errors import Notice, SourceError
from qwen_cache.format.identity import Phrase, Slider, content_hash
from qwen_cache.settings.sections import DataConfig
from qwen_cache.sources.places import IMAGE_EXTENSIONS, File, read_bytes, suffix
from qwen_cache.sources.rows import LIST_COLUMNS, Needs, Row, find_columns, unique
from qwen_cache.sources.tables import READERS, delimiter_of
from qwen_cache.storage.files import write_durably
from qwen_cache.storage.remote import Location, is_remote

# ---- phrase ----------------------------------------------------------------------------------------------------------
# The phrase of an instruction: all of it, the words between marks, or a separately given phrase.
#
# `make [[the red car]] blue` marks a span; several marks together are one phrase. `\[[` and `\]]` are literal brackets;
# a backslash before anything else is an ordinary character. Refuses marks that are open, empty or nested, and a phrase
# that does not occur exactly once. Words are mapped to tokens by their characters; the phrase is never tokenized by
# itself, as the tokens of a word depend on the text before it.

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


# ---- captions --------------------------------------------------------------------------------------------------------
# Captions as they are encoded: tags in another order, the trigger word, a prefix and a suffix.
#
# They change the prompt itself, so a sample's key and its stored prompt are those of the changed one. Marked words stay
# marked, wherever they move. Without settings every prompt stays as it is. The direction of a slider, where the source
# gives none, comes last: `{prompt}` in it is the prompt as it is encoded, so that the three differ in nothing else.

PLACEHOLDER = "[trigger]"
"""The text that the trigger word replaces, as in ai-toolkit."""
OWN_PROMPT = "{prompt}"
"""The text in the settings of a slider's direction that stands for the prompt of each row."""
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
    """The settings of `data` about captions."""

    trigger_word: str | None = None
    prefix: str = ""
    suffix: str = ""
    orders: int = 0
    """How many orders of a caption's tags become samples; 0 keeps the one of the source."""
    kept_tags: int = 0
    """The first tags that stay where they are."""
    seed: int = 0
    slider: Slider | None = None
    """The direction of a slider for rows that have none."""

    @classmethod
    def of(cls, data: DataConfig) -> Self:
        prefix, suffix = data.prompt_prefix.strip(), data.prompt_suffix.strip()
        trigger_word = (data.trigger_word or "").strip() or None
        slider = Slider(*((each or "").strip() for each in (data.positive_prompt, data.negative_prompt)))
        tags = data.shuffle_tags, data.keep_tags, data.shuffle_seed
        return cls(trigger_word, prefix, suffix, *tags, slider if all(slider) else None)

    @property
    def in_order(self) -> Captions:
        """The same, with the tags of a caption in their own order, and no direction: for prompts to generate from."""
        return replace(self, orders=0, slider=None)

    def applied(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with their prompts as they are encoded; several rows for several orders of tags."""
        if self == Captions():
            return list(rows)
        taken = dict.fromkeys((row.name for row in rows), 1)
        return [
            replace(
                row,
                name=unique(row.name, taken) if i else row.name,
                prompt=each.text,
                phrase=each.spans,
                slider=self._direction(row.slider, each.text),
            )
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

    def _direction(self, given: Slider | None, prompt: str) -> Slider | None:
        """The direction of a row with this encoded prompt: its own one, or that of the settings."""
        if given:
            return Slider(*map(self.text, given))
        found = [self.replaced(each).replace(OWN_PROMPT, prompt).strip() for each in self.slider or ()]
        return Slider(*found) if found else None

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


# ---- caption files ---------------------------------------------------------------------------------------------------
# Where captions of a source are written: text files beside the targets of a folder, or a copy of a text table.
#
# Nothing that exists is replaced unless asked: a prompt, a text file without one, a copy made earlier. Captions for a
# table are kept in FILE.partial until all are there, by their images, so that a stopped run continues even if rows have
# moved. Refused: a table that is changed meanwhile, and sources whose prompts are not in files of their own (tars,
# Parquet, URLs).

TABLES = ("metadata.csv", "metadata.jsonl")


class CaptionFiles(Protocol):
    """The files for the captions of a source."""

    @property
    def source(self) -> Path:
        """The source to build next."""

    def missing(self, rows: Sequence[Row]) -> list[Row]:
        """The rows to caption. SourceError if a file is in the way."""

    def write(self, row: Row, caption: str) -> None:
        """Keep one caption, so that a later run need not make it again."""

    def finish(self) -> None:
        """Called once every row has its caption."""


def caption_files(
    source: Location, data: DataConfig, out: Path | None, settings: str, *, replace: bool
) -> CaptionFiles:
    """The files for the captions of `source`; `out` is the copy of a table.

    `settings` tells captions of an earlier run apart that other settings made. SourceError for other kinds of sources.
    """
    if not is_remote(source) and source.is_dir():
        table = next((source / name for name in TABLES if (source / name).is_file()), None)
        if table is None:
            return TextFiles(source, data, out, replace=replace)
        source = table
    if not is_remote(source) and suffix(source) in READERS:
        copy = out or source.with_name(f"{source.stem}-captioned{source.suffix}")
        if copy.resolve().parent != source.resolve().parent or copy.suffix != source.suffix:
            do, expected = "leave out --out, or name a file there", f"a {source.suffix} file in {source.parent}"
            what = "the copy of a table stands beside it, as its paths start there"
            raise SourceError(what, where=copy, expected=expected, do=do)
        return TableCopy(source, copy, data, settings, content_hash(read_bytes(source)), replace=replace)
    expected = f"a folder of images, or a table ({', '.join(READERS)}), on this machine"
    do = "write a table of its images first"
    raise SourceError("captions cannot be written beside this source", where=source, expected=expected, do=do)


@dataclass(frozen=True)
class TextFiles:
    """NAME.txt beside each target, or in the folder of prompts that `data.columns` names."""

    source: Path
    data: DataConfig
    out: Path | None
    replace: bool = field(kw_only=True)

    def path(self, row: Row) -> Path:
        assert isinstance(row.target, File)
        assert not is_remote(row.target.path)
        if folder := self.data.columns.prompt:
            return self.source / folder / f"{row.name}.txt"
        return row.target.path.with_suffix(".txt")

    def missing(self, rows: Sequence[Row]) -> list[Row]:
        if self.out is not None:
            what, do = "captions of a folder become text files beside its images", "leave out --out"
            raise SourceError(what, where=self.out, do=do)
        if any(not isinstance(row.target, File) or suffix(row.target.path) not in IMAGE_EXTENSIONS for row in rows):
            what, do = "captions cannot be written beside these images", "write a table of the images first"
            raise SourceError(what, where=self.source, expected="image files", do=do)
        if self.replace:
            return list(rows)
        missing = [row for row in rows if not row.prompt]
        in_the_way = [path for row in missing if (path := self.path(row)).exists()]
        if in_the_way:
            raise SourceError(
                "a text file exists, but has no prompt that can be read",
                where=in_the_way[0],
                found=f"{len(in_the_way)} such files",
                do="delete or correct them; --replace writes over every prompt of the source",
            )
        return missing

    def write(self, row: Row, caption: str) -> None:
        write_durably(self.path(row), f"{caption}\n".encode())

    def finish(self) -> None:
        """Every caption has its file."""


@dataclass(frozen=True)
class TableCopy:
    """A copy of a table in which no prompt is empty."""

    table: Path
    source: Path
    """The copy."""
    data: DataConfig
    settings: str
    content: str
    """The hash of the table."""
    replace: bool = field(kw_only=True)
    done: dict[str, str] = field(default_factory=dict)
    """Captions by the location of their row."""

    @property
    def partial(self) -> Path:
        return self.source.with_name(f"{self.source.name}.partial")

    def missing(self, rows: Sequence[Row]) -> list[Row]:
        if self.source.exists() and not self.replace:
            do = "correct its captions, and build from it; --replace makes it again"
            raise SourceError("this table has been written already", where=self.source, do=do)
        captioned = {row.where for row in rows if row.prompt}
        by_row = {row.where: row for row in reversed(rows) if self.replace or row.where not in captioned}
        kept: dict[tuple[str, ...], str] = {}  # the captions by an earlier run with these settings, by their images
        for line in self.partial.read_text(encoding="utf-8").split("\n") if self.partial.is_file() else ():
            try:
                images, settings, caption = json.loads(line)
            except (ValueError, TypeError):  # a line that was cut off
                continue
            if settings == self.settings:
                kept[tuple(images)] = caption
        self.done.update({row.where: kept[key] for row in by_row.values() if (key := _images(row)) in kept})
        return [row for row in reversed(by_row.values()) if row.where not in self.done]

    def write(self, row: Row, caption: str) -> None:
        self.done[row.where] = caption
        with self.partial.open("a", encoding="utf-8", newline="\n") as file:
            file.write("\n" + json.dumps([_images(row), self.settings, caption]))

    def finish(self) -> None:
        data = read_bytes(self.table)
        if content_hash(data) != self.content:
            do = "run the same command again: the captions so far are kept"
            raise SourceError("this table was changed while its captions were written", where=self.table, do=do)
        names, records = READERS[self.table.suffix](self.table, data.decode("utf-8-sig"))
        needs = Needs(control=False, target=False, prompt=False, columns=self.data.columns)
        column = next(iter(find_columns(names, self.table, needs)["prompt"]), "prompt")
        values = []
        for record in records:
            if isinstance(record, tuple):
                where, row = record
                caption: Any = self.done.get(where)
                is_list = column in LIST_COLUMNS or isinstance(row.get(column), list)
                values.append(row | ({column: [caption] if is_list else caption} if caption is not None else {}))
        encoding = "utf-8-sig" if data.startswith(BOM_UTF8) else "utf-8"  # spreadsheets tell UTF-8 by it
        delimiter = delimiter_of(data.decode("utf-8-sig"))
        text = _text(self.table.suffix, delimiter, list(dict.fromkeys([*names, column])), values)
        write_durably(self.source, text.encode(encoding))
        self.partial.unlink(missing_ok=True)


def _images(row: Row) -> tuple[str, ...]:
    return tuple(str(image) for image in (*row.controls, row.target))


def _text(kind: str, delimiter: str, names: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """A table of that kind."""
    if kind == ".jsonl":
        return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    if kind == ".json":
        return f"{json.dumps(rows, ensure_ascii=False, indent=1)}\n"
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, restval="", delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
