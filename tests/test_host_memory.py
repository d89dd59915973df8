"""Host memory: loading takes no more than `plan` says, and processes of a machine share the mapped weights.

Measured by the kernel, in processes of their own, on weights that are large against what a process has anyway.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qwen_cache.models.loading import from_config
from qwen_cache.settings.load import load_config
from qwen_train.memory.prediction import PROGRAM, predict_host_memory, predict_memory
from qwen_train.memory.sizes import SampleSize
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel

from .support.paths import ROOT
from .support.processes import popen
from .support.waiting import HANG

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="/proc has the figures")]

LAYERS = 12
BATCH = [SampleSize(((1, 4, 4), (1, 4, 4)), 8)]
LOADS = """
import json, sys, threading, time
import torch
from qwen_cache.models.folder import open_model
from qwen_cache.settings.load import load_config
from qwen_train.model.placement import offload_blocks
from qwen_train.weights import load_transformer, prepare_for_training

def anonymous():
    lines = (line.partition(":") for line in open("/proc/self/status"))
    return sum(1024 * int(rest.split()[0]) for name, _, rest in lines if name in ("RssAnon", "RssShmem"))

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], anonymous())

folder, *assignments = sys.argv[1:]
config, model = load_config(None, assignments), open_model(folder, ("transformer", "scheduler"))
begin, done = anonymous(), threading.Event()
peak = [begin]
thread = threading.Thread(target=watch)
thread.start()
transformer = prepare_for_training(load_transformer(model, config), config.train)
if config.train.offload_blocks:
    offload_blocks(transformer, config.train.offload_blocks, torch.device("cpu"))
done.set()
thread.join()
read = [float(each.detach().float().sum()) for each in transformer.parameters() if not each.is_meta]
print(json.dumps(peak[0] - begin), flush=True)
sys.stdin.readline()
is_weights, mapped = False, 0
for line in open("/proc/self/smaps"):
    if line[0] in "0123456789abcdef":
        is_weights = line.rstrip().endswith(".safetensors")
    elif is_weights and line.startswith("Pss:"):
        mapped += 1024 * int(line.split()[1])
print(json.dumps({"anonymous": anonymous() - begin, "weights": mapped}), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def wide(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 230 MB of weights, all zeros."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(tiny_model("edit-plus"), folder)
    config = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
    config |= {"num_layers": LAYERS, "num_attention_heads": 16}
    with torch.device("meta"):
        model: Any = from_config(QwenImageMultiResTransformer2DModel, config)
    shutil.rmtree(folder / "transformer")
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = {name: torch.zeros(each.shape, dtype=torch.bfloat16) for name, each in model.named_parameters()}
    save_file(weights, folder / "transformer" / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    return folder


def loading(folder: Path, *settings: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", LOADS, str(folder), *settings]
    return popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, dict[str, int]]]:
    """The peak of each while it loaded; and when all had, its own memory, and its share of the mapped weights."""
    answers = []
    for _ in range(2):
        answers.append([json.loads(process.stdout.readline()) for process in processes if process.stdout])
        for process in processes:
            if process.stdin:
                process.stdin.write("\n")
                process.stdin.flush()
    for process in processes:
        process.communicate(timeout=HANG)
    return list(zip(*answers, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["train.offload_blocks=12"],
        ["train.offload_blocks=6"],
        ["train.offload_blocks=6", "model.quantization=int8"],
    ],
    ids=" ".join,
)
def test_loading_takes_no_more_than_the_plan_says(settings: list[str], wide: Path) -> None:
    """The two blocks of "the device" are in host memory here, as are the weights that are copied to it: they are
    allowed beside it."""
    config = load_config(None, settings)
    transformer = json.loads((wide / "transformer" / "config.json").read_text(encoding="utf-8"))
    memory = predict_memory(transformer, config, BATCH)
    host = predict_host_memory(transformer, config, BATCH, memory)
    on_device = memory.weights + memory.trained if config.train.offload_blocks else memory.trained
    ((peak, _),) = ended([loading(wide, *settings)])
    assert peak <= host.total - PROGRAM + on_device + 20_000_000, "what a process takes anyway"
    file = sum(each.stat().st_size for each in (wide / "transformer").glob("*.safetensors"))
    if not settings:
        assert peak < 0.2 * file


def test_processes_share_frozen_weights(wide: Path) -> None:
    file = sum(each.stat().st_size for each in (wide / "transformer").glob("*.safetensors"))
    both = [memory for _, memory in ended([loading(wide), loading(wide)])]
    assert sum(each["weights"] for each in both) == pytest.approx(file, rel=0.05)
    assert max(each["anonymous"] for each in both) < 0.3 * file
