"""Compare the CPU time of the commands that one repeats while trying settings with that of `verify` of the same cache.

    python tools/bench_commands.py [--folder DIR] [--rounds N] [--json]

Makes a tiny model, a cache of it and a run of one step in DIR, unless they exist. Each command runs once to measure and
remember what it needs (`qwen_cache/storage/measured.py`), then in turn with the others, each time in a new process. The
ratio is that of the least CPU times. Exit code 1 if a ratio is above 1.5, or a command loads torch or another of the
heavy packages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench_refusals import prepare

HEAVY = ("torch", "diffusers", "transformers", "accelerate", "peft", "pandas")
MOST = 1.5
PROGRAM = """
import atexit, json, sys, time
heavy, program = {*sys.argv.pop(1).split()}, sys.argv.pop(1)
sys.argv[0] = program
@atexit.register
def report():
    print(json.dumps({"cpu_seconds": time.process_time(), "loaded": sorted(heavy & {*sys.modules})}), file=sys.stderr)
if program == "qwen-cache":
    from qwen_cache.cli import main
else:
    from qwen_train.cli import main
main()
"""
BUILD = ["build", "data", "--model", "tiny", "--set", "data.vae_image_size=9216", "--dry-run", "--out"]
COMMANDS: dict[str, tuple[str, int, list[str]]] = {
    "verify": ("qwen-cache", 0, ["verify", "shards"]),
    "build --dry-run, nothing to encode": ("qwen-cache", 0, [*BUILD, "shards"]),
    "build --dry-run, all to encode": ("qwen-cache", 0, [*BUILD, "new-shards"]),
    "plan": ("qwen-train", 0, ["plan", "shards", "--model", "tiny", "--gpu-memory", "24GB"]),
    "run, refused": (
        "qwen-train",
        2,
        ["run", "shards", "--model", "tiny", "--out", "new", "--set", "train.max_tokens=8"],
    ),
    "run --resume, refused": ("qwen-train", 2, ["run", "--resume", "--out", "out", "--rank", "3"]),
}
"""The program, the exit code and the arguments of each command, in the folder of `bench_refusals.prepare`."""


def measure(name: str, folder: Path, env: dict[str, str]) -> dict[str, Any]:
    """The CPU time of a command in a new process, and the heavy packages that it loaded."""
    program, code, arguments = COMMANDS[name]
    words = [sys.executable, "-c", PROGRAM, " ".join(HEAVY), program, *arguments]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=env, check=False)
    if done.returncode != code:
        sys.exit(f"{name} ended with {done.returncode}\n{done.stderr}")
    return dict(json.loads(done.stderr.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to put model, cache and run; by default a temporary folder")
    parser.add_argument("--rounds", type=int, default=5, help="how often each command runs")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder)
        env = {**os.environ, "XDG_CACHE_HOME": str((folder / "home").resolve())}
        first = {name: measure(name, folder, env)["cpu_seconds"] for name in COMMANDS}
        rounds = defaultdict(list)
        for _ in range(options.rounds):
            for name in COMMANDS:
                rounds[name].append(measure(name, folder, env))
    least = {name: min(each["cpu_seconds"] for each in of_name) for name, of_name in rounds.items()}
    found = {
        name: {
            "first": first[name],
            "cpu_seconds": least[name],
            "ratio": least[name] / least["verify"],
            "loaded": sorted({module for each in rounds[name] for module in each["loaded"]}),
        }
        for name in COMMANDS
    }
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for name, each in found.items():
            loaded = f", loads {', '.join(each['loaded'])}" if each["loaded"] else ""
            print(f"{each['ratio']:5.2f}  {each['cpu_seconds']:5.2f} s, first {each['first']:5.2f} s  {name}{loaded}")
    return int(any(each["ratio"] > MOST or each["loaded"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
