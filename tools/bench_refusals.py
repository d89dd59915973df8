"""Measure the CPU time of refused `qwen-train` commands: what needs no torch is checked before torch is loaded.

    python tools/bench_refusals.py [--folder DIR] [--json]

Makes a tiny model, a cache of it and a run of one step in DIR, unless they exist, then runs each command in a
new process. Exit code 1 if a command is not refused, or if one of them loads torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parent
LORA = "pytorch_lora_weights.safetensors"
HEAVY = ("torch", "diffusers", "transformers", "accelerate", "peft")
MEASURED = """
import atexit, json, sys, time
heavy, sys.argv[0] = {*sys.argv.pop(1).split()}, "qwen-train"
def report():
    print(json.dumps({"cpu_seconds": time.process_time(), "loaded": sorted(heavy & {*sys.modules})}))
atexit.register(report)
from qwen_train.cli import main
main()
"""


def refusals(cache: str, model: str, run: str) -> dict[str, list[str]]:
    """Commands that are refused, by their reason; `run` is the output folder of a run of one step."""
    new = f"{run}-new"
    return {
        "a wrong setting": ["run", cache, "--model", model, "--out", new, "--set", "train.max_step=5"],
        "no cache": ["run", f"{cache}-nowhere", "--model", model, "--out", run],
        "no model": ["run", cache, "--model", f"{model}-nowhere", "--out", new],
        "no transformer": ["run", cache, "--model", cache, "--out", new],
        "a URL as transformer": ["run", cache, "--model", model, "--out", new, "--transformer", "https://host/a.gguf"],
        "a LoRA as transformer": ["run", cache, "--model", model, "--out", new, "--transformer", f"{run}/{LORA}"],
        "the folder holds a run": ["run", cache, "--model", model, "--out", run],
        "the folder is a cache": ["run", cache, "--model", model, "--out", cache],
        "a sample exceeds the budget": ["run", cache, "--model", model, "--out", new, "--set", "train.max_tokens=8"],
        "no timestep": ["run", cache, "--model", model, "--out", new, "--set", "train.max_timestep=10"],
        "no optimizer": ["run", cache, "--model", model, "--out", new, "--set", "optimizer.name=nowhere.Lion"],
        "no tracker": ["run", cache, "--model", model, "--out", new, "--set", "logging.report_to=aim"],
        "no images to decode": ["run", cache, "--model", model, "--out", new, "--set", "validation.vae_device=cpu"],
        "no validation cache": ["run", cache, "--model", model, "--out", new, "--set", "validation.cache=nowhere"],
        "no LoRA to start from": ["run", cache, "--model", model, "--out", new, "--set", "train.lora.weights=nowhere"],
        "other settings than the checkpoint": ["run", "--resume", "--out", run, "--rank", "3", "--batch-size", "7"],
        "plan: no cache": ["plan", f"{cache}-nowhere", "--model", model],
        "plan: no model": ["plan", cache, "--model", f"{model}-nowhere"],
        "predict: no LoRA": ["predict", "--prompt", "x", "--model", model, "--lora", "nowhere"],
        "predict: no model": ["predict", "--prompt", "x", "--model", f"{model}-nowhere"],
        "predict: no cache": ["predict", "--from-cache", f"{cache}-nowhere", "--key", "x", "--model", model],
        "predict: no transformer": ["predict", "--prompt", "x", "--model", model, "--transformer", f"{run}/{LORA}"],
        "predict: no sample": ["predict", "--from-cache", cache, "--key", "x", "--model", model],
        "decode: no latents": ["decode", run, "--model", model],
        "export: no LoRA": ["export", f"{run}-nowhere", "--to", "comfyui", "--out", f"{run}-new.safetensors"],
        "report: no run": ["report", f"{run}-nowhere"],
        "mask-head: no cache": ["mask-head", f"{cache}-nowhere"],
    }


def measure(arguments: list[str], folder: Path) -> dict[str, Any]:
    """The exit code, the first line of the message, the CPU time, and the heavy packages that were loaded."""
    command = [sys.executable, "-c", MEASURED, " ".join(HEAVY), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    return {"code": done.returncode, "message": done.stderr.split("\n")[0], **json.loads(done.stdout.splitlines()[-1])}


def prepare(folder: Path) -> None:
    """A tiny model, a cache and a run in `folder`."""
    build = ["-c", "from qwen_cache.cli import main; main()", "build", "data", "--out", "shards", "--model", "tiny"]
    train = ["-c", "from qwen_train.cli import main; main()", "run", "shards", "--model", "tiny", "--max-steps", "1"]
    steps: dict[str, list[str]] = {
        "tiny": [str(TOOLS / "make_tiny_model.py"), "tiny", "--variant", "edit-plus"],
        "data": [str(TOOLS / "make_demo_data.py"), "data"],
        "shards": [*build, "--set", "data.vae_image_size=9216"],
        "out": [*train, "--set", "logging.report_to=none"],
    }
    for name, arguments in steps.items():
        if not (folder / name).exists():
            subprocess.run([sys.executable, *arguments], cwd=folder, check=True, capture_output=True)


def main() -> int:
    """Print the CPU time of each refusal; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to put model, cache and run; by default a temporary folder")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder)
        found = {name: measure(each, folder) for name, each in refusals("shards", "tiny", "out").items()}
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for name, each in found.items():
            print(f"{each['cpu_seconds']:5.2f} s  {name}: {each['message']}")
    return int(any(each["code"] != 2 or each["loaded"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
