"""`python -m tests.faults calls`: every call fails once; `python -m tests.faults power`: every power loss.

Prints a table, and what was wrong; `--json` prints the same as JSON for `tests/test_faults.py`. The process starts
itself again with the shim.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

from .shim import Shim, build, obstacle


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("what", choices=["calls", "power"])
    parser.add_argument("--only", default="", help="commands whose name begins so, or so")
    parser.add_argument("--every", type=int, default=1, help="calls: every n-th case of a command")
    parser.add_argument("--all-errors", action="store_true", help="calls: each call with every error it may return")
    parser.add_argument(
        "--complete-every", type=int, default=10, help="power: run the command again for every n-th state"
    )
    parser.add_argument(
        "--without", choices=["file", "folder"], default="", help="power: as if these were never synced"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if reason := obstacle():
        print(reason)
        return 2
    if "shim.so" not in os.environ.get("LD_PRELOAD", ""):
        environment = {**os.environ, "LD_PRELOAD": str(build()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.faults", *sys.argv[1:]], environment)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        return judge(Path(folder), options)


def judge(base: Path, options: argparse.Namespace) -> int:
    from . import scenarios
    from .each_call import fail_each_call
    from .power_loss import replay_power_losses

    with redirect_stdout(sys.stderr):
        made = [each for each in scenarios.make(base) if each.name.startswith(tuple(options.only.split(",")))]
    gc.collect()
    gc.freeze()  # each fork would look through all modules, and copy their pages
    shim, reports = Shim(), []
    for i, scenario in enumerate(made):
        if options.what == "power" and scenario.prints:
            continue
        if options.what == "calls":
            shim.watch(scenarios.watched(base))
            report = asdict(fail_each_call(scenario, base, shim, options.every, i, all_errors=options.all_errors))
        else:
            shim.watch([base / scenarios.WORK])
            report = asdict(replay_power_losses(scenario, base, shim, options.complete_every, options.without))
        reports.append(report)
        if not options.json:
            show(report)
    if options.json:
        print(json.dumps(reports))
    return int(any(report["bad"] for report in reports))


def show(report: dict[str, object]) -> None:
    numbers = {name: value for name, value in report.items() if name not in ("name", "bad", "seen", "counts")}
    counts = report.get("counts")
    numbers |= counts if isinstance(counts, dict) else {}
    print(f"{report['name']:20}", "  ".join(f"{name} {value}" for name, value in numbers.items()), flush=True)
    bad = report["bad"]
    assert isinstance(bad, list)
    for line in bad:
        print(f"    {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
