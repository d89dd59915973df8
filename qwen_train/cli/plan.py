"""`plan`: the memory of training, and whether it fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.options import (
    CONFIG,
    DEVICES,
    JSON,
    MODEL_PATH,
    READ_CACHE,
    SET,
    TEXT_ENCODER,
    TRANSFORMER,
    command,
    flag,
    option,
)
from qwen_cache.settings.given import Given
from qwen_cache.terminal import FAULTS, human_bytes, plural, print_json, results

if TYPE_CHECKING:
    from qwen_cache.settings.load import Config
    from qwen_train.data.planned import Planned
    from qwen_train.data.samples import Samples
    from qwen_train.memory.choice import Machine

OTHERS = (
    "musubi-tuner's docs 16 (epochs, at 5e-5); DiffSynth-Studio 250 (repeat 50, 5 epochs, at 1e-4); "
    "diffusers' DreamBooth README 400 to 670 (500 steps of 4, for 3 to 5 images); for any number of images, "
    'ai-toolkit\'s examples 2,000 steps (Qwen-Image) and 3,000 (Edit-2509): "500 - 4000 is a good range"'
)
"""Published by other trainers for LoRAs of these models."""
LEAST_MEMORY = 1 << 20  # bytes; less means a forgotten unit


@command(
    page="howto/fit-your-gpu.md",
    examples=[
        "qwen-train plan --fit --gpu-memory 24GB",
        "qwen-train plan --set train.offload_blocks=20 --json",
    ],
)
def plan(
    cache: Given | None = READ_CACHE,
    model: Given | None = MODEL_PATH,
    transformer: Given | None = TRANSFORMER,
    text_encoder: Given | None = TEXT_ENCODER,
    fit: bool = flag("--fit", DEVICES, "Name the fastest settings that fit, and the two next best."),
    gpu_memory: str | None = option(DEVICES, "The memory of the GPU, such as 24GB.", "SIZE"),
    gpus: int | None = option(DEVICES, "For --fit and train.fsdp: the number of GPUs.", "N", min=1),
    host_memory: str | None = option(DEVICES, "For --fit: the memory of the host, such as 64GB.", "SIZE"),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Predict the memory of training by part, and whether it fits. Loads no weights."""
    from qwen_cache.format.arrow import convert_without_pandas
    from qwen_cache.models.folder import check_name, find_here, open_model
    from qwen_cache.settings.load import load_config
    from qwen_train.data.checks import check_encoders
    from qwen_train.data.planned import Planned, with_model_of_caches
    from qwen_train.data.samples import open_samples
    from qwen_train.lora.files import with_assistant
    from qwen_train.run import cache_of_run, in_one_process, only_cache

    if cache and (of_run := cache_of_run(Path(cache.value))):
        cache = replace(cache, value=of_run)
    settings = load_config(config, set_, [model, transformer, text_encoder, *only_cache(cache)])
    require("torch")
    convert_without_pandas()
    in_one_process("plan")
    capacity = capacity_of(gpu_memory) if gpu_memory else None
    if not fit and (host_memory is not None or (gpus is not None and not settings.train.fsdp)):
        what = "--gpus and --host-memory are for --fit, and --gpus for train.fsdp=true"
        raise ConfigError(what, do="add --fit, or leave them out")
    host = capacity_of(host_memory, "--host-memory") if host_memory else None
    machine = machine_of(capacity, gpus, host) if fit else None
    samples = open_samples(settings)
    planned = Planned.of(samples, settings.train)
    settings = with_assistant(with_model_of_caches(settings, samples, ("transformer",)))
    name = check_name(settings.model.path)
    if here := find_here(name, (), settings.model.revision):
        opened = replace(open_model(str(here), ()), name=name, text_encoder=settings.model.text_encoder)
        check_encoders(samples, opened, read=False)
    from qwen_train.inference.memory import decoding_in_training, memory_beside_training
    from qwen_train.memory import plan as memory

    workload = memory.Workload.of(settings, samples)
    report = memory.plan(settings, workload, capacity, gpus or 1) | memory_beside_training(settings, workload)
    report |= decoding_in_training(settings, workload, capacity)
    report |= {"steps": steps_per_image(settings, samples, planned)}
    report |= {"fit": memory.fit(settings, workload, machine)} if machine else {}
    (print_json if json else print_plan)(report)
    does_fit = bool(report["fit"]["choices"]) if machine else report.get("fits", True)
    return 0 if does_fit else FAULTS


def machine_of(capacity: int | None, gpus: int | None, host: int | None) -> Machine:
    """The machine of `--fit`: this one, as far as the options say nothing else.

    A size that is given counts whole; of a GPU here, as much as a run takes. ConfigError without either.
    """
    from qwen_cache.models.hardware import device_memory, device_names, device_title, host_memory
    from qwen_train.memory.choice import Machine
    from qwen_train.memory.cost import card_of
    from qwen_train.memory.prediction import SAFE

    if capacity is not None:
        return Machine(card_of(None, capacity), capacity, host and host / (gpus or 1), gpus or 1)
    names = device_names()[:-1]
    memories = [size for name in names[:gpus] if (size := device_memory(name))]
    if not memories or len(memories) < (gpus or 1):
        do = "give its memory with --gpu-memory"
        raise ConfigError("--fit is for GPUs, and this machine has too few that say how much memory they have", do=do)
    free = host or SAFE * (host_memory()[1] or float("inf"))
    count, memory = len(memories), min(memories)
    return Machine(card_of(device_title(names[0]), memory), SAFE * memory, free / count, count)


def steps_per_image(settings: Config, samples: Samples, planned: Planned) -> dict[str, Any]:
    """How often a run of one process sees each image, and what other trainers publish."""
    import pyarrow as pa
    import pyarrow.compute as pc

    train = settings.train
    per_step = planned.plan.summary().samples_per_batch * train.gradient_accumulation_steps
    named = "target" if planned.has_targets else "key"
    images = pc.count_distinct(samples.column(named).take(pa.array(planned.training))).as_py()
    per_image = round(train.max_steps * per_step / images, 1)
    return {"max_steps": train.max_steps, "per_step": round(per_step, 1), "images": images, "per_image": per_image}


def capacity_of(text: str, name: str = "--gpu-memory") -> int:
    """Bytes from `24GB` or `22.5 GiB`; ConfigError for other text in the option `name`."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < LEAST_MEMORY:
        raise ConfigError("not a size of memory", where=name, expected="such as 24GB or 80GiB", found=text)
    return size


def print_plan(report: dict[str, Any]) -> None:
    """Print the report as text on stdout."""
    from rich.table import Table

    from qwen_train.memory.prediction import HOST_PARTS, PARTS

    out, table = results(soft_wrap=True), Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, words in (PARTS | {"total": "[bold]total[/]"}).items():
        if report["memory"][name]:
            table.add_row(words, human_bytes(report["memory"][name]))
    batch = report["largest_batch"]
    out.print(f"[bold]largest batch[/]  {plural(batch['samples'], 'sample')}, {batch['tokens']:,} tokens")
    out.print(table)
    if "gpus" in report:
        out.print(f"  on each of {report['gpus']} GPUs, over which train.fsdp shards the weights", highlight=False)
    if "chosen" in report:
        chosen = report["chosen"]
        out.print(f"[bold]train.memory[/]   auto: {chosen['words']}, {human_bytes(chosen['total'])}", highlight=False)
    for choice in report.get("recomputed_blocks", []):
        out.print(
            f"with {plural(choice['blocks'], 'block')} recomputed: {human_bytes(choice['memory'])}, "
            f"{100 * choice['time']:.0f} % of the time with all"
        )
    host = {words: human_bytes(report["host"][name]) for name, words in HOST_PARTS.items() if report["host"][name]}
    parts = ", ".join(f"{words} {size}" for words, size in host.items())
    out.print(f"[bold]host in all[/]  {human_bytes(report['host']['total'])} a process: {parts}", highlight=False)
    if report["host_memory"]:
        out.print(f"[bold]host memory[/]  {human_bytes(report['host_memory'])} for what is offloaded, pinned")
    steps = report["steps"]
    of_samples = (
        f"{steps['max_steps']:,} steps of {plural(steps['per_step'], 'sample')}, {plural(steps['images'], 'image')}"
    )
    out.print(f"[bold]steps per image[/]  {steps['per_image']:,}: {of_samples}", highlight=False)
    out.print(f"  others, in steps of one sample per image: {OTHERS}", highlight=False)
    if "build" in report:
        build, predict = ({name: human_bytes(size) for name, size in report[it].items()} for it in ("build", "predict"))
        out.print(
            f"[bold]build[/]          VAE {build['vae']}, text encoder {build['text_encoder']}, both on one device "
            f"{build['one_device']}"
        )
        out.print(
            f"[bold]predict[/]        {predict['none']}; --offload model {predict['model']}, sequential "
            f"{predict['sequential']}"
        )
    if "decode" in report:
        of_vae, image, total = (human_bytes(report["decode"][name]) for name in ("weights", "image", "total"))
        verdict = "" if report["decode"].get("fits", True) else ", which does not fit"
        text = f"the VAE {of_vae}, an image {image}; on the GPU that trains, with the run {total}{verdict}"
        out.print(f"[bold]decode[/]         {text}")
    if "fit" in report:
        print_fit(report["fit"])
    if "fits" not in report:
        return
    verdict = "[bold green]fits[/]" if report["fits"] else "[bold red]does not fit[/]"
    out.print(f"{verdict} in {human_bytes(report['gpu_memory'])}")
    if report["max_tokens"]:
        out.print(f"largest batches that fit: train.max_tokens={report['max_tokens']}")
    for settings in report.get("do", []):
        out.print(f"would fit with {settings}")


def print_fit(fit: dict[str, Any]) -> None:
    """Print the fastest settings that fit, with what the next best cost; or the nearest."""
    out = results(soft_wrap=True)
    gpus = f"{plural(fit['gpus'], 'GPU')} with {human_bytes(fit['gpu_memory'])}" + (" each" if fit["gpus"] > 1 else "")
    host = "" if fit["host_memory"] is None else f", {human_bytes(fit['host_memory'])} of host memory"
    out.print(f"[bold]fit[/]            {gpus}{host}; seconds are computed for the {fit['card']}", highlight=False)
    for number, row in enumerate(fit["choices"], 1):
        slower = f", {row['seconds'] / fit['choices'][0]['seconds']:.2f} times the first" if number > 1 else ""
        rounds = "" if row["same_result"] else "; changes the result"
        out.print(f"  {number}. {row['words']}", highlight=False, markup=False)
        out.print(f"     {_takes(row, fit)}, {row['seconds']:.3g} s a step{slower}{rounds}", highlight=False)
    if fit["nearest"] and fit["host_of_program"] > (fit["host_memory"] or float("inf")):
        needed = f"the program alone takes {human_bytes(fit['host_of_program'])} of host memory"
        out.print(f"  nothing fits: {needed}, before anything is offloaded", highlight=False)
    elif fit["nearest"]:
        out.print("  nothing fits; nearest is", highlight=False)
        out.print(f"     {fit['nearest']['words']}: {_takes(fit['nearest'], fit)}", highlight=False, markup=False)


def _takes(row: dict[str, Any], fit: dict[str, Any]) -> str:
    host = f", {human_bytes(row['host_memory'])} of host memory" if row["host_memory"] else ""
    return f"{human_bytes(row['memory'])}{host}, {row['recomputed_blocks']} of {fit['blocks']} blocks recomputed"
