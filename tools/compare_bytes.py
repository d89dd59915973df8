"""Compare what two checkouts make of the same photographs and seeds: a cache, a migrated cache, a LoRA, an image.

    git worktree add ../before HEAD~1
    python tools/compare_bytes.py ../before .

Each checkout builds, migrates, trains and predicts with a tiny random model on the CPU, in a folder of its own. The
exit code is 1 if a file differs. Files with times in them (metrics, logs, the report, checkpoints) are not compared.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

SMALL = "--dtype float32 --set data.vae_image_size=16384 --set data.condition_image_size=12544"
TRAIN = "--set train.max_steps=6 --set train.batch_size=2 --set train.mixed_precision=no"
PREDICT = "--set predict.dtype=float32 --num-images 1 --width 128 --height 128"
CONTROL = "data/control_images/china_black_and_white.jpg"
COMMANDS = (
    "tools/make_tiny_model.py tiny --variant edit-plus",
    "tools/make_demo_data.py data",
    f"qwen_cache build data --out shards --model tiny {SMALL}",
    f"qwen_cache build data --out old --format v1 --model tiny {SMALL}",
    "qwen_cache migrate v1 v2 old --out migrated",
    f"qwen_train run shards --model tiny {TRAIN}",
    f"qwen_train predict --model tiny --image {CONTROL} --prompt grey --lora out --out image.png {PREDICT}",
)
COMPARED = ("shards/*", "old/*", "migrated/*", "out/*.safetensors", "image.png")


def results(checkout: Path, folder: Path) -> dict[str, str]:
    """The SHA-256 of every compared file by name, after all commands of `checkout` have run in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for command in COMMANDS:
        program, *arguments = command.split()
        if program.endswith(".py"):
            start = [str(checkout / program)]
        else:
            start = ["-c", f"from {program}.cli import main; main()"]
        subprocess.run([sys.executable, *start, *arguments], cwd=folder, env=environment, check=True)
    files = sorted(path for pattern in COMPARED for path in folder.glob(pattern) if path.is_file())
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare what two checkouts make of the same photographs and seeds.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    arguments = parser.parse_args()
    made = []
    for checkout in (arguments.before, arguments.after):
        with tempfile.TemporaryDirectory() as folder:
            made.append(results(checkout.resolve(), Path(folder)))
    before, after = made
    for name in sorted(before.keys() | after.keys()):
        same = before.get(name) == after.get(name)
        print(f"{'equal' if same else 'DIFFERENT':10} {name:70} {before.get(name, 'missing')[:16]}")
    return int(before != after)


if __name__ == "__main__":
    sys.exit(main())
