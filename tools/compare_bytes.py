"""Compare what two checkouts make of the same photographs and seeds: a cache, a migrated cache, a LoRA, an image.

    git worktree add ../before HEAD~1
    python tools/compare_bytes.py ../before .

Each checkout builds, migrates, trains and predicts on the CPU, with one tiny random model and one set of photographs.
The exit code is 1 if a file differs. Files that hold times or settings (metrics, logs, the report, checkpoints,
qwen.yaml) are not compared.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

SMALL = "--dtype float32 --set data.vae_image_size=16384 --set data.condition_image_size=12544"
TRAIN = "--set train.max_steps=6 --set train.batch_size=2 --set train.mixed_precision=no"
PREDICT = "--set predict.dtype=float32 --set predict.num_inference_steps=4 --width 128 --height 128"
CONTROL = "data/control_images/china_black_and_white.jpg"
INPUTS = ("tools/make_tiny_model.py tiny --variant edit-plus", "tools/make_demo_data.py data")
COMMANDS = (
    f"qwen_cache build data --out shards --model tiny {SMALL}",
    f"qwen_cache build data --out old --format v1 --model tiny {SMALL}",
    "qwen_cache migrate v1 v2 old --out migrated",
    f"qwen_train run shards --model tiny {TRAIN}",
    f"qwen_train predict --model tiny --image {CONTROL} --prompt grey --lora out --out image.png {PREDICT}",
)
COMPARED = ("shards/*", "old/*", "migrated/*", "out/*.safetensors", "image.png")


def run(command: str, checkout: Path, folder: Path) -> None:
    """Run a script of tools/, or a program, of `checkout` in `folder`."""
    program, *arguments = command.split()
    is_script = program.endswith(".py")
    start = [str(checkout / program)] if is_script else ["-c", f"from {program}.cli import main; main()"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *start, *arguments], cwd=folder, env=environment, check=True)


def results(checkout: Path, inputs: Path, folder: Path) -> dict[str, str]:
    """The SHA-256 of every compared file by name, after all commands of `checkout` have run in `folder`."""
    shutil.copytree(inputs, folder)
    for command in COMMANDS:
        run(command, checkout, folder)
    files = sorted(path for pattern in COMPARED for path in folder.glob(pattern) if path.is_file())
    names = {str(path.relative_to(folder)): path for path in files if path.name not in (".lock", "qwen.yaml")}
    return {name: sha256(path.read_bytes()).hexdigest() for name, path in names.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare what two checkouts make of the same photographs and seeds.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        inputs = Path(temporary) / "inputs"
        inputs.mkdir()
        for command in INPUTS:
            run(command, options.before.resolve(), inputs)
        before, after = (
            results(checkout.resolve(), inputs, Path(temporary) / name)
            for name, checkout in (("before", options.before), ("after", options.after))
        )
    for name in sorted(before.keys() | after.keys()):
        same = before.get(name) == after.get(name)
        print(f"{'equal' if same else 'DIFFERENT':10} {name:50} {before.get(name, 'missing')[:16]}")
    return int(before != after)


if __name__ == "__main__":
    sys.exit(main())
