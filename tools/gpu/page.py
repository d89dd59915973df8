"""The GPU report as Markdown, and the README's table of all reports.

Pure functions of the JSON that gpu_report.py writes. A case without numbers is listed below its table with the reason.
Between its two marks the README has a warning while there is no report, then the table; reports of tiny models are not
taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row, float | None], str]]
"""A heading, and the cell of a row; the number is the measured peak in TFLOP/s, if there is one."""
COMMAND = "python tools/gpu_report.py"
NOTHING = "–"
BEGIN, END = "<!--gpu-->", "<!--/gpu-->"
WARNING = """\
> [!WARNING]
> Nothing here has run with the real weights or on a GPU yet. It is developed and tested on tiny random models with the
> real classes, on CPUs. Figures about GPU memory are computed."""
NOTE = """\
> [!NOTE]
> Nothing here has run with the real weights yet. With random ones of real size (`make gpu`):"""
README_HEAD = "|GPU|LoRA step, 1024²|compiled|of peak|memory|predicted|images/s|\n|---|---|---|---|---|---|---|"


# ---- cells -----------------------------------------------------------------------------------------------------------


def number(key: str, unit: str = "", factor: float = 1.0) -> Callable[[Row, float | None], str]:
    """Three digits of a value, or a dash."""

    def cell(row: Row, peak: float | None) -> str:
        value = row.get(key)
        return NOTHING if value is None else f"{digits(factor * value)}{unit}"

    return cell


def digits(value: float) -> str:
    """Three significant digits, never as a power of ten for numbers that people read."""
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def seconds(row: Row, peak: float | None) -> str:
    """The time with its spread, and of few blocks the extrapolated one."""
    whole, spread = row.get("seconds_whole", row["seconds"]), row.get("spread", 0.0)
    if whole != row["seconds"]:
        return f"about {digits(whole)} s (extrapolated from {row['blocks']} blocks: {digits(row['seconds'])} s)"
    return f"{digits(whole)} s" + (f" ± {spread / 2:.0%}" if "spread" in row else "")


def utilisation(row: Row, peak: float | None) -> str:
    return f"{row['tflops'] / peak:.0%}" if peak and row.get("tflops") else NOTHING


def against_prediction(row: Row, peak: float | None) -> str:
    """Predicted bytes of tensors, and how far the prediction is off."""
    off = row["predicted"] / row["allocated"] - 1 if row.get("allocated") else 0.0
    return f"{digits(row['predicted'] / 1e9)} GB ({off:+.1%})"


def within(row: Row, peak: float | None) -> str:
    return "yes" if row["within"] else f"**no**, more than {row['limit']:g}"


def text(key: str) -> Callable[[Row, float | None], str]:
    return lambda row, peak: str(row.get(key) or NOTHING).replace("|", "\\|").replace("\n", " ")


def published(row: Row, peak: float | None) -> str:
    """The figures of others, and on the same card how many times as fast ours is."""
    return "; ".join(map(figure, row["published"]))


def figure(it: Row) -> str:
    numbers = [f"{it['seconds']:g} s" if it["seconds"] else "", f"{it['gigabytes']:g} GB" if it["gigabytes"] else ""]
    times = f", ours is **{digits(it['times_as_fast'])} times as fast**" if it["times_as_fast"] else ""
    return f"{it['card']}: {', '.join(filter(None, numbers))} ({it['by']}){times}"


def settings(row: Row, peak: float | None) -> str:
    return " ".join(f"`{each}`" for each in row.get("settings", ())) or "defaults"


TIME: Column = ("time", seconds)
RATE: list[Column] = [("TFLOP", number("tflop")), ("TFLOP/s", number("tflops")), ("of peak", utilisation)]
MEMORY: list[Column] = [
    ("tensors", number("allocated", " GB", 1e-9)),
    ("taken from the device", number("reserved", " GB", 1e-9)),
]
COLUMNS: dict[str, list[Column]] = {
    "machine": [
        ("time", lambda row, peak: seconds(row, peak) if "seconds" in row else NOTHING),
        ("TFLOP/s", number("tflops")),
        ("GB/s", number("gigabytes_per_second")),
    ],
    "steps": [
        ("settings", settings),
        ("samples", number("samples")),
        ("tokens", number("tokens")),
        TIME,
        *RATE,
        MEMORY[0],
        ("predicted", against_prediction),
        MEMORY[1],
        ("predicted with context", number("predicted_reserved", " GB", 1e-9)),
    ],
    "block": [TIME, *RATE],
    "attention": [TIME, *RATE, ("by `auto`", lambda row, peak: "**yes**" if row["chosen"] else NOTHING)],
    "published": [
        ("settings", settings),
        ("samples", number("samples")),
        ("tokens", number("tokens")),
        TIME,
        RATE[1],
        RATE[2],
        *MEMORY,
        ("published", published),
    ],
    "equality": [
        ("outputs", number("outputs_ratio")),
        ("gradients", number("gradients_ratio")),
        ("stock's own distance", number("outputs_stock")),
        ("within the limit", within),
    ],
    "checks": [
        *((name, number(name)) for name in ("passed", "failed", "skipped")),
        ("first failure", text("first_failure")),
    ],
    "encode": [("together", number("together")), ("per second", number("per_second")), TIME, *RATE, *MEMORY],
    "waiting": [
        ("settings", settings),
        ("time of a step", seconds),
        ("waiting for data", number("waiting", " %", 100)),
        ("at most", number("most_waiting", " %", 100)),
    ],
    "predicting": [TIME, *RATE, *MEMORY],
    "sharded": [
        TIME,
        ("weights on each", number("held", " GB", 1e-9)),
        ("of", number("whole", " GB", 1e-9)),
        MEMORY[0],
        ("predicted", against_prediction),
        MEMORY[1],
    ],
}
"""By the module of a part; the first column is the case."""
NOTES = {
    "machine": (
        "Products of two square matrices; the best of a few sizes is the peak that utilisations refer to. Here and "
        "below, a time is a median of several repeats, ± half their range."
    ),
    "steps": (
        "One optimizer step on a batch that is on the device: a LoRA of rank 16 in bf16 unless the settings say "
        "otherwise, images of 1024² with one control, packed rows. FLOPs are those of forward and backward without "
        "recomputation. `predicted` is what `qwen-train plan` computes for the tensors, and `predicted with context` "
        "its total, with what it reserves for the driver's context and fragmentation."
    ),
    "block": (
        "The patch embedding of a vision tower on one image of a megapixel, as transformers' convolution and as our "
        "product; and a block on the packed row of an edit at 1024² with one control, without recomputation."
    ),
    "attention": (
        "One operation of a block, on tokens of text and images together; 24 heads are those of Qwen-Image, 32 those "
        "of Qwen-Image-2.1, each of 128 channels. Marked is what `train.attention: auto` takes for few lengths."
    ),
    "published": (
        "Training steps with the settings of other trainers' published figures: a LoRA of rank 16 in bf16. What those "
        "leave open, such as the length of the text, is assumed. The figures of VeOmni, DiffSynth-Studio and Fizgig "
        "include the encoders; ours reads a cache. Factors are for the same card alone. Krea 2, a step of VeOmni at "
        "4096², which takes a minute, and figures without a resolution are left out."
    ),
    "equality": (
        "Two blocks of the real width on samples of mixed sizes. A number is our distance from float32 relative to "
        "that of stock diffusers on single samples; 1 is equally near, and 2 is the limit of the project's tests."
    ),
    "checks": "Tests of this repository that are skipped, or run on the CPU, where there is no GPU.",
    "encode": "Forward passes without decoding images and writing shards. A sample of an edit has two images.",
    "waiting": (
        "`qwen-train run` on a cache of 32 random samples of 1024² with one control, in the temporary files' folder; "
        "after the first reading they are in the page cache."
    ),
    "sharded": (
        "A step of a LoRA of rank 16 with `train.fsdp=true` in two processes, on a batch of 1024² with one control for "
        "each, with few of the blocks; memory is that of the first process."
    ),
    "predicting": "Two passes of the transformer, for the prompt and the negative prompt, at 1024² with one control.",
}


# ---- the report ------------------------------------------------------------------------------------------------------


def markdown(report: Mapping[str, Any]) -> str:
    """The page of a report."""
    peak = measured_peak(report)
    parts = report["parts"]
    lines = [f"# {report['card']}", "", introduction(report), "", *problems(parts)]
    lines += ["| part | result | took | command |", "| --- | --- | --- | --- |"]
    for name, part in parts.items():
        took = f"{part['seconds']:.0f} s" if part["seconds"] else NOTHING
        lines.append(f"| {part['title']} | {outcome(part)} | {took} | `{COMMAND} --only {name}` |")
    measured = {name: part for name, part in parts.items() if part["rows"]}
    for module in dict.fromkeys(part["module"] for part in measured.values()):
        of_module = {name: part for name, part in measured.items() if part["module"] == module}
        lines += ["", *section(module, of_module, peak)]
    return "\n".join(lines) + "\n"


def introduction(report: Mapping[str, Any]) -> str:
    limited = f" It was held to {report['memory_limit']:g} GB of the card." if report.get("memory_limit") else ""
    small = " **The models were tiny: these numbers mean nothing.**" if report["small"] else ""
    dates = sorted({part["date"] for part in report["parts"].values()})
    commits = sorted({part["commit"] for part in report["parts"].values()})
    when = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "never"
    return (
        f"Measured by `make gpu` on {when}, at {', '.join(commits)}. Weights are random and of the real sizes, so "
        f"times and memory are real and images are not.{limited}{small}"
    )


def problems(parts: Mapping[str, Any]) -> list[str]:
    """First of all, the checks that were not passed."""
    unequal = [f"{row['case']} is not equal to stock" for row in rows_of(parts) if row.get("within") is False]
    failed = [f"{row['failed']} failed: {row['case']}" for row in rows_of(parts) if row.get("failed")]
    found = [*unequal, *failed]
    return [f"**Checks that were not passed:** {'; '.join(found)}.", ""] if found else []


def rows_of(parts: Mapping[str, Any]) -> list[Row]:
    return [row for part in parts.values() for row in part["rows"]]


def outcome(part: Mapping[str, Any]) -> str:
    """`done`, or how many cases were measured and why the process ended early."""
    measured, cases = sum("reason" not in row for row in part["rows"]), len(part["rows"])
    if part["status"] == "done":
        return f"{measured} of {cases} cases" if measured < cases else "done"
    after = f"; {measured} cases were measured before" if measured else ""
    return f"{part['status']}: {escaped(part['reason'])}{after}"


def escaped(reason: str) -> str:
    return reason.replace("|", "\\|").replace("\n", " ")


def section(module: str, parts: Mapping[str, Any], peak: float | None) -> list[str]:
    """Heading, note, one table of all parts of a module, and the cases without numbers."""
    rows = rows_of(parts)
    titles = [part["title"] for part in parts.values()]
    lines = [f"## {titles[0].partition(',')[0]}", "", NOTES[module], ""]
    for facts in (row["facts"] for row in rows if "facts" in row):
        lines += ["| | |", "| --- | --- |", *(f"| {key} | {escaped(value)} |" for key, value in facts.items()), ""]
    if measured := [row for row in rows if "reason" not in row and "facts" not in row]:
        lines += table(measured, COLUMNS[module], peak)
        lines += [suggestion(measured), ""] if module == "attention" else []
        lines += [suggested_kind(parts["step/products"]["rows"]), ""] if "step/products" in parts else []
    missing = [row for row in rows if "reason" in row]
    lines += [f"- {row['case']}: {'failed, ' if row.get('raised') else ''}{escaped(row['reason'])}" for row in missing]
    lines += [""] if missing else []
    return [*lines, f"Measured by {', '.join(f'`{COMMAND} --only {name}`' for name in parts)}."]


def suggestion(rows: Sequence[Row]) -> str:
    """The kernel that was fastest over all shapes forward and backward, and whether `auto` takes it."""
    both = [row for row in rows if row["backward"]]
    seconds = {kernel: sum(row["seconds"] for row in both if row["kernel"] == kernel) for kernel in measured_by(both)}
    if not seconds:
        return "No kernel was measured at every shape."
    fastest, default = min(seconds, key=seconds.__getitem__), next(row["kernel"] for row in both if row["chosen"])
    times = ", ".join(f"{kernel} {digits(1000 * total)} ms" for kernel, total in seconds.items())
    verdict = "which is the default" if fastest == default else f"where the default is `{default}`"
    return f"All shapes forward and backward: {times}. These figures suggest `{fastest}`, {verdict}."


def suggested_kind(rows: Iterable[Row]) -> str:
    """The fastest step among those with and without products in 8 bits."""
    seconds = {row["case"]: row["seconds_whole"] for row in rows if "seconds_whole" in row}
    if len(seconds) < 2:
        return "Products in 8 bits were not measured."
    fastest = min(seconds, key=seconds.__getitem__)
    return f"Of the products in 8 bits and bfloat16, these figures suggest {fastest}: {digits(seconds[fastest])} s."


def measured_by(rows: Sequence[Row]) -> list[str]:
    """The kernels that have a row for every shape."""
    shapes = {row["shape"] for row in rows}
    kernels = dict.fromkeys(row["kernel"] for row in rows)
    return [kernel for kernel in kernels if {row["shape"] for row in rows if row["kernel"] == kernel} == shapes]


def table(rows: Sequence[Row], columns: Sequence[Column], peak: float | None) -> list[str]:
    lines = [f"| | {' | '.join(heading for heading, _ in columns)} |", f"| --- |{' --- |' * len(columns)}"]
    cells = ((row["case"], *(cell(row, peak) for _, cell in columns)) for row in rows)
    return [*lines, *(f"| {' | '.join(each)} |" for each in cells), ""]


def measured_peak(report: Mapping[str, Any]) -> float | None:
    """TFLOP/s of matrix products in bfloat16, as the part `machine` measured it."""
    rows = report["parts"].get("machine", {}).get("rows", [])
    return next((row["tflops"] for row in rows if "tflops" in row), None)


# ---- the README ------------------------------------------------------------------------------------------------------


def readme(page: str, folder: Path) -> str:
    """The README with the table of the reports in `folder` between its marks, or the warning if there are none."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    lines = [
        readme_row(report, path.stem)
        for report, path in zip(reports, sorted(folder.glob("*.json")), strict=True)
        if not report["small"]
    ]
    between = "\n".join([NOTE, "", README_HEAD, *lines]) if lines else WARNING
    marked = re.compile(rf"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(marked.findall(page)) != 1:
        raise ValueError(f"the README needs {BEGIN} and {END} once")
    return marked.sub(lambda _: f"{BEGIN}\n{between}\n{END}", page)


def readme_row(report: Mapping[str, Any], stem: str) -> str:
    """A card: the step of a LoRA in bf16, that of compiled blocks, and the images that the VAE encodes per second."""
    step, vae, peak = case(report, "step/bf16", "1024²"), case(report, "encode", "VAE"), measured_peak(report)
    compiled = case(report, "step/compile", "compiled", exactly=True)
    cells = [f"[{report['card']}](docs/gpu/{stem}.md)"]
    if "seconds" in step:
        whole, about = step["seconds_whole"], "~" if step["seconds_whole"] != step["seconds"] else ""
        cells += [f"{about}{digits(whole)} s", number("seconds_whole", " s")(compiled, peak), utilisation(step, peak)]
        cells += [number(key, " GB", 1e-9)(step, peak) for key in ("allocated", "predicted")]
    else:
        cells += [NOTHING] * 5
    return f"|{'|'.join([*cells, number('per_second')(vae, peak)])}|"


def case(report: Mapping[str, Any], part: str, name: str, *, exactly: bool = False) -> Row:
    """The last case of a part whose name begins so, or is it `exactly`; nothing if it was not measured."""
    rows = report["parts"].get(part, {}).get("rows", [])
    named = [row for row in rows if (row["case"] == name if exactly else row["case"].startswith(name))]
    return named[-1] if named else {}
