"""Measure everything on a GPU that was only computed or tested on CPUs, and write docs/gpu/CARD.md and CARD.json.

    make gpu                                           # = python tools/gpu_report.py
    python tools/gpu_report.py --only step/fp8         # measure one part again; the others stay in the report
    python tools/gpu_report.py --list                  # the parts, in order of worth
    python tools/gpu_report.py --readme                # make the README's table from docs/gpu/*.json

Weights are random, of the real sizes, and made on the device: nothing is downloaded. Each part is a process of its own
with a limit, so an error or a lack of memory costs that part alone. Results are written after every part; Ctrl-C and
the limit of --minutes keep them. Exit code 2 without an accelerator, 1 if a part failed or a check in it did.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu import page

from qwen_cache.storage.files import write_durably

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "docs" / "gpu"
LEAST_SECONDS = 45  # a part that has less would not get beyond its imports and its weights
GRACE_SECONDS = 5  # between asking a process to end and killing it
QUOTED = 400  # characters of a reason
TRACED = 4000  # characters of a traceback or of a process's output, in the JSON alone
NO_ACCELERATOR = 2
INTERRUPTED = "interrupted"
Report = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A process: the cases of a module of tools/gpu, and the most minutes that they may take."""

    name: str
    title: str
    module: str
    minutes: float


PARTS = (
    Part("machine", "The machine", "machine", 3),
    Part("step/bf16", "Training step, bf16", "steps", 5),
    Part("equality", "Equality with stock diffusers, bf16", "equality", 5),
    Part("step/compile", "Training step, compiled", "steps", 8),
    Part("block", "One block", "block", 5),
    Part("attention", "Attention", "attention", 5),
    Part("step/products", "Training step, 8-bit products", "steps", 9),
    Part("step/fp8", "Training step, fp8", "steps", 4),
    Part("step/offload", "Training step, offloaded blocks and activations", "steps", 12),
    Part("tests", "Tests that need a GPU", "checks", 8),
    Part("encode", "Encoding", "encode", 5),
    Part("step/nf4", "Training step, nf4", "steps", 4),
    Part("step/layouts", "Training step, padded and packed", "steps", 6),
    Part("wait", "Waiting for data", "waiting", 5),
    Part("predict", "Denoising step", "predicting", 6),
    Part("step/tabulated", "Training step, tabulated modulation", "steps", 3),
    Part("step/2.1", "Training step, Qwen-Image-2.1", "steps", 4),
    Part("step/int8", "Training step, int8", "steps", 3),
    Part("step/checkpointing", "Training step, fewer recomputed blocks", "steps", 4),
    Part("step/full", "Training step, full training", "steps", 4),
    Part("sharded", "Training step on two GPUs", "sharded", 8),
    Part("published", "Published figures", "published", 20),
)
"""In order of worth: what the time does not suffice for is at the end."""


# ---- one part, in its own process ------------------------------------------------------------------------------------


def run_cases(part: Part, options: argparse.Namespace) -> None:
    """Write a line of JSON to --rows for every case as soon as it is measured; an error is the reason of its case."""
    from gpu.measure import UnavailableError, open_card

    card = open_card(options.device, small=options.small, gigabytes=options.memory)
    with open(options.rows, "a", encoding="utf-8") as file:
        for name, work in importlib.import_module(f"gpu.{part.module}").cases(part.name, card):
            began = time.monotonic()
            try:
                row = {"case": name, **work()}
            except UnavailableError as error:
                row = {"case": name, "reason": str(error)}
            except Exception as error:  # noqa: BLE001 (reported; the next case may work)
                trace = public(traceback.format_exc())[-TRACED:]
                row = {"case": name, "reason": describe(error), "raised": True, "traceback": trace}
            file.write(json.dumps({**row, "took": time.monotonic() - began}) + "\n")
            file.flush()


def describe(error: BaseException) -> str:
    """Its type and the first sentence of its message."""
    kind = "out of memory" if "OutOfMemory" in type(error).__name__ else type(error).__name__
    return public(f"{kind}: {str(error).strip().partition(chr(10))[0]}")[:QUOTED]


def public(text: str) -> str:
    """Without the paths of this machine, which name its users."""
    names = {sys.prefix: "PYTHON", sys.base_prefix: "PYTHON", str(ROOT): ".", str(Path.home()): "~"}
    for path in sorted(names, key=len, reverse=True):  # one may be inside another
        text = text.replace(path, names[path])
    return text


def print_card(options: argparse.Namespace) -> int:
    """Print the name of the card; without one, an error and exit code 2."""
    from gpu.measure import UnavailableError, open_card

    from qwen_cache.errors import DeviceError

    try:
        print(json.dumps(open_card(options.device, small=options.small).name))
    except (UnavailableError, DeviceError) as error:
        print(f"gpu_report: {describe(error).partition(': ')[2]}", file=sys.stderr)
        return NO_ACCELERATOR
    return 0


# ---- all parts -------------------------------------------------------------------------------------------------------


def run_part(command: Sequence[str], rows: Path, seconds: float) -> Report:
    """Run one process for at most `seconds`; its rows, and why it ended before its last case, if it did."""
    began, log = time.monotonic(), rows.with_suffix(".log")
    status, reason = "done", None
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(seconds)
            if code:
                status, reason = "failed", f"the process ended with {exit_name(code)}: {last_line(output_of(log))}"
        except subprocess.TimeoutExpired:
            status, reason = "stopped", f"at its limit of {seconds:.0f} s"
        except KeyboardInterrupt:
            status, reason = INTERRUPTED, "by a signal"
        finally:
            end(process)
    lines = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
    found = {"status": status, "reason": reason, "seconds": time.monotonic() - began}
    end_of_log = {"output": output_of(log)[-TRACED:]} if reason else {}
    return {**found, **end_of_log, "rows": [json.loads(line) for line in lines]}


def exit_name(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def output_of(log: Path) -> str:
    return public(log.read_text(encoding="utf-8", errors="replace"))


def last_line(output: str) -> str:
    """The last line that has text."""
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1][-QUOTED:] if lines else "without a message"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue


@dataclass
class Run:
    """A report in the making: `results` is written whenever a part has ended."""

    parts: Sequence[Part]
    command: Callable[[Part, Path], Sequence[str]]
    minutes: float
    results: Report
    write: Callable[[Report], None]

    def all(self) -> None:
        """Run the parts one after the other; KeyboardInterrupt once an interrupted part is recorded."""
        finish, interrupted = time.monotonic() + 60 * self.minutes, False
        for i, part in enumerate(self.parts):
            left = finish - time.monotonic()
            if interrupted:
                self.record(part, not_run("the run was interrupted"))
            elif left < LEAST_SECONDS:
                self.record(part, not_run(f"the limit of {self.minutes:g} minutes was reached"))
            else:
                print(f"{i + 1} of {len(self.parts)}: {part.title}", file=sys.stderr)
                result = self.run(part, min(left, 60 * part.minutes))
                print(f"    {page.outcome(result)}", file=sys.stderr)
                interrupted = result["status"] == INTERRUPTED
        if interrupted:
            raise KeyboardInterrupt

    def run(self, part: Part, seconds: float) -> Report:
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.jsonl"
            result = run_part(self.command(part, rows), rows, seconds)
        self.record(part, result)
        return result

    def record(self, part: Part, result: Report) -> None:
        told = {"title": part.title, "module": part.module, "date": today(), "commit": commit()}
        self.results["parts"][part.name] = told | result
        self.write(self.results)


def not_run(reason: str) -> Report:
    return {"status": "not run", "reason": reason, "seconds": 0.0, "rows": []}


def today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def commit() -> str:
    """The commit that is checked out, with a plus sign for changed files."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def has_failures(report: Report) -> bool:
    """True if a part failed, a case raised, or a check was not passed."""
    parts = report["parts"].values()
    rows = [row for part in parts for row in part["rows"]]
    failed = any(row.get("raised") or row.get("failed") or row.get("within") is False for row in rows)
    return failed or any(part["status"] == "failed" for part in parts)


# ---- the files -------------------------------------------------------------------------------------------------------


def file_stem(card: str, memory: float | None) -> str:
    """The card's name as the name of a file."""
    limited = f"{card} with {memory:g} GB" if memory else card
    return re.sub(r"[^A-Za-z0-9]+", "-", limited).strip("-")


def open_report(path: Path, card: str, options: argparse.Namespace) -> Report:
    """An empty report; with --only, the one that exists."""
    if options.only and path.is_file():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {"card": card, "small": options.small, "memory_limit": options.memory, "parts": {}}


def write_report(report: Report, path: Path) -> None:
    order = [part.name for part in PARTS]
    report["parts"] = dict(sorted(report["parts"].items(), key=lambda item: order.index(item[0])))
    text = json.dumps(finite(report), indent=1, ensure_ascii=False, allow_nan=False)
    write_durably(path, f"{text}\n".encode())
    write_durably(path.with_suffix(".md"), page.markdown(report).encode())


def finite(value: Any) -> Any:
    """Without NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def renew_readme(root: Path = ROOT) -> None:
    """Write the table of the reports in docs/gpu into the README; without reports, its warning."""
    path = root / "README.md"
    path.write_text(page.readme(path.read_text(encoding="utf-8"), root / "docs" / "gpu"), encoding="utf-8")


# ---- the command -----------------------------------------------------------------------------------------------------


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM, as of a machine that is taken away, and a closed terminal end the run as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def chosen_parts(only: Sequence[str]) -> list[Part]:
    """The parts of these names; `step` stands for all that begin with it."""
    for name in only:
        if not any(matches(part, name) for part in PARTS):
            sys.exit(f"gpu_report: no part {name}; --list shows them")
    return [part for part in PARTS if not only or any(matches(part, name) for name in only)]


def matches(part: Part, name: str) -> bool:
    return part.name == name or part.name.startswith(f"{name}/")


def measure(options: argparse.Namespace) -> int:
    parts = chosen_parts(options.only)
    this = [sys.executable, __file__, "--device", options.device]
    this += (["--small"] if options.small else []) + (["--memory", str(options.memory)] if options.memory else [])
    probe = subprocess.run([*this, "--name"], stdout=subprocess.PIPE, text=True, check=False)
    if probe.returncode:
        return probe.returncode
    card = json.loads(probe.stdout.splitlines()[-1])
    path = options.out / f"{file_stem(card, options.memory)}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    report = open_report(path, card, options)
    run = Run(
        parts=parts,
        command=lambda part, rows: [*this, "--part", part.name, "--rows", str(rows)],
        minutes=options.minutes,
        results=report,
        write=lambda results: write_report(results, path),
    )
    try:
        with ended_by_signals():
            run.all()
    except KeyboardInterrupt:
        print(f"interrupted; {path.with_suffix('.md')} has what was measured", file=sys.stderr)
        return 130
    finally:
        if options.out.resolve() == REPORTS and not options.small:
            renew_readme()
    print(path.with_suffix(".md"))
    return int(has_failures(report))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="the accelerator, such as cuda:1 (default: the first)")
    parser.add_argument("--minutes", type=float, default=50, help="the most that all parts together take (default: 50)")
    parser.add_argument("--memory", type=float, metavar="GB", help="use no more of the card, as if it were smaller")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="a part, or a group: step")
    parser.add_argument("--out", type=Path, help="the folder of the report (default: docs/gpu)")
    parser.add_argument("--small", action="store_true", help="tiny models, to test this program; needs --out")
    parser.add_argument("--list", action="store_true", help="print the parts, and nothing else")
    parser.add_argument("--readme", action="store_true", help="renew the table in the README, and nothing else")
    for name in ("--part", "--rows"):  # for the processes of the parts
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--name", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.small and options.out is None and not (options.part or options.name):
        parser.error("--small needs --out, because its numbers mean nothing")
    options.out = options.out or REPORTS
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        print("\n".join(f"{part.name:20} {part.title}, at most {part.minutes:g} minutes" for part in PARTS))
    elif options.readme:
        renew_readme()
    elif options.name:
        return print_card(options)
    elif options.part:
        run_cases(next(part for part in PARTS if part.name == options.part), options)
    else:
        return measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
