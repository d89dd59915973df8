"""The record of a run (`shim.c`) as changes: of names in folders, and of bytes in files.

The model of a disk is ALICE's (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, section 3.1) with
the ordering that POSIX leaves open and journalling file systems use:

- A change of names (create, link, rename, unlink, mkdir, rmdir) is atomic, and durable once the folder of the new name
  (of the removed name, where there is no new one) was synced after it. Until then it may be lost, alone: later changes
  may be on the disk before it. Only changes of one name keep their order.
- Bytes and size of a file are durable once the file was synced after the write. Until then any of its blocks may be
  missing, torn at a sector, or zeros; the size may be set before the bytes.
- Syncing a file does not make its name durable, nor syncing a folder its files' bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

HEADER = struct.Struct("<ciIIIqQ")


class Event(NamedTuple):
    """A call of the record."""

    call: str
    file: int
    path: str
    other: str
    offset: int
    inode: int
    data: bytes


def read_record(path: Path) -> Iterator[Event]:
    data, position = path.read_bytes(), 0
    while position < len(data):
        call, file, path_size, other_size, size, offset, inode = HEADER.unpack_from(data, position)
        position += HEADER.size
        pieces = []
        for length in (path_size, other_size, size):
            pieces.append(data[position : position + length])
            position += length
        yield Event(call.decode(), file, pieces[0].decode(), pieces[1].decode(), offset, inode, pieces[2])


class Write(NamedTuple):
    """Bytes at an offset, or without bytes the size of the file."""

    at: int
    offset: int
    data: bytes | None


@dataclass(eq=False)
class File:
    """A file: its durable bytes at first, what was written, and when it was synced."""

    first: bytes = b""
    writes: list[Write] = field(default_factory=list)
    syncs: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Folder:
    """A folder, whose names are in the changes."""

    first: dict[str, Node] = field(default_factory=dict)


Node = File | Folder
Slot = tuple[Folder, str]


@dataclass(eq=False)
class Change:
    """One change of names: `slots` get a node or None. It is durable from the event `durable` on, if ever."""

    at: int
    slots: list[tuple[Folder, str, Node | None]]
    durable: int | None = None
    needs: list[Change] = field(default_factory=list)
    """The earlier changes of the same names."""

    @property
    def synced_by(self) -> Folder:
        """The folder whose sync makes it durable."""
        return self.slots[-1][0]


class Disk:
    """The changes of a run to a folder; `syncs` of `file` or `folder` may be left out, to show what they are for."""

    def __init__(self, work: Path, before: Path, record: Path, without: str = "") -> None:
        self.work, self.without = work, without
        self.root = self._load(before)
        self.changes: list[Change] = []
        self.marks: dict[str, int] = {}
        self._now: dict[Slot, Node | None] = {}
        self._last: dict[Slot, Change] = {}
        self._open: dict[int, Node] = {}
        self._inodes: dict[int, tuple[File, Slot]] = {}
        self.events = 0
        for event in read_record(record):
            self.events += 1
            self._apply(event)

    def _load(self, path: Path) -> Node:
        if path.is_dir():
            return Folder({each.name: self._load(each) for each in path.iterdir()})
        return File(path.read_bytes())

    def files(self) -> set[File]:
        """Every file that was ever written."""
        nodes = (node for change in self.changes for _, _, node in change.slots)
        return {node for node in (*nodes, *self._open.values(), *self._walk(self.root)) if isinstance(node, File)}

    def _walk(self, node: Node) -> Iterator[Node]:
        yield node
        for each in node.first.values() if isinstance(node, Folder) else ():
            yield from self._walk(each)

    def _slot(self, path: str) -> Slot:
        parts = Path(path).relative_to(self.work).parts
        folder = self.root
        for part in parts[:-1]:
            node = self._at((folder, part)) if isinstance(folder, Folder) else None
            assert node is not None, f"{path} is not in the record"
            folder = node
        assert isinstance(folder, Folder)
        return folder, parts[-1]

    def _at(self, slot: Slot) -> Node | None:
        return self._now[slot] if slot in self._now else slot[0].first.get(slot[1])

    def _find(self, path: str) -> Node | None:
        return self.root if Path(path) == self.work else self._at(self._slot(path))

    def _change(self, *slots: tuple[Slot, Node | None]) -> None:
        change = Change(self.events, [(*slot, node) for slot, node in slots])
        for slot, node in slots:
            if slot in self._last:
                change.needs.append(self._last[slot])
            self._now[slot], self._last[slot] = node, change
        self.changes.append(change)

    def _apply(self, event: Event) -> None:
        if event.call in "oO":
            self._opened(event)
        elif event.call in "wt":
            file = self._open[event.file]
            assert isinstance(file, File)
            file.writes.append(Write(self.events, event.offset, event.data if event.call == "w" else None))
        elif event.call == "s":
            self._synced(self._open[event.file])
        elif event.call == "m":
            self._change((self._slot(event.path), Folder()))
        elif event.call == "u":
            self._change((self._slot(event.path), None))
        elif event.call == "r":
            source = self._slot(event.path)
            self._change((source, None), (self._slot(event.other), self._at(source)))
        elif event.call == "l":
            outside = not Path(event.path).is_relative_to(self.work)
            node = File(Path(event.path).read_bytes()) if outside else self._find(event.path)
            self._change((self._slot(event.other), node))
        elif event.call == "!":
            self.marks.setdefault(event.path, self.events)
        else:
            raise AssertionError(f"{event.other} of {event.path} cannot be replayed")

    def _opened(self, event: Event) -> None:
        node = self._find(event.path)
        if node is None and event.inode in self._inodes:  # renamed by a system call that the shim does not see
            node, source = self._inodes[event.inode]
            self._change((source, None), (self._slot(event.path), node))
        elif node is None:
            node = File()
            self._change((self._slot(event.path), node))
        elif event.call == "O":
            assert isinstance(node, File)
            node.writes.append(Write(self.events, 0, None))
        if isinstance(node, File):
            self._inodes[event.inode] = node, self._slot(event.path)
        self._open[event.file] = node

    def _synced(self, node: Node) -> None:
        if isinstance(node, File):
            if self.without != "file":
                node.syncs.append(self.events)
        elif self.without != "folder":
            for change in self.changes:
                if change.synced_by is node:
                    self._make_durable(change)

    def _make_durable(self, change: Change) -> None:
        if change.durable is None:
            change.durable = self.events
            for earlier in change.needs:
                self._make_durable(earlier)
