"""Compute which settings are the fastest that fit: for cards of each size, and the real models.

    python tools/fit_table.py [--row "24 GB"] [--measured]

It prints the tables of docs/howto/fit-your-gpu.md, in the way of `qwen-train plan --fit`: a LoRA of rank 16, in
bfloat16, one edit of 1024² with one control. With --measured it prints instead how far the computed seconds are from
those of the training steps in docs/gpu/, and how many pairs of settings are in the measured order.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from make_pieces import MODELS

from qwen_cache.settings.load import Config, load_config
from qwen_cache.terminal import human_bytes
from qwen_train.memory import pieces
from qwen_train.memory.choice import CHECKPOINTING, Candidate, Machine, Open, candidates, choose
from qwen_train.memory.cost import CARDS, Way, Work, card_of, step_seconds
from qwen_train.memory.prediction import block_bytes
from qwen_train.memory.sizes import SampleSize
from qwen_train.model.combinations import kind_of, with_layout

TRANSFORMERS = {
    name: {**pieces.DEFAULTS[MODELS[of]["_class_name"]], **MODELS[of]}
    for name, of in (("Qwen-Image-Edit-2509", "Qwen-Image, Edit and Edit-2509"), ("Qwen-Image-2.1", "Qwen-Image-2.1"))
}
GB = 10**9
MACHINES = {
    **{f"{size} GB": Machine(card_of(None, size * GB), size * GB) for size in (8, 12, 16, 24, 48, 80, 141)},
    "2 × 24 GB": Machine(card_of(None, 24 * GB), 24 * GB, None, 2),
}
SOLD_AS = {"141 GB": "H200"}
"""The card of a size, where it is computed by the rates of another one."""


def edit(name: str, text: int | None = None, side: int = 64, controls: int = 1) -> SampleSize:
    """An edit at 1024² with one control, with the text of one; in the 20B family its image is read there, at 384²."""
    is_21 = name == "Qwen-Image-2.1"
    shape = (1, side, side)
    tokens = text if text is not None else 134 if is_21 else 272
    return SampleSize((shape,) * (1 + controls), tokens, (7,) * controls if is_21 else ())


def best(name: str, machine: Machine, *, exact: bool) -> list[Candidate]:
    """The fastest of each kind that fit; `exact`: of those that leave the result the same."""
    settings, transformer = settings_of_all(), TRANSFORMERS[name]
    whole = Open.of_plan(settings, machine, transformer)
    left_open = Open.same_result(machine, compiles=True) if exact else whole
    return choose(list(candidates(transformer, settings, [edit(name)], machine, left_open)), settings, machine).best


def settings_of_all() -> Config:
    return with_layout(load_config(None), "cuda")


def exact_cells(name: str, size: str) -> str:
    """The first cells of a row: what leaves the result the same."""
    machine = MACHINES[size]
    cells = [f"{size}, {SOLD_AS.get(size, machine.card)}"]
    if not (found := best(name, machine, exact=True)):
        return f"| {' | '.join([*cells, 'nothing fits', *'–––'])} |"
    first = found[0]
    cells += [words(first, name), human_bytes(first.memory), on_host(first, machine)]
    return f"| {' | '.join([*cells, f'{first.seconds:.3g} s, {STEPS * first.seconds / 3600:.1f} h'])} |"


def other_cells(name: str, size: str) -> str:
    """The last cells: the fastest that changes the result."""
    settings = settings_of_all()
    for each in best(name, MACHINES[size], exact=False):
        if not each.is_exact(settings):
            return f" {words(each, name)} | {on_host(each, MACHINES[size])} | {each.seconds:.3g} s |"
    return " nothing fits | – | – |"


def on_host(choice: Candidate, machine: Machine) -> str:
    """The RAM that all processes of a candidate keep."""
    return human_bytes(choice.host_memory * machine.gpus) if choice.host_memory else "–"


def words(choice: Candidate, name: str) -> str:
    """The settings of a candidate, without the names of their sections."""
    changes = choice.changes(settings_of_all())
    auto = changes.get(CHECKPOINTING) == "auto"
    each = [f"`{key.partition('.')[2]}={json.dumps(value)}`".replace('"', "") for key, value in changes.items()]
    count = f" ({choice.recomputed} of {TRANSFORMERS[name]['num_layers']})" if auto else ""
    return (" ".join(each) or "defaults") + count


STEPS = 2000
HEADER = ("GPU", "same result", "GPU memory", "RAM", f"a step, {STEPS:,} steps", "other result", "RAM", "a step")


def table(sizes: list[str]) -> Iterator[str]:
    for name in TRANSFORMERS:
        yield f"| {name}: {' | '.join(HEADER)} |"
        yield f"|{' --- |' * len(HEADER)}"
        for size in sizes:
            yield exact_cells(name, size) + other_cells(name, size)


# ---- against measured steps ------------------------------------------------------------------------------------------

REPORTS = Path(__file__).parents[1] / "docs/gpu"
CLOSE = 1.05
"""Pairs of steps whose times differ by less are in no order: they vary by as much."""


def measured(report: Path) -> list[tuple[str, tuple[Any, ...], float, float]]:
    """Each training step of a report: its name, what it trains on, the measured and the computed seconds."""
    found = json.loads(report.read_text(encoding="utf-8"))
    card, rows = CARDS[card_of(found["card"], 80e9)], []
    for part in (part for name, part in found["parts"].items() if name.startswith("step/")):
        for each in part["rows"]:
            if "seconds_whole" not in each or "mixed" in each["case"]:
                continue
            name = "Qwen-Image-2.1" if "2.1" in each["case"] else "Qwen-Image-Edit-2509"
            side = 32 if "512" in each["case"] else 64
            text = each["tokens"] // each["samples"] - 2 * side**2
            batch = [edit(name, text, side)] * each["samples"]
            settings = with_layout(load_config(None, each["settings"]), "cuda")
            train, transformer = settings.train, TRANSFORMERS[name]
            every = int(train.gradient_checkpointing)
            recomputed = -(-transformer["num_layers"] // every) if every else 0
            way = Way(recomputed, train.compile is True, train.offload_blocks)
            work, block = Work.of(transformer, settings, batch), block_bytes(transformer, settings)
            kind = kind_of(transformer, settings)
            computed = step_seconds(transformer, settings, work, way, card, kind, block)
            of = (name, train.method, train.noise_draws, each["samples"], each["tokens"])
            rows.append((each["case"], of, each["seconds_whole"], computed))
    return rows


def ordered(rows: list[tuple[str, tuple[Any, ...], float, float]]) -> tuple[int, int, list[str]]:
    """How many pairs of steps on the same batch are computed in the order that was measured, of how many, and the
    others."""
    pairs, wrong = 0, []
    for (one, of_one, *a), (other, of_other, *b) in combinations(rows, 2):
        if of_one == of_other and max(a[0], b[0]) > CLOSE * min(a[0], b[0]):
            pairs += 1
            if (a[0] > b[0]) != (a[1] > b[1]):
                wrong.append(f"{one} / {other}")
    return pairs - len(wrong), pairs, wrong


def compare() -> Iterator[str]:
    for report in sorted(REPORTS.glob("*.json")):
        rows = measured(report)
        yield f"{report.stem}: | step | measured | computed | computed / measured |"
        for name, _, seconds, computed in rows:
            yield f"| {name} | {seconds:.2f} s | {computed:.2f} s | {computed / seconds:.2f} |"
        right, pairs, wrong = ordered(rows)
        yield f"{right} of {pairs} pairs in the measured order; not: {', '.join(wrong) or 'none'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=MACHINES, action="append", help="only this size; repeat it for more")
    parser.add_argument("--measured", action="store_true", help="compare with docs/gpu/ instead")
    options = parser.parse_args()
    for line in compare() if options.measured else table(options.row or list(MACHINES)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
