"""The settings that are chosen for a machine: the fastest that fit, by predicted memory and computed seconds."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from qwen_cache.errors import ConfigError, ModelError
from qwen_cache.settings.load import Config, load_config
from qwen_cache.settings.sections import TrainConfig
from qwen_train.cli.plan import print_fit
from qwen_train.memory import cost, pieces, plan
from qwen_train.memory.choice import (
    ACTIVATIONS,
    CHECKPOINTING,
    CLOSE,
    FSDP,
    OFFLOAD,
    QUANTISATION,
    Candidate,
    Machine,
    Open,
    candidates,
    choose,
    refusal,
)
from qwen_train.memory.cost import CARDS, Card, Way, Work, card_of, step_seconds
from qwen_train.memory.plan import Workload, fit
from qwen_train.memory.prediction import block_bytes, changed, host_bytes, predict_memory
from qwen_train.memory.sizes import SampleSize
from qwen_train.model.combinations import check_combination, with_layout
from qwen_train.training import prepare

from .support.commands import refused, run
from .support.full_size import REAL
from .support.marks import slow
from .support.paths import ROOT, load_tool
from .support.runs import SMALL, Trainer, column

LARGE = [SampleSize(((1, 64, 64), (1, 64, 64)), 450)]
SLOW_BUS = "RTX 4060"
CHECKPOINTINGS = (True, False)
"""Between them the prediction is a line, which `tests/test_memory.py` judges."""
PLAIN = with_layout(load_config(None, ["train.compile=false"]), "cuda")


# ---- against every candidate -----------------------------------------------------------------------------------------


def written_out() -> list[tuple[Config, int, int, float]]:
    """Each combination that a run takes: its settings, and what they take by the plan: memory, host memory, seconds."""
    found = []
    layers = REAL["num_layers"]
    for blocks, checkpointing in itertools.product((0, *range(3, layers + 1)), CHECKPOINTINGS):
        settings = changed(PLAIN, {OFFLOAD: blocks, CHECKPOINTING: checkpointing})
        try:
            check_combination(settings, REAL)
        except (ConfigError, ModelError):
            continue
        recomputed = math.ceil(layers / int(checkpointing)) if checkpointing else 0
        seconds = step_seconds(
            REAL,
            settings,
            Work.of(REAL, settings, LARGE),
            Way(recomputed, offloaded=blocks),
            CARDS[SLOW_BUS],
            "none",
            block_bytes(REAL, settings),
        )
        memory = predict_memory(REAL, settings, LARGE).total
        found.append((settings, memory, host_bytes(REAL, settings, LARGE), seconds))
    return found


def test_the_choice_is_the_best_of_all_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brute force over the settings written out. On a bus so slow that offloaded blocks take time, as on a real one."""
    monkeypatch.setitem(CARDS, SLOW_BUS, CARDS[SLOW_BUS]._replace(bus=4e9))
    everything = written_out()
    left_open = Open({OFFLOAD: ("any",), CHECKPOINTING: CHECKPOINTINGS})
    largest = max(host for _, _, host, _ in everything)
    sizes = sorted({memory for _, memory, *_ in everything})
    between = [(a + b) / 2 for a, b in itertools.pairwise(sizes) if b > 1.02 * a]  # predictions agree within 1 %
    assert len(between) > 20
    found = list(candidates(REAL, PLAIN, LARGE, Machine(SLOW_BUS, 0), left_open))
    memories = 0.9 * sizes[0], *between[:2], *between[2:-2:8], *between[-2:], 1.1 * sizes[-1]
    for memory, host in itertools.product(memories, (1.0, largest / 2, largest)):
        machine = Machine(SLOW_BUS, memory, host)
        fitting = [each for each in everything if each[1] <= machine.memory and each[2] <= host]
        choice = choose(found, PLAIN, machine)
        if not fitting:
            assert choice.best == []
            least = min(each[1] for each in everything if each[2] <= host)
            assert choice.nearest.memory == pytest.approx(least, rel=0.01)
            continue
        best = choice.best[0]
        assert best.seconds < CLOSE * min(seconds for *_, seconds in fitting)
        again = changed(PLAIN, {name: best.settings[name] for name in (OFFLOAD, CHECKPOINTING)})
        assert best.memory == pytest.approx(predict_memory(REAL, again, LARGE).total, rel=0.01)
        assert best.host_memory == host_bytes(REAL, again, LARGE)


def test_what_the_check_of_a_run_refuses_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, settings = Machine("RTX 4090", 1e12, None, 2), with_layout(load_config(None), "cuda")
    left_open = Open({QUANTISATION: ("none", "nf4"), FSDP: (False, True), CHECKPOINTING: (True,)})

    def kinds() -> set[tuple[Any, ...]]:
        return {each.kind for each in candidates(REAL, settings, LARGE, machine, left_open)}

    def only_whole(config: Config, *_: Any) -> None:
        if config.train.fsdp and config.model.quantization != "none":
            raise ConfigError("not these")

    assert ("nf4", False, False, True) in kinds()
    monkeypatch.setattr("qwen_train.model.combinations.check_sharding", only_whole)
    assert refusal(changed(settings, {FSDP: True, QUANTISATION: "nf4"}), REAL, 2) == "not these"
    assert kinds() == {(kind, *[False] * 3) for kind in ("none", "nf4")} | {("none", False, False, True)}


def test_weights_are_in_parts_only_with_optimizers_that_train_them_so() -> None:
    machine, left_open = Machine("RTX 4090", 1e12, None, 2), Open({FSDP: (False, True), CHECKPOINTING: (True,)})
    for name, expected in (("adamw", {False, True}), ("prodigy", {False})):
        settings = changed(with_layout(load_config(None), "cuda"), {"optimizer.name": name})
        found = candidates(REAL, settings, LARGE, machine, left_open)
        assert {each.settings[FSDP] for each in found} == expected, name


def test_only_what_leaves_the_result_the_same_is_open_to_a_run() -> None:
    machine = Machine("RTX 4090", 1e12)
    found = candidates(REAL, PLAIN, LARGE, machine, Open.same_result(machine, compiles=False))
    assert {each.is_exact(PLAIN) for each in found} == {True}


def test_the_memory_of_offloaded_activations() -> None:
    """Without a measurement of its own, against the one that `plan` has for it."""
    machine, left_open = Machine("RTX 4090", 1e12), Open({ACTIVATIONS: (True,), CHECKPOINTING: (True,)})
    (found,) = candidates(REAL, PLAIN, LARGE, machine, left_open)
    predicted = predict_memory(REAL, changed(PLAIN, {ACTIVATIONS: True}), LARGE).total
    assert predicted <= found.memory <= 1.03 * predicted
    assert found.host_memory == host_bytes(REAL, changed(PLAIN, {ACTIVATIONS: True}), LARGE)


def test_the_memory_of_a_sharded_model() -> None:
    """Half of the weights of two processes, and the blocks that are gathered; never less than half of everything."""
    machine = Machine("RTX 4090", 1e12, None, 2)
    left_open = Open({FSDP: (False, True), CHECKPOINTING: (True,)})
    found = {each.settings[FSDP]: each for each in candidates(REAL, PLAIN, LARGE, machine, left_open)}
    weights = predict_memory(REAL, PLAIN, LARGE).weights
    saved = found[False].memory - found[True].memory
    assert saved == pytest.approx(1.04 * (weights / 2 - 3 * block_bytes(REAL, PLAIN)), rel=0.05)
    assert found[True].seconds > found[False].seconds


# ---- seconds ---------------------------------------------------------------------------------------------------------


def test_the_seconds_of_recomputing_and_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products alone: two passes of three without recomputation, three of four with trained weights. A bus that is
    slower than the kernels is what a step waits for, in each of its two passes."""
    monkeypatch.setattr(cost, "LAUNCHES", {"eager": 0.0, "compiled": 0.0})
    card = Card(1, 1e12, (math.inf, math.inf), math.inf, 1e9, {"int8_convrot": 2.0})
    times = []
    for method in ("lora", "full"):
        settings = with_layout(Config(train=TrainConfig(method=method)), "cuda")
        work = Work.of(REAL, settings, LARGE)
        seconds = [step_seconds(REAL, settings, work, Way(count), card, "none", 0) for count in (0, 30, 60)]
        times.append([each / seconds[-1] for each in seconds])
    assert times == [pytest.approx([2 / 3, 5 / 6, 1]), pytest.approx([3 / 4, 7 / 8, 1])]
    settings = with_layout(Config(), "cuda")
    work = Work.of(REAL, settings, LARGE)
    whole = step_seconds(REAL, settings, work, Way(60), card, "none", 0)
    assert step_seconds(REAL, settings, work, Way(60), card, "int8_convrot", 0) == pytest.approx(whole / 2)
    waiting = step_seconds(REAL, settings, work, Way(60, offloaded=30), card, "none", 1e10)
    assert waiting == pytest.approx(max(whole / 3, 300) + max(2 * whole / 3, 300)), "600 s of copies in two passes"


def test_settings_are_in_the_order_that_an_h100_measured() -> None:
    """All pairs of steps on the same batch whose times differ by more than 5 %."""
    tool: Any = load_tool("fit_table")
    rows = tool.measured(ROOT / "docs/gpu/NVIDIA-H100-80GB-HBM3.json")
    right, pairs, wrong = tool.ordered(rows)
    assert pairs > 50
    assert right / pairs > 0.9, wrong
    lora = [computed / seconds for _, (_, method, *_), seconds, computed in rows if method == "lora"]
    assert 0.7 < min(lora) <= max(lora) < 1.1


def test_cards_by_the_names_of_drivers() -> None:
    named = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
        "NVIDIA GeForce RTX 4070 Ti": "RTX 4070",
        "NVIDIA RTX A6000": "RTX A6000",
        "NVIDIA L40S": "L40S",
    }
    assert {name: card_of(name, 1e9) for name in named} == named
    sizes = {4: "RTX 4060", 12: "RTX 4070", 24: "RTX 4090", 48: "L40S", 141: "H100"}
    assert {size: card_of("another", size * 1e9) for size in sizes} == sizes


# ---- plan --fit ------------------------------------------------------------------------------------------------------


def published_here() -> bool:
    of_file: dict[str, Any] = json.loads(pieces.PUBLISHED.read_text(encoding="utf-8"))
    return bool(of_file["versions"] == pieces._versions())


@pytest.mark.parametrize("size", ["16 GB", "24 GB"])
def test_the_table_of_the_docs_is_computed(size: str) -> None:
    """The cells that need no new measurement; `python tools/fit_table.py` prints all."""
    if not published_here():
        pytest.skip("with other versions of the libraries it would be measured again")
    tool: Any = load_tool("fit_table")
    page = (ROOT / "docs/howto/fit-your-gpu.md").read_text(encoding="utf-8")
    for name in tool.TRANSFORMERS:
        assert tool.exact_cells(name, size) in page


@pytest.mark.slow
def test_the_fastest_and_the_next_best_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load_config(None)
    workload = Workload(REAL, {}, LARGE, LARGE[0])
    found = fit(settings, workload, Machine("RTX 4090", 24e9, 64e9))
    seconds = [each["seconds"] for each in found["choices"]]
    assert seconds[0] < CLOSE * min(seconds)
    assert any(each["same_result"] for each in found["choices"])
    assert all(each["memory"] <= 24e9 and each["host_memory"] <= 64e9 for each in found["choices"])
    assert len({json.dumps(each["settings"]) for each in found["choices"]}) == len(seconds) >= 3
    print_fit(found)
    printed = capsys.readouterr().out
    assert "1 GPU with 24.0 GB, 64.0 GB of host memory; seconds are computed for the RTX 4090" in printed
    assert "; changes the result" in printed
    assert "times the first" in printed
    nothing = fit(settings, workload, Machine("RTX 4060", 2e9, 8e9))
    assert nothing["choices"] == []
    print_fit(nothing)
    printed = capsys.readouterr().out
    assert "nothing fits; nearest is" in printed
    assert nothing["nearest"]["words"] in printed
    given = load_config(None, ["model.quantization=int8", "train.offload_blocks=10"])
    chosen = fit(given, workload, Machine("RTX 4090", 1e12))["choices"][0]["settings"]
    assert not {QUANTISATION, OFFLOAD} & chosen.keys(), "what is set stays as it is set"


def test_plan_fit_is_a_command(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of full training, of which less is compared; the number of tokens that would fit is another matter."""
    monkeypatch.setattr(plan, "most_tokens", lambda *_: None)
    command = ("plan", train.cache, "--model", train.model, "--set", "train.method=full")
    result = run("qwen-train", *command, "--fit", "--gpu-memory", "8GB", "--json")
    assert (result.code, result.stderr) == (0, "")
    report = json.loads(result.stdout)["fit"]
    assert (report["gpus"], report["gpu_memory"], report["choices"][0]["same_result"]) == (1, 8 * 10**9, True)
    result = run("qwen-train", *command, "--fit", "--gpu-memory", "1MiB")
    assert result.code == 1
    assert "nothing fits; nearest is" in result.stdout
    result = run("qwen-train", *command, "--fit", "--gpu-memory", "8GB", "--host-memory", "2GB")
    assert result.code == 1
    assert re.search(r"nothing fits: the program alone takes 2\.\d GB of host memory, before anything", result.stdout)
    refused(run("qwen-train", *command, "--gpus", "2"), "--gpus and --host-memory are for --fit")
    refused(run("qwen-train", *command, "--fit"), "--fit is for GPUs", "give its memory with --gpu-memory")


# ---- train.memory=auto -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train.offload_blocks", slow("train.gradient_checkpointing")])
def test_settings_that_it_chooses_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"train.memory=auto chooses {name} itself"):
        load_config(None, ["train.memory=auto", f"{name}=3"])


def test_a_list_without_its_switch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.memory_quantization is for train\.memory=auto"):
        load_config(None, ["train.memory_quantization=[nf4]"])


def limited(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    """A device with so much memory, in place of the CPU."""
    monkeypatch.setattr(prepare, "total_memory", lambda _: capacity)


def test_a_run_chooses_and_equals_the_settings_written_out(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder keeps `auto`, so that it chooses again where it is resumed. On the simulated device, with offloaded
    blocks: `tests/test_memory_on_accelerator.py`."""
    limited(monkeypatch, 1 << 40)
    result = train.try_(train__memory="auto", out="out")
    assert "train.memory=auto: train.gradient_checkpointing=false" in result.stderr
    assert "0 of 2 blocks are recomputed" in result.stderr
    written = train(train__gradient_checkpointing=False, out="written")
    out = train.folder / "out"
    assert column(out, "loss") == column(written, "loss")
    saved = load_config(out / "qwen.yaml").train
    assert (saved.memory, saved.gradient_checkpointing, saved.offload_blocks) == ("auto", True, 0)
    again = train.try_("--resume", train__memory="auto", train__max_steps=4, out="out")
    assert again.code == 0, again.stderr
    assert len(column(out, "loss")) == 4


def test_a_quantisation_is_chosen_only_from_the_list_and_kept(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantisation is chosen if nothing else fits by the plan."""
    config = train.config(train__memory="auto", train__memory_quantization=["nf4"])
    seen: list[Candidate] = []

    def only_quantised(found: list[Candidate], *arguments: Any) -> Any:
        seen.extend(found)
        least = min(each.memory for each in found if each.settings[QUANTISATION] == "nf4")
        return choose(found, config, Machine("RTX 4090", least))

    limited(monkeypatch, 1 << 40)
    monkeypatch.setattr(prepare, "choose", only_quantised)
    out = train(train__memory="auto", train__memory_quantization=["nf4"])
    assert {each.settings[QUANTISATION] for each in seen} == {"none", "nf4"}
    assert load_config(out / "qwen.yaml").model.quantization == "nf4"
    seen.clear()
    monkeypatch.setattr(prepare, "choose", lambda found, *_: (seen.extend(found), choose(found, config, LARGEST))[1])
    assert train.try_("--resume", settings={"train.max_steps": 4}).code == 0
    assert {each.settings[QUANTISATION] for each in seen} == {"nf4"}


LARGEST = Machine("H100", 1e15)


def test_a_machine_where_nothing_fits_is_told_what_is_nearest(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1_000_000_000)
    result = train.try_(train__memory="auto")
    refused(
        result,
        "train.memory=auto: nothing fits that leaves the result the same (expected at most 920 MB",
        "found 1.3 GB",
        "`qwen-train plan --fit` names quantisations that fit",
    )
    assert not (train.folder / "out" / "metrics.jsonl").exists()


def test_a_device_that_does_not_say_its_memory_is_left_as_it_is_set(train: Trainer) -> None:
    result = train.try_(settings={**SMALL, "train.max_steps": 1}, train__memory="auto")
    assert result.code == 0, result.stderr
    assert "train.memory=auto chooses nothing: the device does not say how much memory it has" in result.stderr


def test_an_exact_choice_comes_before_a_rounded_one_as_fast() -> None:
    machine = Machine("RTX 4090", 1e12)
    settings = with_layout(load_config(None), "cuda")
    found = list(candidates(REAL, settings, LARGE, machine, Open({QUANTISATION: ("nf4", "none")})))
    equal = [replace(each, seconds=1.0) for each in found]
    assert choose(equal, settings, machine).best[0].settings[QUANTISATION] == "none"
