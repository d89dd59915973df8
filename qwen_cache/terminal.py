"""All output: streams, messages, progress as a line or as JSON, tables of problems, errors of the system."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from qwen_cache.errors import Problem
from qwen_cache.text import json_without_controls, one_line, plain, shell_line, without_controls

if TYPE_CHECKING:
    from rich.progress import Progress

# ---- system errors ---------------------------------------------------------------------------------------------------
# Errors of the operating system as messages: which file, what the system says, and what to do.
#
# An error that is not in the table is taken for a bug of ours, and keeps its traceback.

_AGAIN = "then run the same command again: what is complete is kept"
_DISK = f"check the disk (`dmesg` on Linux); copy the file to another disk, {_AGAIN}"
_NETWORK = f"check the network and the mount, {_AGAIN}"
_RIGHTS = "check owner and permissions of the file and its folder, or name a folder that you can write to"
_LOCKS = "this file system lacks something that is needed: use a folder on a local disk"
_DEVICE = f"check that the disk is there and mounted, {_AGAIN}"
_IN_USE = f"close the program that uses it, {_AGAIN}"
_FULL = f"make room, or name a folder on another disk, {_AGAIN}"
_PATH = "check the path: another program may have moved or removed it"

ADVICE = {
    "EACCES": _RIGHTS,
    "EAGAIN": "raise the limit of processes and threads (`ulimit -u`), or end other programs",
    "EBUSY": _IN_USE,
    "ECONNABORTED": _NETWORK,
    "ECONNREFUSED": _NETWORK,
    "ECONNRESET": _NETWORK,
    "EDQUOT": f"your quota is used up: remove files of yours, or ask for more, {_AGAIN}",
    "EEXIST": "move it away, or choose another name",
    "EFBIG": "this file system, or `ulimit -f`, limits the size of files: use another, or raise the limit",
    "EHOSTDOWN": _NETWORK,
    "EHOSTUNREACH": _NETWORK,
    "EILSEQ": "this file system refuses the name: rename the file",
    "EIO": _DISK,
    "EISDIR": "a folder has this name: move it away, or choose another name",
    "ELOOP": "symbolic links lead to each other here: remove one of them",
    "EMFILE": "raise the limit of open files (`ulimit -n 4096`)",
    "EMLINK": "too many hard links: copy the folder to another file system",
    "ENAMETOOLONG": "choose a shorter name or a folder with a shorter path",
    "ENETUNREACH": _NETWORK,
    "ENFILE": "the whole system has too many open files: end other programs, or raise fs.file-max",
    "ENODEV": _DEVICE,
    "ENOENT": _PATH,
    "ENOLCK": _LOCKS,
    "ENOMEM": "close other programs, or use a machine with more memory",
    "ENOSPC": _FULL,
    "ENOSYS": _LOCKS,
    "ENOTCONN": _NETWORK,
    "ENOTDIR": "a file is where a folder should be: move it away, or choose another path",
    "ENOTEMPTY": "move what is in this folder away, or choose another",
    "ENOTSUP": _LOCKS,
    "EOPNOTSUPP": _LOCKS,
    "ENXIO": _DEVICE,
    "EPERM": _RIGHTS,
    "EREMOTEIO": _NETWORK,
    "EROFS": "this file system is read-only: name a folder on another",
    "ESTALE": f"the server has removed or replaced this file: mount the folder again, {_AGAIN}",
    "ETIMEDOUT": _NETWORK,
    "ETXTBSY": _IN_USE,
    "EXDEV": "use folders on one file system",
}
"""Advice about an error, by its name in `errno`; a system may lack some."""

_WINDOWS = {
    19: "EROFS",  # ERROR_WRITE_PROTECT
    21: "ENODEV",  # ERROR_NOT_READY
    23: "EIO",  # ERROR_CRC
    29: "EIO",  # ERROR_WRITE_FAULT
    30: "EIO",  # ERROR_READ_FAULT
    31: "EIO",  # ERROR_GEN_FAILURE
    32: "EBUSY",  # ERROR_SHARING_VIOLATION
    33: "EBUSY",  # ERROR_LOCK_VIOLATION
    39: "ENOSPC",  # ERROR_HANDLE_DISK_FULL
    53: "ENETUNREACH",  # ERROR_BAD_NETPATH
    55: "ENODEV",  # ERROR_DEV_NOT_EXIST
    59: "ENETUNREACH",  # ERROR_UNEXP_NET_ERR
    64: "ECONNRESET",  # ERROR_NETNAME_DELETED
    121: "ETIMEDOUT",  # ERROR_SEM_TIMEOUT
    123: "EILSEQ",  # ERROR_INVALID_NAME
    206: "ENAMETOOLONG",  # ERROR_FILENAME_EXCED_RANGE
    1117: "EIO",  # ERROR_IO_DEVICE
    1224: "EBUSY",  # ERROR_USER_MAPPED_FILE
    1295: "EDQUOT",  # ERROR_DISK_QUOTA_EXCEEDED
    1450: "ENOMEM",  # ERROR_NO_SYSTEM_RESOURCES
    1455: "ENOMEM",  # ERROR_COMMITMENT_LIMIT: the paging file is too small
    1921: "ELOOP",  # ERROR_CANT_RESOLVE_FILENAME
}
"""Errors of Windows (winerror.h) that Python gives another name in `errno`, or EINVAL."""


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, and of a quota that is used up."""


def message_of(error: OSError | MemoryError) -> str | None:
    """The message for an error of the system; None for an error that no user can cause."""
    if isinstance(error, MemoryError):
        found = f" ({plain(one_line(str(error)))})" if str(error) else ""
        return f"not enough memory{found}\n  → {ADVICE['ENOMEM']}"
    name = _WINDOWS.get(getattr(error, "winerror", None) or 0) or errno.errorcode.get(error.errno or 0, "")
    if name not in ADVICE:
        return None
    return f"{_place(error)}: {plain(one_line(error.strerror or name))}\n  → {ADVICE[name]}"


def _place(error: OSError) -> str:
    """The file that the error names; not every call of the system knows it."""
    name = error.filename
    return "reading or writing" if name is None or isinstance(name, int) else plain(os.fsdecode(name))


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """An OSError inside names `path`, as those of reading and writing an open file do not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


# ---- plain output ----------------------------------------------------------------------------------------------------
# The streams and consoles of both programs: no control character reaches a terminal or a log that is not rich's own.
#
# Everything that this process prints goes through one of the two: usage errors, tracebacks, warnings and the libraries'
# logs through `PlainStream`, our own messages, tables and progress lines through `PlainConsole`. What another process
# or native code writes to the same descriptor is out of reach.

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


# ---- progress file ---------------------------------------------------------------------------------------------------
# Progress for other programs: the progress line as JSON, in the file that QWEN_CACHE_PROGRESS names.
#
# The file is replaced as a whole, at most four times a second and only if the line has changed, whether or not the line
# is shown. Of lines inside each other it has the outer one. A file that cannot be written is one warning, never an
# error.

VARIABLE = "QWEN_CACHE_PROGRESS"
INTERVAL = 0.25  # seconds between two writes

_in_use = Lock()
"""Held by the line whose progress is written."""
_warned = Event()


class ProgressFile:
    """Writes what `state` returns, from a thread of its own, between `start` and `stop`; both may be called twice."""

    def __init__(self, path: Path, state: Callable[[], Mapping[str, Any] | None], warn: Callable[[str], None]) -> None:
        self._path, self._state, self._warn = path, state, warn
        self._ends = Event()
        self._thread: Thread | None = None
        self._written = b""

    def start(self) -> None:
        if self._thread is None and _in_use.acquire(blocking=False):
            self._thread = Thread(target=self._write_on, name="progress file", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Write the last state."""
        if self._thread is not None:
            self._ends.set()
            self._thread.join()
            self._thread = None
            self._write()
            _in_use.release()

    def _write_on(self) -> None:
        while not self._ends.wait(INTERVAL):
            self._write()

    def _write(self) -> None:
        state = self._state()
        document = b"" if state is None else json.dumps(state).encode("ascii")
        if document == self._written:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(document)
            os.replace(temporary, self._path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            if not _warned.is_set():
                _warned.set()
                self._warn(f"{VARIABLE}: {self._path}: {error.strerror or error}; progress is not written")
        else:
            self._written = document


def progress_file(state: Callable[[], Mapping[str, Any] | None], warn: Callable[[str], None]) -> ProgressFile | None:
    """The file for a progress line; None if the environment names none."""
    name = os.environ.get(VARIABLE)
    return ProgressFile(Path(name), state, warn) if name else None


# ---- console ---------------------------------------------------------------------------------------------------------
# Terminal output of both programs: messages on stderr, results on stdout, and exit codes.
#
# Values from outside, such as names and prompts, enter a message through `plain`, or `verbatim` where rich reads
# markup. 0: done. 1: the check found faults. 2: failed. 130: interrupted, as shells report it.

FAULTS = 1
FAILED = 2
INTERRUPTED = 130
PROBLEMS_SHOWN = 20


@dataclass
class _Verbosity:
    quiet: bool = False
    verbose: bool = False


_verbosity = _Verbosity()


def set_verbosity(*, quiet: bool = False, verbose: bool = False) -> None:
    """Set what this process prints from now on; with `quiet`, only errors and results."""
    _verbosity.quiet, _verbosity.verbose = quiet, verbose


def is_verbose() -> bool:
    return _verbosity.verbose


def console(*, always: bool = False) -> PlainConsole:
    """The console for messages, on stderr; under `--quiet` it prints only with `always`: errors and results."""

    return PlainConsole(stderr=True, soft_wrap=True, quiet=_verbosity.quiet and not always)


def results(*, soft_wrap: bool = False) -> PlainConsole:
    """The console for results, on stdout. Lines that are too long are wrapped, or with `soft_wrap` left as they are."""

    return PlainConsole(stderr=False, soft_wrap=soft_wrap)


def verbatim(value: object) -> str:
    """A value for text with rich's markup: plain, with its brackets as brackets."""
    from rich.markup import escape

    return escape(plain(value))


def progress(
    *,
    remaining: bool = True,
    transient: bool = False,
    below: Callable[[], str] = lambda: "",
    lanes: Callable[[], Sequence[Mapping[str, Any]]] = lambda: (),
) -> Progress:
    """A progress line on stderr, with the time elapsed. `remaining` also shows the time left, for work of known size;
    `transient` removes the line at the end; `below` has the text of a second line. Other programs get the line and its
    `lanes` from a file (`progress_file`)."""
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Times(ProgressColumn):
        def render(self, task: Task) -> Text:
            text = f"{clock(task.finished_time if task.finished else task.elapsed)} elapsed"
            return Text(text if task.finished or not remaining else f"{text}, {clock(task.time_remaining)} left")

    class Lines(Progress):
        def start(self) -> None:
            super().start()
            if file:
                file.start()

        def stop(self) -> None:
            super().stop()
            if file:
                file.stop()

        def get_renderables(self) -> Iterable[RenderableType]:
            yield from super().get_renderables()
            if text := below():
                yield Text(text, no_wrap=True, overflow="ellipsis")

    description = TextColumn("{task.description}", markup=False)
    count = TextColumn("{task.fields[count]}", markup=False, table_column=Column(no_wrap=True))
    columns = [description, BarColumn(bar_width=24), count, Times(table_column=Column(no_wrap=True))]
    out = console()
    file = progress_file(lambda: _state(bar, lanes()), lambda text: out.print(f"warning: {text}", markup=False))
    bar = Lines(*columns, console=out, transient=transient, disable=out.quiet or (transient and not out.is_terminal))
    return bar


def _state(bar: Progress, lanes: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The progress line for other programs; times in whole seconds, so that it changes once a second at least."""
    if not bar.tasks:
        return None
    task = bar.tasks[0]
    elapsed, left = task.finished_time if task.finished else task.elapsed, task.time_remaining
    return {
        "what": task.description,
        "done": task.completed,
        "total": task.total,
        "text": task.fields["count"],
        "elapsed": None if elapsed is None else round(elapsed),
        "left": None if left is None else round(left),
        "lanes": list(lanes),
    }


@contextmanager
def counting(
    what: str, total: int | None = None, *, in_bytes: bool = False, transient: bool = False
) -> Iterator[Callable[[int], None]]:
    """A progress line; yields a function that adds to the work done. `transient` removes the line at the end."""
    begin, done = time.monotonic(), 0
    with progress(remaining=total is not None, transient=transient) as bar:
        task = bar.add_task(plain(what), total=total, count="")

        def advance(count: int) -> None:
            nonlocal done
            done += count
            speed = done / max(time.monotonic() - begin, 1e-6)
            text = f"{human_bytes(done)}, {human_bytes(speed)}/s" if in_bytes else f"{done}/{total}, {speed:.2f}/s"
            bar.update(task, completed=done, count=text)

        yield advance
        bar.update(task, total=done)


def print_problems(
    problems: Sequence[Problem], of: str = "the source", rest: str = "--dry-run --json lists all"
) -> None:
    """Print the first problems, each with its fix; `rest` says where the others are listed."""
    if not problems:
        return
    out = console(always=True)
    out.print(f"[bold red]{plural(len(problems), 'problem')}[/] in {of}:")
    for problem in problems[:PROBLEMS_SHOWN]:
        out.print(f"  {problem}".replace("\n", "\n  "), markup=False)
    if len(problems) > PROBLEMS_SHOWN:
        out.print(f"  and {len(problems) - PROBLEMS_SHOWN} more; {rest}", markup=False)


def print_json(value: Any) -> None:
    """Print the one document of `--json` on stdout."""
    print_text(json_without_controls(json.dumps(value, indent=1, ensure_ascii=False)))


def print_text(text: str) -> None:
    """Print lines for other programs on stdout, exactly as they are."""
    print(text)


def plural(count: float, noun: str) -> str:
    """`1 shard`, `2 shards`, `1.5 shards`."""
    number = f"{count:,g}" if isinstance(count, float) else f"{count}"
    return f"{number} {noun}" if count == 1 else f"{number} {noun}s"


def human_bytes(count: float) -> str:
    """`1.9 GB`, in powers of ten as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def clock(seconds: float | None) -> str:
    """`4:05`, `1:04:05`, and `-:--` where it is not known."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def human_time(seconds: float) -> str:
    """`42 s`, `3 min 10 s`, `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def print_next(*commands: Sequence[str]) -> None:
    """The commands that come after this one, one to a line; nothing without any."""
    if not commands:
        return
    lines = ["next:", *(f"  {plain(shell_line(words))}" for words in commands)]
    console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def typed_again(program: str, without: Collection[str] = (), added: Sequence[str] = ()) -> list[str]:
    """The words of this command, as typed, but for the flags in `without`, and with those in `added`."""
    return [program, *(word for word in sys.argv[1:] if word not in without), *added]


def print_done(what: object) -> None:
    """The last line of a command that made something."""
    console().print(f"[bold green]done[/]: {verbatim(what)}")
