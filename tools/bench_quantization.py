"""The errors of each `model.quantization`, as a table in Markdown: of a layer, and of a small transformer.

    python tools/bench_quantization.py
    python tools/bench_quantization.py --losses CACHE --model MODEL   # 200 steps of `qwen-train run` with each

Errors are relative (the norm of the difference over the norm), against float64 for a layer and against float32 for the
transformer; everything else computes in bfloat16. Weights are random, so the order counts and not the third digit.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch
from bench_memory import random_batch, transformer_config
from torch import Tensor, nn

from qwen_cache.models.hardware import Kind
from qwen_cache.models.quantization import quantize
from qwen_cache.options import quiet_libraries
from qwen_cache.settings.load import load_config
from qwen_train.memory.sizes import SampleSize
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel
from qwen_train.training.loss import compute_loss
from qwen_train.weights import prepare_for_training, quantize_blocks, trainable

CPU = torch.device("cpu")
TOKENS, INPUTS, OUTPUTS = 256, 512, 1024
WAYS = [(kind, True) for kind in get_args(Kind)] + [("int8_convrot", False), ("fp8_w8a8", False)]
"""Each kind; and those that multiply in 8 bits with a backward pass in bfloat16."""


def title(kind: str, backward: bool) -> str:
    return "bfloat16" if kind == "none" else f"`{kind}`" + ("" if backward else ", backward in bfloat16")


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


# ---- one layer -------------------------------------------------------------------------------------------------------


def eight_channels(x: Tensor) -> Tensor:
    x[:, :: INPUTS // 8] *= 60
    return x


def spikes(x: Tensor) -> Tensor:
    x[torch.arange(TOKENS), torch.randint(INPUTS, (TOKENS,))] *= 300
    return x


INPUT: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(TOKENS, INPUTS),
    "Student's t, 3 degrees": lambda: torch.distributions.StudentT(3.0).sample((TOKENS, INPUTS)),
    "8 channels × 60": lambda: eight_channels(torch.randn(TOKENS, INPUTS)),
    "a spike × 300 in each token": lambda: spikes(torch.randn(TOKENS, INPUTS)),
}


def of_layer(kind: Kind, backward: bool, x: Tensor) -> str:
    """The errors of the output and of the gradient of the input."""
    torch.manual_seed(1)
    exact = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False)).requires_grad_(False).bfloat16()
    exact[0].weight.normal_(std=INPUTS**-0.5)
    found, upstream = copy.deepcopy(exact), torch.randn(TOKENS, OUTPUTS).bfloat16()
    if kind != "none":
        quantize(found, kind, CPU, backward_in_8_bits=backward)
    results = []
    for layer, dtype in ((found, torch.bfloat16), (exact.double(), torch.float64)):
        of_x = x.bfloat16().to(dtype).requires_grad_()
        output = layer(of_x)
        output.backward(upstream.to(dtype))
        assert of_x.grad is not None
        results.append((output.detach(), of_x.grad))
    return " / ".join(f"{error(a, b):.4f}" for a, b in zip(*results, strict=True))


# ---- a small transformer ---------------------------------------------------------------------------------------------


def of_transformer(kind: Kind, backward: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and the gradient of a LoRA on all linear layers of the blocks; "none" computes in float32."""
    config = transformer_config(layers=4, heads=8, head_dim=32, width=64)
    precision = "'no'" if kind == "none" and not backward else "bf16"
    targets = "[to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,net.0.proj,net.2]"
    settings = load_config(
        None, [f"train.mixed_precision={precision}", "train.lora.rank=8", f"train.lora.target_modules={targets}"]
    )
    torch.manual_seed(0)
    model = QwenImageMultiResTransformer2DModel.from_config(config)
    for block in model.transformer_blocks:
        for layer in (block.img_mod[1], block.txt_mod[1]):
            channels = torch.randperm(len(layer.weight))[: len(layer.weight) // 100]
            layer.weight.data[channels] *= 20
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().to(dtype)
    quantize_blocks(model, kind, CPU, backward, offloaded=False)
    prepare_for_training(model, settings.train)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.02)
    batch = random_batch(config, settings, [SampleSize(((1, 16, 16), (1, 16, 16)), 40)]).to(CPU, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = compute_loss(model, batch)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in trainable(model) if p.grad is not None])
    return loss.detach(), gradient


# ---- losses ----------------------------------------------------------------------------------------------------------


def losses(cache: str, model: str, kind: str, steps: int) -> list[float]:
    """The losses of a run."""
    with tempfile.TemporaryDirectory() as folder:
        values = {"model.quantization": kind, "train.max_steps": steps, "train.output_dir": folder}
        values |= {"logging.report_to": "none", "optimizer.learning_rate": 1e-3, "train.checkpointing_steps": steps}
        values |= {"validation.cache": "none", "train.mixed_precision": "no", "train.gradient_checkpointing": "false"}
        options = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "qwen_train", "run", cache, "--model", model, *options]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", metavar="CACHE", help="train on this cache in place of the table of errors")
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    if given.losses:
        plain = losses(given.losses, given.model, "none", given.steps)
        print("| | first 20 steps | last 20 steps | largest difference of a step |\n| --- | --- | --- | --- |")
        for kind in get_args(Kind):
            found = losses(given.losses, given.model, kind, given.steps)
            largest = max(abs(a - b) / b for a, b in zip(found, plain, strict=True))
            name = "not quantised" if kind == "none" else title(kind, True)
            print(f"| {name} | {mean(found[:20]):.4f} | {mean(found[-20:]):.4f} | {100 * largest:.1f} % |")
        return
    quiet_libraries()
    torch.manual_seed(0)
    inputs = {name: make() for name, make in INPUT.items()}
    exact = of_transformer("none", False)
    header = [*inputs, "loss of a transformer", "gradient of its LoRA"]
    print(f"| | {' | '.join(header)} |\n| --- |{' --- |' * len(header)}")
    for kind, backward in WAYS:
        cells = [of_layer(kind, backward, x) for x in inputs.values()]
        cells += [f"{error(a, b):.2g}" for a, b in zip(of_transformer(kind, backward), exact, strict=True)]
        print(f"| {title(kind, backward)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
