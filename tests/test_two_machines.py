"""A cache that two kinds of machines built: other last digits under equal keys, and nobody need care.

Keys say what went in, hashes what came out. Merging takes each sample whole from the cache that is named first; a
damaged one is refused, not replaced by the other's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_cache import open_cache
from qwen_cache.encode.vae import VaeEncoder
from qwen_cache.format.cache import Cache

from .support.caches import SMALL, build
from .support.commands import run
from .support.judge import TOLERANCE, by_name, relative
from .support.sources import write_pairs

Built = Callable[..., Path]
OTHER_PROCESSOR = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path]) -> Path:
    """The cache that `built("edit-plus")` is, from a machine whose convolutions differ in the last digit."""
    encode, folder = VaeEncoder.encode, tmp_path_factory.mktemp("other")

    def last_digit(self: Any, pixels: Any) -> Any:
        return [latents * (1 + 2**-22) for latents in encode(self, pixels)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VaeEncoder, "encode", last_digit)
        result = build(write_pairs(folder / "data"), folder / "shards", tiny_model("edit-plus"))
    assert result.code == 0, result.stderr
    return folder / "shards"


def merged(out: Path, *arguments: str | Path) -> Cache:
    result = run("qwen-cache", "merge", *arguments, "--out", out)
    assert result.code == 0, result.stderr
    verified = run("qwen-cache", "verify", out)
    assert verified.code == 0, verified.stdout + verified.stderr
    return open_cache(out)


def hashes(cache: Cache) -> dict[str, str]:
    return {sample.name: sample.row.meta.tensors["image_latents"].xxh3_128 for sample in cache}


def test_two_machines_give_one_sample_one_key_and_other_bytes(built: Built, other: Path) -> None:
    here, there = open_cache(built("edit-plus")), open_cache(other)
    assert here.identity == there.identity
    assert not hashes(here).items() & hashes(there).items()


def test_merging_takes_each_sample_from_the_cache_that_is_named_first(
    built: Built, other: Path, tmp_path: Path
) -> None:
    """Whole: shard, index and hash are of one machine, whichever shards are linked and whichever are copied."""
    here, there = built("edit-plus"), other
    assert hashes(merged(tmp_path / "a", here, there)) == hashes(open_cache(here))
    assert hashes(merged(tmp_path / "b", there, here)) == hashes(open_cache(there))
    some = merged(tmp_path / "some", there, "--select", "c[ah]*")
    both = merged(tmp_path / "both", some.folder, here)
    assert hashes(both) == hashes(open_cache(here)) | hashes(some)
    assert both.identity == open_cache(here).identity
    for sample in both:
        source = some if sample.name in ("cat", "china") else open_cache(here)
        assert torch.equal(sample["image_latents"], source[sample.key]["image_latents"])
    again = merged(tmp_path / "some", here)  # what is there already stays
    assert hashes(again) == hashes(both)


def test_a_cache_of_another_machine_is_up_to_date(other: Path, pairs: Path, tiny_model: Callable[[str], Path]) -> None:
    checked = build(pairs, other, tiny_model("edit-plus"), "--dry-run", "--check")
    assert checked.code == 0, checked.stderr


def test_damage_is_not_hidden_by_the_other_machines_sample(built: Built, other: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(built("edit-plus"), tmp_path / "broken"))
    row = by_name(open_cache(broken))["cup"].row
    data = bytearray((broken / row.shard).read_bytes())
    data[row.entry.tensor_offsets()["image_latents"]] ^= 1
    (broken / row.shard).write_bytes(data)
    result = run("qwen-cache", "merge", broken, other, "--out", tmp_path / "out")
    assert result.code == 2
    assert "image_latents of sample" in result.stderr
    assert "does not have the bytes that were written" in result.stderr
    assert not (tmp_path / "out" / "cache.json").exists()


@pytest.mark.slow
def test_half_a_cache_from_another_processor_trains(
    built: Built, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Really computed by other kernels, in a process of its own; a run continues from one cache on the other."""
    here, model = built("edit-plus"), tiny_model("edit-plus")
    program = Path(sys.executable).parent / "qwen-cache"
    arguments = ["build", write_pairs(tmp_path / "data"), "--out", tmp_path / "there", "--model", model, *SMALL]
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, env={**os.environ, **OTHER_PROCESSOR}
    )
    assert done.returncode == 0, done.stderr
    theirs = open_cache(tmp_path / "there")
    for sample in open_cache(here):
        for name in ("image_latents", "control_latents", "prompt_embeds", "empty_prompt_embeds"):
            assert relative(theirs[sample.key][name], sample[name]) < TOLERANCE
    half = merged(tmp_path / "half", theirs.folder, "--select", "c[ah]*")
    both = merged(tmp_path / "both", half.folder, here)
    assert both.identity == open_cache(here).identity
    settings = {"train.output_dir": tmp_path / "out", "train.mixed_precision": "no", "logging.report_to": "none"}
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    for cache, *more in ((here, "--set", "train.max_steps=1"), (both.folder, "--set", "train.max_steps=2", "--resume")):
        result = run("qwen-train", "run", cache, "--model", model, *options, *more)
        assert result.code == 0, result.stderr
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2
