"""`make gpu`: every part runs, in small, on the simulated accelerator; one that fails costs nothing but itself; the
report and the README say what was measured, and why something was not.

No test here needs a GPU, and none shows what a real one would do.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from .simulated_device.build import build, obstacle
from .support.judge import AS_FAR
from .support.paths import ROOT, load_tool
from .support.waiting import HANG, wait_until

tool: Any = load_tool("gpu_report")
page: Any = tool.page
TOOL = ROOT / "tools" / "gpu_report.py"
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 1200  # as in test_docs.py
NOT_THERE = {
    **{("sharded", f"FSDP2, 12 blocks, {kind}"): "it needs 2 GPUs" for kind in ("bf16", "int8", "nf4", "int8_convrot")},
    ("tests", "tests/models, float32"): "no simulated device",
    ("tests", "tests/models, bfloat16"): "no simulated device",
    ("tests", "tests that are skipped without CUDA"): "no simulated device",
    **{
        ("step/compile", f"compiled{more}"): "no Triton"
        for more in (
            "",
            ", flash attention",
            ", 512²",
            ", every second block",
            ", no block",
            ", mixed sizes × 4",
            ", Qwen-Image-2.1",
        )
    },
    **{
        ("block", f"block of {model}, compiled{kind}, forward{more}"): "no Triton"
        for model in ("Qwen-Image", "Qwen-Image-2.1")
        for kind in ("", ", int8_convrot", ", fp8_w8a8")
        for more in ("", " and backward")
    },
    ("step/products", "bf16, compiled"): "no Triton",
    ("step/offload", "60 blocks offloaded, compiled"): "no Triton",
    ("step/offload", "60 blocks and activations offloaded, compiled"): "no Triton",
    **{
        ("step/products", f"{kind}, compiled{more}"): "no Triton"
        for kind in ("int8_convrot", "fp8_w8a8")
        for more in ("", ", backward in bf16")
    },
    **{("attention", kernel): "found no CUDA GPU" for kernel in ("cuDNN", "FlashAttention-3")},
}
"""Cases that cannot run on the simulated accelerator, and part of the reason that is reported."""


def gpu_report(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path.strip(os.pathsep)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=4 * HANG, check=False)


def on_simulated_device(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report of a run in small."""
    result = gpu_report("--small", "--device", "simu:0", "--out", out, *arguments)
    (path,) = out.glob("*.json")
    return result.returncode, json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def simulated() -> None:
    if reason := obstacle():
        pytest.skip(reason)
    build()


@pytest.fixture(scope="module")
def whole(simulated: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The report of all parts, and its page."""
    out = tmp_path_factory.mktemp("report")
    code, report = on_simulated_device(out)
    assert code == 0, report
    return report, (out / "simulated-accelerator.md").read_text(encoding="utf-8")


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


# ---- on the simulated accelerator ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_part_has_numbers_or_a_reason(whole: tuple[dict[str, Any], str]) -> None:
    report, _ = whole
    assert list(report["parts"]) == [part.name for part in tool.PARTS]
    missing = {}
    for name, part in report["parts"].items():
        assert (part["status"], part["reason"]) == ("done", None)
        assert part["rows"], name
        for row in part["rows"]:
            assert all(map(math.isfinite, numbers(row))), row
            if "reason" in row:
                missing[name, row["case"]] = row["reason"]
    assert missing.keys() == NOT_THERE.keys()
    assert all(NOT_THERE[case] in reason for case, reason in missing.items())


@pytest.mark.slow
def test_predictions_are_near_what_is_allocated(whole: tuple[dict[str, Any], str]) -> None:
    """The simulated allocator rounds up to 512 bytes, which tiny tensors show."""
    steps = [row for row in page.rows_of(whole[0]["parts"]) if "predicted" in row]
    assert len(steps) >= 15
    for row in steps:
        assert row["predicted"] == pytest.approx(row["allocated"], rel=0.1), row["case"]
        assert row["reserved"] >= row["allocated"]
        assert row["tflops"] == pytest.approx(row["tflop"] / row["seconds_whole"])


@pytest.mark.slow
def test_batches_are_equal_to_stock(whole: tuple[dict[str, Any], str]) -> None:
    rows = whole[0]["parts"]["equality"]["rows"]
    assert len(rows) == 6
    for row in rows:
        assert row["within"]
        assert max(row["outputs_ratio"], row["gradients_ratio"]) <= row["limit"] == AS_FAR


def test_a_published_figure_has_a_factor_for_the_same_card_alone(module: Callable[[str], Any]) -> None:
    published = module("published")
    figures = [published.Figure("them", card, 3.0, 40) for card in ("H100", "A100")]
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3")
    row = {"published": [published.against(figure, 1.5, card) for figure in figures]}
    same, other = page.published(row, None).split("; ")
    assert same == "H100: 3 s, 40 GB (them), ours is **2 times as fast**"
    assert other == "A100: 3 s, 40 GB (them)"


@pytest.mark.slow
def test_the_page_has_every_case_and_how_to_repeat_it(whole: tuple[dict[str, Any], str]) -> None:
    report, text = whole
    assert "these numbers mean nothing" in text
    for name, part in report["parts"].items():
        assert f"`python tools/gpu_report.py --only {name}`" in text
        for row in part["rows"]:
            assert re.search(rf"^(\| {re.escape(row['case'])} \||- {re.escape(row['case'])}: |\| card)", text, re.M)
    assert " nan" not in text
    assert " inf" not in text


@pytest.mark.slow
def test_too_little_memory_costs_one_case_and_few_blocks_stand_for_all(simulated: None, tmp_path: Path) -> None:
    """With 3.6 MB for tensors a step of all blocks does not fit, a step of four does, and the encoders run out."""
    parts = ("--only", "step/bf16", "--only", "encode", "--only", "machine", "--memory", "0.0036")
    code, report = on_simulated_device(tmp_path, *parts)
    assert code == 1
    step, *_ = report["parts"]["step/bf16"]["rows"]
    assert (step["blocks"], step["seconds_whole"] > step["seconds"]) == (4, True)
    assert step["needed"] > 4.5e6
    out_of_memory = [row for row in report["parts"]["encode"]["rows"] if "out of memory" in row.get("reason", "")]
    assert out_of_memory
    assert len(out_of_memory) < len(report["parts"]["encode"]["rows"]), "the others were measured"
    assert all("reason" not in row for row in report["parts"]["machine"]["rows"])
    text = next(tmp_path.glob("*.md")).read_text(encoding="utf-8")
    assert "extrapolated from 4 blocks" in text
    assert "failed, out of memory" in text
    assert all("tools/gpu/encode.py" in row["traceback"] for row in out_of_memory)


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="says what happens without an accelerator")
def test_without_an_accelerator_it_says_so_in_one_line(tmp_path: Path) -> None:
    result = gpu_report("--out", tmp_path)
    assert result.returncode == tool.NO_ACCELERATOR == 2
    last = result.stderr.splitlines()[-1]
    assert last == "gpu_report: no accelerator to measure on this machine: cpu is not one"
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


# ---- one process per part --------------------------------------------------------------------------------------------

ROW = 'open({rows!r}, \'a\').write(\'{{"case": "first", "seconds": 1.0}}\\n\')'
PROGRAMS = {
    "works": "pass",
    "raises": "raise ValueError('the kernel is missing')",
    "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": "import time; time.sleep(1000)",
}
"""The end of a part's process after its first case."""


def made_of(
    programs: Mapping[str, str], minutes: Mapping[str, float] | None = None, all_minutes: float = 50
) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """A run of these programs, its results, and what it wrote after each part."""
    results: dict[str, Any] = {"card": "a card", "small": False, "memory_limit": None, "parts": {}}
    written: list[dict[str, Any]] = []

    def command(part: Any, rows: Path) -> list[str]:
        return [sys.executable, "-c", f"{ROW.format(rows=str(rows))}; {programs[part.name]}"]

    parts = [tool.Part(name, name, "predicting", (minutes or {}).get(name, 5)) for name in programs]
    return (
        tool.Run(parts, command, all_minutes, results, lambda it: written.append(copy.deepcopy(it))),
        results,
        written,
    )


def test_a_part_that_fails_costs_nothing_but_itself() -> None:
    run, results, written = made_of({**PROGRAMS, "last": "pass"}, minutes={"hangs": 0.02})
    run.all()
    parts = results["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "works": "done",
        "raises": "failed",
        "crashes": "failed",
        "hangs": "stopped",
        "last": "done",
    }
    assert parts["raises"]["reason"] == "the process ended with code 1: ValueError: the kernel is missing"
    assert "Traceback (most recent call last)" in parts["raises"]["output"]
    assert parts["crashes"]["reason"].startswith("the process ended with signal SIGSEGV")
    assert parts["hangs"]["reason"] == "at its limit of 1 s"
    first = [{"case": "first", "seconds": 1.0}]
    assert all(parts[name]["rows"] == first for name in PROGRAMS if name != "hangs"), "measured cases are kept"
    assert [len(each["parts"]) for each in written] == [1, 2, 3, 4, 5], "written after every part"
    assert tool.has_failures(results)
    text = page.markdown(results)
    assert "| crashes | failed: the process ended with signal SIGSEGV" in text
    assert "; 1 cases were measured before |" in text


def test_what_the_time_does_not_suffice_for_is_not_run() -> None:
    run, results, _ = made_of({"first": "pass", "second": "pass"}, all_minutes=0.5)  # less than LEAST_SECONDS
    run.all()
    for part in results["parts"].values():
        assert (part["status"], part["rows"]) == ("not run", [])
        assert part["reason"] == "the limit of 0.5 minutes was reached"
    assert not tool.has_failures(results)
    assert "| second | not run: the limit of 0.5 minutes was reached |" in page.markdown(results)


def test_an_interrupted_run_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    run, results, _ = made_of({"works": "pass", "hangs": PROGRAMS["hangs"], "never": "pass"})
    started = threading.Event()
    popen = subprocess.Popen

    def watched(command: Any, **options: Any) -> Any:
        if "sleep" in command[-1]:
            threading.Thread(target=lambda: interrupt_when(Path(options["stdout"].name).with_suffix(".jsonl"))).start()
            started.set()
        return popen(command, **options)

    monkeypatch.setattr(tool.subprocess, "Popen", watched)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run.all()
    finally:
        signal.signal(signal.SIGINT, before)
    assert started.is_set()
    assert {name: part["status"] for name, part in results["parts"].items()} == {
        "works": "done",
        "hangs": "interrupted",
        "never": "not run",
    }
    assert results["parts"]["hangs"]["rows"] == [{"case": "first", "seconds": 1.0}]
    assert results["parts"]["never"]["reason"] == "the run was interrupted"


def interrupt_when(rows: Path) -> None:
    """Send this process Ctrl-C once the part has measured its first case."""
    wait_until(lambda: rows.exists() and rows.read_text(encoding="utf-8"))
    os.kill(os.getpid(), signal.SIGINT)


def test_a_part_that_is_measured_again_replaces_its_own_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "a-card.json"
    _, report, _ = made_of({})
    part = {"title": "t", "module": "encode", "date": "d", "commit": "c", "status": "done", "reason": None}
    report["parts"] = {name: {**part, "seconds": 1.0, "rows": []} for name in ("encode", "machine")}
    tool.write_report(report, path)
    again = tool.open_report(path, "a card", tool.parse(["--only", "encode", "--out", str(tmp_path)]))
    assert list(again["parts"]) == ["machine", "encode"], "in the order of PARTS"
    whole = tool.open_report(path, "a card", tool.parse(["--out", str(tmp_path)]))
    assert whole["parts"] == {}


def test_numbers_of_a_report_are_json(tmp_path: Path) -> None:
    assert tool.finite({"a": [1.0, math.nan, {"b": math.inf}], "c": "x"}) == {"a": [1.0, None, {"b": None}], "c": "x"}
    assert tool.file_stem("NVIDIA GeForce RTX 4090", None) == "NVIDIA-GeForce-RTX-4090"
    assert tool.file_stem("NVIDIA H200", 24.0) == "NVIDIA-H200-with-24-GB"


def test_a_report_names_no_folder_of_this_machine() -> None:
    text = f"{ROOT}/tools/a.py, {sys.prefix}/lib/b.py, {Path.home()}/c"
    assert tool.public(text) == "./tools/a.py, PYTHON/lib/b.py, ~/c"
    error = FileNotFoundError(2, "No such file", str(Path.home() / "model"))
    assert tool.describe(error) == "FileNotFoundError: [Errno 2] No such file: '~/model'"


@pytest.mark.parametrize("name", ["step", "step/bf16", "steps"])
def test_a_group_of_parts_is_chosen_by_its_name(name: str) -> None:
    if name == "steps":
        with pytest.raises(SystemExit, match="no part steps"):
            tool.chosen_parts([name])
        return
    chosen = [part.name for part in tool.chosen_parts([name])]
    assert chosen == [part.name for part in tool.PARTS if part.name == name or part.name.startswith(f"{name}/")]


# ---- what is measured ------------------------------------------------------------------------------------------------


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of tools/gpu."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return lambda name: __import__(f"gpu.{name}", fromlist=[name])


def test_the_tests_that_need_a_gpu_are_found(module: Callable[[str], Any]) -> None:
    found = module("checks").gpu_tests()
    skipped = sum(
        line.startswith("@pytest.mark.skipif(not torch.cuda.is_available()")
        for path in (ROOT / "tests").rglob("test_*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
    )
    assert len(found) == skipped >= 3
    assert all((ROOT / name.partition("::")[0]).is_file() for name in found)


def test_failed_tests_are_counted_and_quoted(module: Callable[[str], Any], tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    results.write_text(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><skipped/></testcase>"
        "<testcase name='c'><failure message='0.3 is too far'/></testcase><testcase name='d'><error/></testcase>"
        "</testsuite></testsuites>",
        encoding="utf-8",
    )
    row = module("checks").count(results)
    assert row == {"passed": 1, "failed": 2, "skipped": 1, "first_failure": "c: 0.3 is too far"}
    part = {"title": "t", "module": "checks", "date": "d", "commit": "c", "status": "done", "reason": None}
    rows = [{"case": "tests/models", **row}]
    report = {"card": "x", "small": False, "parts": {"tests": {**part, "seconds": 1.0, "rows": rows}}}
    assert "**Checks that were not passed:** 2 failed: tests/models." in page.markdown(report)
    assert tool.has_failures(report)


@pytest.mark.parametrize(
    ("seconds", "default", "said"),
    [
        ({"flash": 0.010, "cudnn": 0.006}, "cudnn", "suggest `cudnn`, which is the default."),
        ({"flash": 0.006, "cudnn": 0.010}, "cudnn", "suggest `flash`, where the default is `cudnn`."),
    ],
)
def test_the_report_suggests_a_kernel(
    seconds: dict[str, float], default: str, said: str, module: Callable[[str], Any]
) -> None:
    """By the sum over all shapes; a kernel that fails at one of them is out."""
    rows = [
        {"shape": shape, "kernel": kernel, "backward": backward, "seconds": each, "chosen": kernel == default}
        for kernel, each in {**seconds, "fa3": 0.001}.items()
        for shape in ("one", "two")[: 1 if kernel == "fa3" else 2]
        for backward in (False, True)
    ]
    text = module("page").suggestion(rows)
    both = ", ".join(f"{kernel} {2000 * each:.0f} ms" for kernel, each in seconds.items())
    assert text == f"All shapes forward and backward: {both}. These figures {said}"


def test_the_report_suggests_a_kind_of_products(module: Callable[[str], Any]) -> None:
    rows = [{"case": "bf16, compiled", "seconds_whole": 1.29}, {"case": "fp8_w8a8, compiled", "seconds_whole": 0.98}]
    said = module("page").suggested_kind([*rows, {"case": "int8_convrot", "reason": "no memory"}])
    assert said.endswith("these figures suggest fp8_w8a8, compiled: 0.98 s.")
    assert module("page").suggested_kind(rows[:1]) == "Products in 8 bits were not measured."


def test_flops_of_attention_are_those_of_the_pairs(module: Callable[[str], Any]) -> None:
    attention = module("attention")
    _, calls = attention.shape("32 heads, edit of 2.1", SimpleNamespace(small=False))
    pairs = 7 * 8 / 2 + 4096 * 4103 + sum(4103 + i for i in range(1, 128)) + 4096 * 8326
    assert sum(attention.flop(segment) for members in calls for segment in members) == 4 * 128 * pairs


@pytest.mark.slow
def test_flops_are_those_of_the_formula(module: Callable[[str], Any]) -> None:
    """For the 20B model: 24 D² per token and block forward, 4 N² D for attention, and as much for the gradient of the
    inputs. The modulation of one timestep, a LoRA of rank 16 and the layers around them come to a few per cent."""
    from qwen_cache.settings.load import load_config
    from qwen_train.memory.sizes import SampleSize

    flops, models = module("flops"), module("models")
    blocks, width, image, text = 60, 24 * 128, 2 * 64 * 64, 352
    sample = SampleSize(((1, 64, 64), (1, 64, 64)), text)
    forward = blocks * (24 * (image + text) * width**2 + 4 * (image + text) ** 2 * width)
    counted = flops.of_forward(models.REAL["20b"], load_config(None, []), sample)
    assert counted == pytest.approx(forward, rel=0.02)
    lora = flops.of_training(models.REAL["20b"], load_config(None, []), [sample])
    full = flops.of_training(models.REAL["20b"], load_config(None, ["train.method=full"]), [sample])
    assert (lora / counted, full / counted) == (pytest.approx(2.3, abs=0.05), pytest.approx(3, abs=0.05))
    two = flops.of_training(models.REAL["20b"], load_config(None, ["train.layout=packed"]), [sample, sample])
    assert two == pytest.approx(2 * lora, rel=1e-3), "samples do not see each other"


# ---- the README ------------------------------------------------------------------------------------------------------


def a_report(folder: Path, card: str, *, small: bool = False, seconds: float = 2.5, blocks: int = 60) -> None:
    """A report with the numbers that the README shows."""
    step = {"case": "1024²", "seconds": seconds, "seconds_whole": seconds * 60 / blocks, "blocks": blocks}
    step |= {"tflops": 400.0, "allocated": 46.1e9, "predicted": 45.8e9}
    rows = {"machine": [{"case": "products in bfloat16", "tflops": 800.0}], "step/bf16": [step]}
    rows["encode"] = [{"case": "VAE, 1024², one at a time", "per_second": 9.0}]
    rows["encode"].append({"case": "VAE, 1024², in batches", "per_second": 12.25})
    report = {"card": card, "small": small, "parts": {name: {"rows": each} for name, each in rows.items()}}
    folder.mkdir(exist_ok=True)
    (folder / f"{tool.file_stem(card, None)}.json").write_text(json.dumps(report), encoding="utf-8")


def test_the_readme_says_what_was_measured() -> None:
    """Without reports it has the warning, with reports their table: `python tools/gpu_report.py --readme`."""
    assert page.readme(README, ROOT / "docs" / "gpu") == README


def test_reports_replace_the_warning_of_the_readme(tmp_path: Path) -> None:
    assert page.WARNING in page.readme(README, tmp_path)
    a_report(tmp_path, "NVIDIA H200")
    a_report(tmp_path, "NVIDIA L4", seconds=3, blocks=12)
    a_report(tmp_path, "tiny", small=True)
    text = page.readme(README, tmp_path)
    assert page.WARNING not in text
    rows = [line for line in text.splitlines() if line.startswith("|[")]
    assert rows == [
        "|[NVIDIA H200](docs/gpu/NVIDIA-H200.md)|2.5 s|–|50%|46.1 GB|45.8 GB|12.2|",
        "|[NVIDIA L4](docs/gpu/NVIDIA-L4.md)|~15 s|–|50%|46.1 GB|45.8 GB|12.2|",
    ]
    assert len(text.split()) <= MOST_WORDS
    assert page.readme(text, tmp_path) == text, "renewing changes nothing"
    for path in tmp_path.iterdir():
        path.unlink()
    assert page.readme(text, tmp_path) == page.readme(README, tmp_path), "and back"


def test_what_was_not_measured_is_a_dash_in_the_readme(tmp_path: Path) -> None:
    report = {"card": "X", "small": False, "parts": {"step/bf16": {"rows": [{"case": "1024²", "reason": "too large"}]}}}
    (tmp_path / "X.json").write_text(json.dumps(report), encoding="utf-8")
    assert "|[X](docs/gpu/X.md)|–|–|–|–|–|–|" in page.readme(README, tmp_path)


def test_a_readme_without_the_marks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs <!--gpu--> and <!--/gpu--> once"):
        page.readme("# a page", tmp_path)


# ---- on two GPUs -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_part_of_two_gpus_runs_in_two_processes() -> None:
    """On CPUs, where no bytes and no seconds are counted."""
    with patch.object(sys, "path", [str(ROOT / "tools"), *sys.path]):
        row = importlib.import_module("gpu.sharded").launched("int8", small=True)
    assert row["held"] <= 0.55 * row["whole"]
    assert row["predicted"] > row["held"]
    assert "seconds" not in row
