"""The benchmarks of tools/, tiny: they report what they promise, and every reader gives the same batches."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .support.paths import ROOT, load_tool

NUMBERS = {"cpu_seconds_per_gb", "gb_per_second", "first_batch_seconds"}


@pytest.fixture
def bench_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The tool with tiny samples, its workers in this process."""
    tool: Any = load_tool("bench_read")
    samples, folder = tool.Samples(10, side=4, text=24), tmp_path / "formats"
    monkeypatch.setattr(tool, "run_worker", lambda task, name, _: tool.work(task, name, samples, folder))
    options = ("--total", "0.1", "--side", "4", "--text", "24", "--repeats", "2", "--json")
    monkeypatch.setattr(sys, "argv", ["bench_read", *options])
    return tool


def run(tool: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as exit_:
        tool.main()
    return exit_.value.code, json.loads(capsys.readouterr().out)  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other people's readers
def test_all_readers_give_equal_batches(bench_read: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run(bench_read, capsys)
    assert code == 0
    assert report["equal"]
    assert set(report["results"]) == {"sequential", "shuffled"}
    for found in report["results"].values():
        assert set(found) | set(report["skipped"]) == set(bench_read.FORMATS)
        assert {"memcpy", "memcpy + xxh3", "qwen-cache", ".safetensors", ".pt", "webdataset"} <= set(found)
        assert len({each["digest"] for each in found.values()}) == 1
        assert {each["samples"] for each in found.values()} == {10}
        assert all(each[name] > 0 for each in found.values() for name in NUMBERS)
    bench_read.show(report)
    printed = capsys.readouterr().out
    assert all(name in printed for name in bench_read.FORMATS)


@pytest.mark.filterwarnings("ignore")
def test_a_reader_that_gives_other_batches_is_found_out(
    bench_read: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_changed(folder: Path, shuffled: bool) -> Any:
        def epoch() -> Any:
            for i, tensors in enumerate(bench_read.open_pt(folder, shuffled)()):
                tensors["prompt_embeds"][0, 0] += i == 9
                yield tensors

        return epoch

    few = {name: bench_read.FORMATS[name] for name in ("memcpy", ".pt")}
    few[".pt"] = bench_read.Format("pt", bench_read.write_pt, open_changed)
    monkeypatch.setattr(bench_read, "FORMATS", few)
    code, report = run(bench_read, capsys)
    assert (code, report["equal"]) == (1, False)


def test_compression_is_lossless_and_its_gain_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool: Any = load_tool("bench_compression")
    monkeypatch.setattr(sys, "argv", ["bench_compression", "--side", "128", "--rows", "24", "--repeats", "1", "--json"])
    code, report = run(tool, capsys)
    assert code == 0
    assert set(report["results"]) == {"image latents", "half-flat image", "prompt embeddings", "normal numbers"}
    for found in report["results"].values():
        assert set(found) == {"zstd-1", "zstd-3", "zstd-1 of both planes", "planes-zstd"}
        assert all(each["lossless"] for each in found.values())
        assert all(each[name] > 0 for each in found.values() for name in each if name != "lossless")
        assert found["planes-zstd"]["ratio"] > found["zstd-1"]["ratio"] > 1
    sample = report["sample"]
    disk = sample["decode_gb_per_second"] * 1e3 * (1 - 1 / sample["ratio"])
    assert sample["mb_per_second"] == pytest.approx(disk)
    tool.show(report)
    assert "MB/s" in capsys.readouterr().out


def run_build(monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    """tools/bench_build.py, about to be run."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))  # it imports make_tiny_model
    monkeypatch.setattr(sys, "argv", ["bench_build", *options, "--json"])
    return load_tool("bench_build")


@pytest.mark.slow
def test_both_ways_of_encoding_give_equal_tensors_and_ours_takes_less(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = run_build(monkeypatch, "--samples", "2", "--repeats", "1")
    code, report = run(tool, capsys)
    assert code == 0
    found = report["time"]["results"]
    assert report["time"]["difference"] < 1e-5
    assert found["ours"]["tokens"] < 0.7 * found["usual"]["tokens"]
    assert found["ours, no shared prefix"]["tokens"] == found["usual"]["tokens"]
    assert found["ours, 3-D VAE"]["tflop"] > found["ours"]["tflop"]
    assert all(each[name] > 0 for each in found.values() for name in ("seconds", "cpu_seconds", "faster"))
    tool.show(report)
    assert "ours, lanes in turn" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["bench_build", "flops", "--size", "tiny", "--json"])
    _, counted = run(tool, capsys)
    shapes = {name: each["all"] / 1e12 for name, each in counted["flops"]["edit-plus"]["flops"].items()}
    assert {"usual", "ours", "ours, 3-D VAE", "ours, no shared prefix", "ours, with attention"} == shapes.keys()
    assert found["ours, with attention"]["tflop"] > found["ours"]["tflop"]
    computed = {name: found[name]["tflop"] for name in shapes}
    assert shapes == computed, "what is counted without computing is what is computed"
    tool.show(counted)
    assert "lm_head" in capsys.readouterr().out


@pytest.mark.slow
def test_a_way_of_encoding_that_gives_something_else_is_found_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = run_build(monkeypatch, "--samples", "1", "--repeats", "1")
    usual = tool.encode_usually

    def swapped(*arguments: Any) -> Any:
        found = usual(*arguments)
        return found | {"image_latents": found["control_latents"]}

    monkeypatch.setattr(tool, "encode_usually", swapped)
    code, report = run(tool, capsys)
    assert code == 1
    assert report["time"]["difference"] > tool.TOLERANCE


def test_lanes_are_held_against_the_slower_one_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = run_build(monkeypatch, "lanes", "--samples", "2")
    code, report = run(tool, capsys)
    assert code == 0
    assert set(report["lanes"]) == {"VAE slower", "text slower", "equal"}
    assert all(each["ratio"] >= 1 for each in report["lanes"].values()), "no build ends before its slower lane"
    tool.show(report)
    assert "slower lane alone" in capsys.readouterr().out


def test_losses_at_equal_compute_are_read_off_the_curves() -> None:
    tool: Any = load_tool("experiment_draws")
    curve = [tool.Point(step, 10.0 * step, 4.0 - step) for step in (0, 1, 3)]
    assert [tool.loss_at(curve, flops) for flops in (0, 5, 20, 30)] == pytest.approx([4, 3.5, 2, 1])
    options = argparse.Namespace(draws=[1, 2, 4], batch_size=2)
    flops = {1: 2.0, 2: 3.0, 4: 5.0}
    compared = tool.ways(options, flops)
    assert [(way.draws, way.batch_size) for way in compared] == [(1, 2), (2, 2), (4, 2), (1, 5)]
    assert compared[-1].batch_size * flops[1] == 2 * flops[4]


@pytest.mark.parametrize(("data", "within", "prefix", "draw"), [(1.0, 9.0, 4.0, 1.0), (3.0, 1.0, 1.0, 1.0)])
def test_the_best_number_of_draws_has_the_least_variance(
    data: float, within: float, prefix: float, draw: float
) -> None:
    tool: Any = load_tool("experiment_draws")
    candidates = [k / 100 for k in range(10, 2000)]
    best = min(candidates, key=lambda k: (data + within / k) * (prefix + k * draw))
    split = {"data": data, "timestep": within / 2, "noise": within / 2}
    assert tool.best_draws(split, prefix, draw) == pytest.approx(best, abs=0.01)


@pytest.mark.slow
def test_the_experiment_with_noise_draws_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool: Any = load_tool("experiment_draws")
    monkeypatch.setattr(tool, "TIMESTEPS", 2)
    monkeypatch.setattr(sys, "argv", ["experiment_draws", "--quick", "--json"])
    tool.main()
    report = json.loads(capsys.readouterr().out)
    (found,) = report["experiments"]
    one, two, larger = found["ways"].values()
    assert set(found["ways"]) == {"K = 1", "K = 2", "K = 1, batch of 3"}
    assert one["flops_per_step"] < two["flops_per_step"] < 2 * one["flops_per_step"], "the prefix is computed once"
    assert larger["flops_per_step"] == pytest.approx(two["flops_per_step"], rel=0.2)
    assert one["equal_compute"] == one["equal_steps"], "the cheapest way sets the compute"
    assert all(way["equal_steps"][0] < found["loss_before"] for way in found["ways"].values())
    assert report["cost_of_a_step_at_real_sizes"]["3"] == {"1": 1.0, "2": 1.25}
    tool.show(report)
    assert "lowest loss" in capsys.readouterr().out


def test_an_unchanged_plan_reads_no_image_and_a_changed_one_reads_one(
    tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SimpleNamespace(make_tiny_model=lambda *_: tiny_model("edit"))
    monkeypatch.setitem(sys.modules, "make_tiny_model", made)
    tool: Any = load_tool("bench_plan")
    monkeypatch.setattr(tool, "plan_alone", tool.plan_once)
    monkeypatch.setattr(tool.remembered, "SETTLED_NS", -(10**13))
    monkeypatch.setattr(sys, "argv", ["bench_plan", "--pairs", "3", "--bucket", "--json"])
    tool.main()
    report = json.loads(capsys.readouterr().out)
    for place in ("local", "bucket"):
        plans = report["results"][place]
        assert [plans[name]["images"] for name in tool.PLANS] == [6, 0, 1]
        assert [plans[name]["to_encode"] for name in tool.PLANS] == [3, 0, 1]
        assert plans["unchanged"]["bytes"] == 0
    assert [plans[name]["requests"] for name in tool.PLANS] == [
        {"LIST": 1, "GET": 9},
        {"LIST": 1},
        {"LIST": 1, "GET": 1},
    ]
    tool.show(report)
    assert "| unchanged | " in capsys.readouterr().out


def test_the_costs_of_a_cache_are_measured_command_by_command(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a source and a cache of it that `build` finds up to date, and to which it adds one sample."""
    tool: Any = load_tool("bench_scale")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))  # it imports bench_plan
    monkeypatch.setattr(tool, "LEAST", 30)
    monkeypatch.setattr(tool, "QUICK", (60,))
    names = [name for name in tool.COMMANDS if "inspect" not in name]

    def measured(folder: Path, name: str) -> dict[str, float]:
        """In this process."""
        done.append(name)
        tool.run_once(folder, name)
        return {"seconds": 1.0, "anonymous": 300 * (len(done) > len(names) + 1), "resident": 5000, "cpu": 2.0}

    done: list[str] = []
    monkeypatch.setattr(tool, "measured", measured)
    options = ("--quick", "--json", "--model", str(tiny_model("edit")), "--folder", str(tmp_path), "--only", *names)
    monkeypatch.setattr(sys, "argv", ["bench_scale", *options])
    tool.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["rows"] for each in report["sizes"]] == [30, 60]
    assert all(list(each["commands"]) == names for each in report["sizes"])
    assert not list(tmp_path.iterdir())
    tool.show(report)
    shown = capsys.readouterr().out
    assert "60 rows, an index of" in shown
    assert "| open | 1.0 | 2.0 | 1.00 | 10 | 0 |" in shown


def test_a_step_on_paper_is_the_sum_of_its_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device of one FLOP and one byte a second, against the sums of the docstring."""
    tool: Any = load_tool("roofline")
    device = tool.Device(1.0, (1.0, 1.0), 1.0)
    case = tool.everything(tool.Model(width=2, blocks=3, weights=5), tokens=7)
    monkeypatch.setattr(tool, "UNITS", {"eager": (10, 20), "compiled": (1, 2), "recomputed": (1, 3)})
    product, pairs, unit = 2 * 5 * 2**2 * 7 * 3, 7 * 7 * 2 * 3, 7 * 2 * 2 * 3
    expected = {
        "eager": (3 * product, (2 * 4 + 10) * pairs, (2 * 10 + 20) * unit),
        "one graph per block": (3 * product, (2 * 4 + 10) * pairs, 4 * unit),
        "+ attention kept": (3 * product, (4 + 10) * pairs, 4 * unit),
        "no block recomputed": (2 * product, (4 + 10) * pairs, 3 * unit),
    }
    assert {way: tool.parts(case, device, way) for way in tool.WAYS} == expected
    text, reference, target = 4, 3, 2
    seen = text**2 // 2 + sum(text + reference for _ in range(reference)) + target * (text + reference + target)
    assert tool.with_prefix(case.model, text, reference, target).pairs == seen
    monkeypatch.setattr(sys, "argv", ["roofline"])
    tool.main()
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*tool.CASES, *tool.WAYS, *tool.DEVICES))
