"""Where captions of a source are written: text files beside the targets of a folder, or a copy of a text table.

Nothing that exists is replaced unless asked: a prompt, a text file without one, a copy made earlier. Captions for a
table are kept in FILE.partial until all are there, by their images, so that a stopped run continues even if rows have
moved. Refused: a table that is changed meanwhile, and sources whose prompts are not in files of their own (tars,
Parquet, URLs).
"""

from __future__ import annotations

import csv
import io
import json
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from qwen_cache.errors import SourceError
from qwen_cache.format.identity import content_hash
from qwen_cache.settings.sections import DataConfig
from qwen_cache.sources.columns import LIST_COLUMNS, Columns, find_columns
from qwen_cache.sources.pairs import IMAGE_EXTENSIONS
from qwen_cache.sources.places import File, Location, read_bytes, suffix
from qwen_cache.sources.rows import Needs, Row
from qwen_cache.sources.table_text import delimiter_of
from qwen_cache.sources.text_table import READERS
from qwen_cache.storage.files import write_durably

TABLES = ("metadata.csv", "metadata.jsonl")


class CaptionFiles(Protocol):
    """The files for the captions of a source."""

    @property
    def source(self) -> Path:
        """What to build next."""

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
    if isinstance(source, Path) and source.is_dir():
        table = next((source / name for name in TABLES if (source / name).is_file()), None)
        if table is None:
            return TextFiles(source, data, out, replace=replace)
        source = table
    if isinstance(source, Path) and suffix(source) in READERS:
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
        assert isinstance(row.target.path, Path)
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
        kept = self._kept()
        self.done.update({row.where: kept[key] for row in by_row.values() if (key := _images(row)) in kept})
        return [row for row in reversed(by_row.values()) if row.where not in self.done]

    def _kept(self) -> dict[tuple[str, ...], str]:
        """The captions by an earlier run with these settings, by their images; a line that was cut off is none."""
        kept = {}
        for line in self.partial.read_text(encoding="utf-8").split("\n") if self.partial.is_file() else ():
            try:
                images, settings, caption = json.loads(line)
            except (ValueError, TypeError):
                continue
            if settings == self.settings:
                kept[tuple(images)] = caption
        return kept

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
        column = self._column(names)
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

    def _column(self, names: Sequence[str]) -> str:
        needs = Needs(control=False, target=False, prompt=False, columns=self.data.columns)
        columns: Columns = find_columns(names, self.table, needs)
        return next(iter(columns["prompt"]), "prompt")


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
