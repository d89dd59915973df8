"""Measure the web UI on a folder with large sources: every page's requests, the first rows, and leaving rows out.

    python tools/bench_ui.py [--rows 100000] [--folder DIR] [--json]

Makes a folder of pairs and a table, each of that many rows, in DIR unless they are there; the images and prompts of the
folder are links to a few files. Starts `qwen-cache ui` there, and prints the seconds of CPU of its process and those
that passed. A request is made twice and the slower one is shown, so what is remembered between two does not hide
anything. Linux only: the CPU of the process is read from /proc.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
from PIL import Image

IMAGES = 16  # files that the rows are links to; ext4 takes 65,000 links to each
TICKS = os.sysconf("SC_CLK_TCK")
PAIRS, TABLE = "pairs", "rows.csv"
OF_PAGES = (
    *("/", "/data", "/build", "/train", "/generate", "/queue", "/api/folder", "/api/jobs", "/api/devices"),
    *("/api/settings?sections=train", "/api/data/sources", "/api/build", "/api/train/places", "/api/train/controls"),
    *("/api/train/runs", "/api/generate/choices", "/api/generate/results"),
)
OF_SOURCE: dict[str, dict[str, Any]] = {
    "/api/data": {},
    "/api/data/rows": {},
    "/api/data/rows at the end": {"start": -50},
    "/api/data/rows with problems": {"filter": "problems"},
    "/api/data/rows without a mask": {"filter": "no_mask"},
    "/api/data/rows found": {"search": "row 77"},
    "/api/data/rows found, longest first": {"search": "row 7", "sort": "longest"},
    "/api/data/rows by name": {"sort": "name"},
    "/api/data/positions": {},
    "/api/data/place": {"row": -1},
    "/api/data/row": {"row": -1},
    "/api/data/image": {"row": 5},
    "/api/data/groups": {"finding": "short_prompt"},
}
"""Requests about an open source; a negative number is from the end."""


@dataclass(frozen=True)
class Measured:
    """Seconds of CPU of the server, and those that passed; the bytes of the answer."""

    what: str
    cpu: float
    wall: float
    size: int = 0


def write_sources(folder: Path, rows: int) -> None:
    """The folder of pairs and the table."""
    first = folder / ".first"
    for role, seed in (("target", 0), ("control", 100)):
        for i in range(IMAGES):
            path = first / f"{role}-{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            small = np.random.default_rng(seed + i).integers(0, 256, (4, 6, 3), np.uint8)
            Image.fromarray(small).resize((96, 64), Image.Resampling.BICUBIC).save(path)
    for i in range(IMAGES):
        (first / f"prompt-{i}.txt").write_text(f"make it row {i}\n", encoding="utf-8")
    if not (folder / PAIRS).exists():
        targets, controls = folder / PAIRS / "target_images", folder / PAIRS / "control_images"
        targets.mkdir(parents=True)
        controls.mkdir()
        for i in range(rows):
            of = i % IMAGES
            os.link(first / f"target-{of}.png", targets / f"{i:06}.png")
            os.link(first / f"prompt-{of}.txt", targets / f"{i:06}.txt")
            os.link(first / f"control-{of}.png", controls / f"{i:06}.png")
    if not (folder / TABLE).exists():
        with open(folder / TABLE, "w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["target", "control", "prompt"])
            names = (f"{PAIRS}/{{}}/{i:06}.png" for i in range(rows))
            of_roles = ([name.format("target_images"), name.format("control_images")] for name in names)
            table.writerows([*of_role, f"prompt of row {i}"] for i, of_role in enumerate(of_roles))


class Server:
    """The process of `qwen-cache ui`, and requests to it."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        parts = urlsplit(url)
        self.pid, self.token = process.pid, parts.fragment.partition("=")[2]
        self.connection = HTTPConnection(parts.hostname or "", parts.port, timeout=600)

    def cpu(self) -> float:
        """Seconds of CPU of the process so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def ask(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The answer to a request."""
        data = None if body is None else json.dumps(body)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        self.connection.request("GET" if data is None else "POST", path, data, headers)
        answer = self.connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            sys.exit(f"{path}: {answer.status} {content[:300]!r}")
        return content

    def get(self, path: str, **query: Any) -> Any:
        return json.loads(self.ask(f"{path}?{urlencode(query)}"))

    def measured(self, what: str, action: Callable[[], object]) -> Measured:
        """The costs of an action."""
        cpu, wall = self.cpu(), time.monotonic()
        result = action()
        wall = time.monotonic() - wall
        return Measured(what, self.cpu() - cpu, wall, len(result) if isinstance(result, bytes) else 0)

    def slower(self, what: str, path: str) -> Measured:
        """The slower of two equal requests."""
        return max((self.measured(what, lambda: self.ask(path)) for _ in range(2)), key=lambda each: each.cpu)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """The UI of a folder."""
    command = [sys.executable, "-m", "qwen_cache", "ui", str(folder), "--port", "0", "--no-browser", "--json"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield Server(process, json.loads("".join(process.stdout.readline() for _ in range(3)))["url"])
        finally:
            process.send_signal(signal.SIGINT)


def until(is_it: Callable[[], bool]) -> Callable[[], None]:
    """An action that asks until the answer is yes."""

    def waiting() -> None:
        while not is_it():
            time.sleep(0.05)

    return waiting


def measure_source(server: Server, source: str, rows: int) -> Iterator[Measured]:
    """The costs of opening a source, of each request about it, and of leaving half of its rows out."""

    def counted() -> int:
        return int(server.get("/api/data/rows", source=source, count=50)["total"])

    def is_listed() -> bool:
        return not server.get("/api/data", source=source)["listing"]

    cpu, wall = server.cpu(), time.monotonic()
    yield server.measured(f"{source}: the first rows", until(lambda: counted() >= min(50, rows)))
    until(is_listed)()
    yield Measured(f"{source}: all rows", server.cpu() - cpu, time.monotonic() - wall)
    for what, query in OF_SOURCE.items():
        known = {name: value % rows if isinstance(value, int) else value for name, value in query.items()}
        path = f"{what.partition(' ')[0]}?{urlencode({'source': source} | known)}"
        yield server.slower(f"{source}: GET {what}", path)
    order, half = server.get("/api/data", source=source)["order"], list(range(rows // 2))
    for name, is_out in (("leave out", True), ("put back", False)):
        body = {"source": source, "rows": half, "order": order, "left_out": is_out}
        yield server.measured(f"{source}: {name} {len(half):,} rows", partial(server.ask, "/api/data/left-out", body))
        yield server.slower(f"{source}: GET /api/data after that", f"/api/data?{urlencode({'source': source})}")
        until(is_listed)()


def measure(folder: Path, rows: int) -> Iterator[Measured]:
    """All costs, on a server that has just started."""
    write_sources(folder, rows)
    with serving(folder) as server:
        until(lambda: bool(server.ask("/api/folder")))()
        for path in OF_PAGES:
            yield server.slower(f"GET {path}", path)
        for source in (PAIRS, TABLE):
            yield from measure_source(server, source, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="of each source")
    parser.add_argument("--folder", type=Path, help="where to put the sources; by default a temporary folder")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = []
        for each in measure(options.folder or Path(temporary), options.rows):
            found.append(each)
            if not options.json:
                print(f"{each.cpu:7.2f} s CPU {each.wall:7.2f} s  {each.size:>10,}  {each.what}", flush=True)
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
