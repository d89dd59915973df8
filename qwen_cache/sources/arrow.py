"""Tables that hold the images themselves: Parquet files, and folders that `datasets` wrote with `save_to_disk`.

An image is a struct of `bytes` and `path` (without bytes, the file at `path`, relative to the folder), plain bytes, or
a path; several controls are a list of these. Arrow files are mapped. Parquet has no random access within a row group:
cells are streamed, the newest rows are kept, and going further back restarts the row group. A page is decoded as a
whole, so the file sets the least memory; `datasets` makes row groups of about 100 MB. Plain bytes are read once more,
to find the empty cells. Refuses columns that differ between files.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from qwen_cache.errors import Problem, SourceError
from qwen_cache.sources.places import RangeFile, TableFolder, base_name, open_regular, parent, read_bytes
from qwen_cache.sources.rows import LEFT_OUT, Columns, Draft, Needs, Record, find_columns, given, read_rows, role_of
from qwen_cache.sources.tables import LOOKED_AT, image_columns
from qwen_cache.storage.remote import Location, is_remote
from qwen_cache.text import parse_json

IMAGES = ("target", "control", "mask", "rejected")
KEPT_ROWS = 40  # of a row group, up to the newest: the plan reads with up to 32 threads, out of order
OPEN_GROUPS = 2  # threads read on both sides of a border
LOCAL_BUFFER, REMOTE_BUFFER = 1 << 20, 8 << 20  # bytes of a column per read; a request takes 0.1 s
LIGHT_ROWS, HEAVY_ROWS = 1024, 16  # per read, without and with the bytes of images


class Table(Protocol):
    """A table whose cells may hold images."""

    path: Location
    folder: TableFolder
    schema: Any
    images: tuple[str, ...]
    """The columns of images that are used."""
    embedding: frozenset[str]
    """The columns whose images are all in the table, not in separate files."""

    def records(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The values of some columns, row by row, as Arrow scalars; the bytes of images may be missing."""
        ...

    def value(self, row: int, column: str) -> Any:
        """One value as an Arrow scalar, with the bytes of its image."""
        ...

    def embeds(self, name: str, unnamed: int) -> bool:
        """True if every image of a column is known to have its bytes in the table; `unnamed` of them have no path."""
        ...


@dataclass(frozen=True, slots=True)
class Cell:
    """An image in a table."""

    table: Table
    row: int
    column: str
    item: int | None
    """Its index in a list."""
    path: str | None

    def __str__(self) -> str:
        column = repr(self.column) if "[" in self.column else self.column  # `a[0]` may be a column, and an item of `a`
        item = "" if self.item is None else f"[{self.item}]"
        return f"{self.table.path}[{self.row}].{column}{item}"

    @property
    def name(self) -> str:
        if self.path:
            return self.table.folder.name(self.path)
        return f"{base_name(self.table.path).rpartition('.')[0]}/{self.row}"

    @property
    def files(self) -> tuple[Location, ...]:
        if self.path is None or self.column in self.table.embedding:
            return (self.table.path,)
        try:
            return self.table.path, self.table.folder.file(self.path)
        except SourceError:  # `read` raises it if the cell has no bytes
            return ()

    def read(self) -> bytes:
        with _explained(self):
            value = self.table.value(self.row, self.column).as_py()
        content = value if self.item is None else value[self.item]
        data = content.get("bytes") if isinstance(content, dict) else content
        if data is None and self.path:
            return read_bytes(self.table.folder.file(self.path))
        if data is None:
            raise SourceError("the cell has neither bytes nor a path", where=self, do="fill it, or remove the row")
        return bytes(data)


@contextmanager
def _explained(where: object) -> Iterator[None]:
    """Raise Arrow's errors as SourceErrors that name the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise SourceError("the file does not exist", where=where, do="correct the path") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError, EOFError) as error:
        do = "copy or download the file again"
        raise SourceError("the file is damaged or incomplete", where=where, found=error, do=do) from error


class ArrowTable:
    """An Arrow stream on a disk, mapped."""

    def __init__(self, path: Path) -> None:
        self.path: Location = path
        self.folder = TableFolder(path.parent)
        with _explained(path):
            _require_regular(path)
            self.table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
            self.table.validate(full=True)  # damaged offsets become an error instead of a crash
        self.schema = self.table.schema
        self.images: tuple[str, ...] = ()
        self.embedding: frozenset[str] = frozenset()

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_here, (ArrowTable, self.path)

    def records(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        for row in range(len(self.table)):
            yield {name: self.value(row, name) for name in names}

    def value(self, row: int, column: str) -> Any:
        return self.table.column(column)[row]

    def embeds(self, name: str, unnamed: int) -> bool:
        column = self.table.column(name)
        values = pc.list_flatten(column) if _is_list(column.type) else column
        has_struct = pa.types.is_struct(values.type)
        return bool(has_struct and pc.struct_field(values, "bytes").null_count == values.null_count)


class ParquetTable:
    """A Parquet file; all files of a source share `groups`."""

    def __init__(
        self, path: Location, groups: OpenGroups, allow_urls: tuple[str, ...], images: tuple[str, ...] = ()
    ) -> None:
        self.path, self.groups, self.folder = path, groups, TableFolder(parent(path), allow_urls)
        self.images = images
        with _explained(path):
            self.metadata = pq.read_metadata(_source(path))
            self.schema = self.metadata.schema.to_arrow_schema()
        counts = (self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups))
        self.starts = list(accumulate(counts, initial=0))[:-1]
        self.embedding: frozenset[str] = frozenset()

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_here, (ParquetTable, self.path, self.groups, self.folder.allow_urls, self.images)

    def embeds(self, name: str, unnamed: int) -> bool:
        """By the statistics of the file, in which both parts of an absent image count as null, or neither does."""
        without_bytes, without_path = self._nulls(name, "bytes"), self._nulls(name, "path")
        return without_bytes is not None and without_path == without_bytes + unnamed

    def _nulls(self, name: str, part: str) -> int | None:
        """How many values of this part of the images in a column are null; None if the file does not say."""
        leaves = (self.metadata.schema.column(i).path for i in range(len(self.metadata.schema)))
        numbers = [i for i, leaf in enumerate(leaves) if leaf.startswith(f"{name}.") and leaf.endswith(f".{part}")]
        groups = [self.metadata.row_group(group) for group in range(self.metadata.num_row_groups)]
        found = [group.column(number).statistics for group in groups for number in numbers]
        known = len(numbers) == 1 and all(each is not None and each.has_null_count for each in found)
        return sum(each.null_count for each in found) if known else None

    def open(self) -> Any:
        remote = is_remote(self.path)
        size = REMOTE_BUFFER if remote else LOCAL_BUFFER
        return pq.ParquetFile(_source(self.path), metadata=self.metadata, buffer_size=size, pre_buffer=False)

    def records(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        leaves = [self.metadata.schema.column(i).path for i in range(len(self.metadata.schema))]
        wanted: list[str] = []
        heavy = False
        for name in names:
            matching = [leaf for leaf in leaves if leaf == name or leaf.startswith(name + ".")]
            paths = [leaf for leaf in matching if leaf.endswith(".path")] if name in self.images else matching
            heavy = heavy or not paths
            wanted += paths or matching
        with _explained(self.path):
            for batch in self.open().iter_batches(HEAVY_ROWS if heavy else LIGHT_ROWS, columns=wanted):
                for row in range(batch.num_rows):
                    yield {name: batch.column(name)[row] for name in names}

    def value(self, row: int, column: str) -> Any:
        group = bisect_right(self.starts, row) - 1
        return self.groups.row(self, group, row - self.starts[group]).column(column)[0]


@lru_cache(maxsize=64)
def _opened_here(kind: type[Table], *arguments: Any) -> Table:
    """A table from another process, opened once for all its cells."""
    return kind(*arguments)


@lru_cache(maxsize=1)
def _groups_here() -> OpenGroups:
    return OpenGroups()


def _source(path: Location) -> Any:
    if is_remote(path):
        return RangeFile(path)
    _require_regular(path)
    return str(path)


def _require_regular(path: Path) -> None:
    """OSError for a pipe: pyarrow opens files by name, and would wait for it."""
    with open_regular(path):
        pass


class OpenGroups:
    """The row groups of Parquet files that are open for reading."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[Location, int], _Group] = OrderedDict()
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _groups_here, ()

    def row(self, table: ParquetTable, number: int, row: int) -> Any:
        """A record batch of one row, with the images."""
        key = table.path, number
        with self._lock:
            group = self._open.pop(key, None)
            if group is None or (row < group.position and row not in group.kept):
                group = _Group(table.open().iter_batches(1, row_groups=[number], columns=list(table.images)))
            self._open[key] = group
            while len(self._open) > OPEN_GROUPS:
                self._open.popitem(last=False)
            return group.row(row)


@dataclass
class _Group:
    batches: Iterator[Any]
    position: int = 0
    kept: dict[int, Any] = field(default_factory=dict)

    def row(self, row: int) -> Any:
        while self.position <= row:
            batch = next(self.batches, None)
            if batch is None:
                raise EOFError("it has fewer rows than before")
            self.kept[self.position] = batch
            self.kept.pop(self.position - KEPT_ROWS, None)
            self.position += 1
        return self.kept[row]


def read_parquet(paths: Sequence[Location], needs: Needs) -> Iterator[Problem | Draft]:
    """The rows of Parquet files, in order."""
    groups = OpenGroups()
    return _read_tables((ParquetTable(path, groups, needs.allow_urls) for path in paths), paths[0], needs)


def read_saved(folder: Path, needs: Needs) -> Iterator[Problem | Draft]:
    """The rows of a folder that `datasets` saved."""
    state = folder / "state.json"
    try:
        names = [each["filename"] for each in parse_json(read_bytes(state))["_data_files"]]
        plain = all(re.fullmatch(r"[^/\\]+\.arrow", name) for name in names)
    except (ValueError, LookupError, TypeError) as error:
        raise SourceError(
            "this is not what `datasets` saves", where=state, found=repr(error), do="save it again"
        ) from error
    if not plain:
        raise SourceError("a file leads out of the folder", where=state, found=names, do="save it again")
    return _read_tables((ArrowTable(folder / name) for name in names), folder, needs)


def splits(paths: Iterable[Location]) -> dict[str, list[Location]]:
    """Parquet files by their split, as `datasets` names them: `train-00000-of-00002.parquet`."""
    found: dict[str, list[Location]] = {}
    for path in paths:
        if match := re.fullmatch(r"(.+)-\d+-of-\d+\.parquet", base_name(path)):
            found.setdefault(match[1], []).append(path)
    return found


def _read_tables(tables: Iterable[Table], where: Location, needs: Needs) -> Iterator[Problem | Draft]:
    columns: Columns = {}
    first: Table | None = None
    taken: dict[str, int] = {}
    rows = 0
    for table in tables:
        if first is None:
            images = _columns_of_paths(table, needs)
            first, columns = table, find_columns(table.schema.names, table.path, needs, images=images)
        used = [name for listed in columns.values() for name in listed]
        for name in [*used, *(each for each in table.schema.names if each.strip().lower() in LEFT_OUT)]:
            if not all(name in each.schema.names for each in (first, table)) or (
                table.schema.field(name).type != first.schema.field(name).type
            ):
                expected, do = f"{name!r} as in {first.path}", "name the files that belong together"
                raise SourceError("the columns differ between files", where=table.path, expected=expected, do=do)
        used_for_images = [name for role in IMAGES for name in columns[role]]
        table.images = tuple(name for name in used_for_images if _is_image(table.schema.field(name).type))
        unnamed: Counter[str] = Counter()
        for draft in read_rows(_records(table, used, unnamed), columns, table.folder, taken):
            rows += 1
            yield draft
        table.embedding = frozenset(name for name in table.images if table.embeds(name, unnamed[name]))
    if not rows:
        raise SourceError("the table has no rows", where=where, expected="one row per sample", do="name another source")


def _columns_of_paths(table: Table, needs: Needs) -> list[str]:
    """The columns of text without a role whose first values are paths of images that exist on this machine."""
    named = {name for names in given(needs.columns).values() for name in names}
    fields = [each for each in table.schema if each.name not in named and role_of(each.name)[0] is None]
    names = [each.name for each in fields if _is_text(each.type)]
    if not names or is_remote(table.path):
        return []
    with _explained(table.path):
        rows = [{name: value.as_py() for name, value in row.items()} for row in islice(table.records(names), LOOKED_AT)]
    return image_columns(names, [(str(table.path), row) for row in rows], parent(table.path))


def _is_text(kind: Any) -> bool:
    inner = kind.value_type if _is_list(kind) else kind
    return bool(pa.types.is_string(inner) or pa.types.is_large_string(inner))


def _records(table: Table, used: Sequence[str], unnamed: Counter[str]) -> Iterator[Record]:
    """The rows; `unnamed` counts the images of each column that have no path."""
    for row, values in enumerate(table.records(used)):
        with _explained(f"{table.path}[{row}]"):
            row_values = {
                name: _cells(table, row, name, value) if name in table.images else value.as_py()
                for name, value in values.items()
            }
        for name in table.images:
            cells = row_values[name]
            listed = cells if isinstance(cells, list) else [cells]
            unnamed[name] += sum(cell is not None and cell.path is None for cell in listed)
        yield f"{table.path}[{row}]", row_values


def _cells(table: Table, row: int, column: str, value: Any) -> Cell | list[Cell | None] | None:
    """The images of one cell, unread."""
    if not value.is_valid:
        return None
    if _is_list(value.type):
        return [_cell(table, row, column, index, item) for index, item in enumerate(value)]
    return _cell(table, row, column, None, value)


def _cell(table: Table, row: int, column: str, item: int | None, value: Any) -> Cell | None:
    if not value.is_valid:
        return None
    has_path = pa.types.is_struct(value.type) and "path" in [each.name for each in value.type]
    return Cell(table, row, column, item, value["path"].as_py() if has_path else None)


def _is_image(kind: Any) -> bool:
    if _is_list(kind):
        return _is_image(kind.value_type)
    if pa.types.is_struct(kind):
        return "bytes" in [each.name for each in kind]
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
