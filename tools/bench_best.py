"""The step that `qwen-train best` proposes for runs that overfit and runs that do not: a table in Markdown.

    python tools/bench_best.py [--seeds 3] [--family edit-plus] [--family qwen-image-21]

Tiny models learn the demo's photographs. A run that overfits trains on two pairs for long, with the others held out;
one that improves trains on most of them and ends early. They are judged by losses of the held-out pairs that no run has
seen: by the stock transformer, with other noise, at other noise levels. *Gain* is by how much the proposed step is
better than the last one there, in %, with the standard error over pairs. A run has overfitted if by that judgement some
step is better than the last by more than noise: then an earlier and better step must be proposed. Else the last one
must be within noise of the best.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_demo_data import make_demo_data
from make_tiny_model import make_tiny_model
from numpy.typing import NDArray

from qwen_cache import Sample, open_cache
from qwen_cache.models.family import Family, family_of
from qwen_train.inference.cached import Condition, JointCondition
from qwen_train.model.loading import stock_class
from qwen_train.training.best import Best, best_of

ROOT = Path(__file__).parents[1]
FAMILIES = ("edit-plus", "qwen-image-21")
SIGMAS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
RUNS: dict[str, dict[str, Any]] = {
    "overfits": {"train.validation_split": 0.9, "train.max_steps": 400, "optimizer.learning_rate": 6e-3},
    "improves": {"train.validation_split": 0.4, "train.max_steps": 80, "optimizer.learning_rate": 5e-4},
}
LAYERS = {"qwen-image-21": r".*\.(to_[qkv]|to_out\.0|img_mlp\.(proj|out|gate_layer)|linear(_[12])?)|img_in|proj_out"}
"""All layers of the transformer, where those of demo.yaml are others."""
AREA = 96**2
"""Pixels of an image."""
OF_EDIT_PLUS = {"train.validation_split": 0.8, "train.max_steps": 800, "optimizer.learning_rate": 4e-3}
"""With these a run of it overfits more surely."""
MEASURED = 10
"""Times that a run measures its losses, and saves a checkpoint."""
ENOUGH = 2.0
"""Standard errors by which a gain is not chance."""


def settings(family: str, kind: str, out: Path, seed: int) -> dict[str, Any]:
    """Settings of a run, in place of those of demo.yaml."""
    own = OF_EDIT_PLUS if (family, kind) == ("edit-plus", "overfits") else RUNS[kind]
    every = own["train.max_steps"] // MEASURED
    return {
        "train.output_dir": str(out),
        "train.seed": seed,
        "train.logit_mean": 0.0,
        "train.checkpointing_steps": every,
        "train.checkpoints_total_limit": 0,
        "lr_scheduler.name": "constant",
        "lr_scheduler.warmup_steps": 0,
        "logging.report_to": "none",
        "validation": {"validation_steps": every, "num_images": 0, "cache": "none", "images_every_steps": every},
        **({"train.lora.target_modules": LAYERS[family]} if family in LAYERS else {}),
        **own,
    }


def arguments(family: str, cache: Path, model: Path, kind: str, out: Path, seed: int) -> list[str]:
    """The arguments of `qwen-train`."""
    chosen = [f"{name}={json.dumps(value)}" for name, value in settings(family, kind, out, seed).items()]
    options = ["--config", str(ROOT / "tools" / "demo.yaml"), "--model", str(model)]
    return ["run", str(cache), *options, *(word for each in chosen for word in ("--set", each))]


# ---- judgement -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def loss_of(transformer: Any, sample: Sample, family: Family) -> float:
    """The loss of a sample by the stock transformer, over noise and levels that no run has."""
    clean, prompt, controls = (sample[name].float() for name in ("image_latents", "prompt_embeds", "control_latents"))
    generator, losses = torch.Generator().manual_seed(int(sample.key[:8], 16)), []
    for sigma in SIGMAS:
        noise = torch.randn(clean.shape, generator=generator)
        noisy = ((1 - sigma) * clean + sigma * noise)[None]
        if family.joint_sequence:
            condition: Condition = JointCondition(transformer, sample, prompt, controls[None], False)
        else:
            condition = Condition(transformer, sample, prompt, controls[None])
        velocity = condition.velocity(noisy, torch.tensor([sigma]))[0]
        losses.append(float((velocity - (noise - clean)).square().mean()))
    return float(np.mean(losses))


@dataclass(frozen=True)
class Judged:
    """A finished run and its proposal."""

    best: Best
    last: int
    losses: dict[int, NDArray[np.float64]]
    """The losses of the held-out pairs, by step."""

    def gain(self, step: int | None) -> tuple[float, float]:
        """By how much a step is better than the last, in % of the last, and the standard error."""
        if step is None:
            return 0.0, 0.0
        last = self.losses[self.last]
        paired = 100 * (last - self.losses[step]) / last.mean()
        return float(paired.mean()), float(paired.std(ddof=1) / np.sqrt(len(paired)))

    @property
    def overfitted(self) -> bool:
        """True if the step with the least loss is better than the last by more than noise."""
        gain, error = self.gain(min(self.losses, key=lambda step: float(self.losses[step].mean())))
        return gain > ENOUGH * error

    @property
    def is_right(self) -> bool:
        """True if the proposal is what the judgement supports."""
        gain, error = self.gain(self.best.step)
        return gain > ENOUGH * error if self.overfitted else self.last in self.best.within


def judge(out: Path, cache: Path, model: Path) -> Judged:
    """The proposal for the run in `out`, and losses of its held-out pairs at each checkpoint."""
    best, opened = best_of(out), open_cache(cache)
    losses = out / "validation" / "losses"
    samples = [opened[key] for key in json.loads((losses / "step-0.json").read_text(encoding="utf-8"))]
    family = family_of(str(opened.recipe.recipe["pipeline"]))
    measured = {}
    for step in sorted(best.kept):
        transformer: Any = stock_class(model / "transformer").from_pretrained(model / "transformer").eval()
        file = "pytorch_lora_weights.safetensors"
        transformer.load_lora_adapter(str(out / f"checkpoint-{step}"), weight_name=file, prefix="transformer")
        measured[step] = np.array([loss_of(transformer, sample, family) for sample in samples])
    return Judged(best, max(best.kept), measured)


# ---- table -----------------------------------------------------------------------------------------------------------


def program(name: str, *words: object) -> None:
    """Run one of our programs; its output only if it fails."""
    command = [sys.executable, "-m", name, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)


def row(kind: str, family: str, seed: int, judged: Judged) -> str:
    """A line of the table."""
    best, (gain, error) = judged.best, judged.gain(judged.best.step)
    within = f"{best.within[0]}–{best.within[-1]}" if best.within[1:] else "".join(map(str, best.within))
    overfitted, right = ("yes" if it else "no" for it in (judged.overfitted, judged.is_right))
    cells = (family, kind, seed, overfitted, best.step, within, judged.last, f"{gain:+.2f} ± {error:.2f}", right)
    return " | ".join(map(str, cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--family", action="append", choices=FAMILIES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, right = Path(temporary), list[bool]()
        data = make_demo_data(folder / "data")
        print("model | run | seed | overfitted | proposed | within noise | last | gain, % | right")
        print(" | ".join(["---"] * 9))
        for family in options.family or FAMILIES:
            model, cache = make_tiny_model(folder / family, family), folder / f"shards-{family}"
            area, dtype = f"data.vae_image_size={AREA}", "cache.dtype=float32"
            words: Sequence[object] = ("build", data, "--out", cache, "--model", model, "--set", area, "--set", dtype)
            program("qwen_cache", *words)
            for kind in RUNS:
                for seed in range(options.seeds):
                    out = folder / f"{family}-{kind}-{seed}"
                    program("qwen_train", *arguments(family, cache, model, kind, out, seed))
                    judged = judge(out, cache, model)
                    right.append(judged.is_right)
                    print(row(kind, family, seed, judged), flush=True)
    print(f"\n{sum(right)} of {len(right)} proposals are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
