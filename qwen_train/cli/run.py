"""`run`: the checks first, then torch.

Of several processes only the main one prints. Each prints its own error; an error that several share is printed once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.options import (
    CONFIG,
    INPUT,
    JSON,
    MODEL_PATH,
    OUTPUT,
    SET,
    TRAINING,
    TRANSFORMER,
    VAE,
    command,
    flag,
    option,
    setting,
    setting_argument,
)
from qwen_cache.settings.given import Given
from qwen_cache.terminal import FAILED, INTERRUPTED, console, print_done, print_json, print_next, verbatim

if TYPE_CHECKING:
    from qwen_cache.settings.load import Config
    from qwen_train.run import Launch
    from qwen_train.training.start import Start

SECONDS_TO_PRINT = 5
"""torchrun kills all processes as soon as one fails; so the others wait until the one with the error has printed it."""

SOURCE = setting_argument("cache.path", "CACHE", "The folder or URL of the cache; with --encode-…, the source.")
ENCODE_ON_THE_FLY = flag(
    "--encode-on-the-fly",
    INPUT,
    "Train without a cache: another process encodes, on cache.vae_device and cache.text_device.",
)
ENCODE_AT = option(INPUT, "Train without a cache: a `qwen-cache serve` at this address encodes.", "URL")
FOLLOW = flag(
    "--follow",
    INPUT,
    "Train while the cache is built: wait for its first commit, take in new ones at the ends of epochs.",
)
BATCH_SIZE = setting(
    "train.batch_size", TRAINING, "Samples per forward pass and device.", default="1 without train.max_tokens"
)
RESUME = flag("--resume", TRAINING, "Continue from the newest checkpoint in the output folder, if there is one.")
OUT = setting(
    "train.output_dir", OUTPUT, "The folder for checkpoints, the LoRA and the report.", "FOLDER", name="--out"
)


@command(
    page="howto/choose-what-is-trained.md",
    examples=[
        "qwen-train run --model Qwen/Qwen-Image-Edit-2509 --max-steps 2000 --rank 32",
        "qwen-train run shards --out runs/cats --learning-rate 5e-5 --batch-size 2",
    ],
)
def run(
    cache: Given | None = SOURCE,
    encode_on_the_fly: bool = ENCODE_ON_THE_FLY,
    encode_at: str | None = ENCODE_AT,
    follow: bool = FOLLOW,
    model: Given | None = MODEL_PATH,
    transformer: Given | None = TRANSFORMER,
    vae: Given | None = VAE,
    max_steps: Given | None = setting("train.max_steps", TRAINING, "Optimizer steps."),
    learning_rate: Given | None = setting("optimizer.learning_rate", TRAINING, "The peak learning rate."),
    rank: Given | None = setting("train.lora.rank", TRAINING, "The rank of the LoRA."),
    batch_size: Given | None = BATCH_SIZE,
    resume: bool = RESUME,
    out: Given | None = OUT,
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Train on a cache. Only the transformer is loaded."""
    if encode_on_the_fly and encode_at is not None:
        raise ConfigError("--encode-on-the-fly and --encode-at exclude each other", do="leave one of them out")
    require("torch")
    from qwen_cache.format.arrow import convert_without_pandas
    from qwen_train.run import Launch, ToEncode, only_cache, run_settings, silence_others
    from qwen_train.training.start import starting

    convert_without_pandas()
    encodes = encode_on_the_fly or encode_at is not None
    source = Given("CACHE", "data.source", cache.value) if encodes and cache else None
    named = [source] if encodes else only_cache(cache)
    given = [model, transformer, vae, max_steps, learning_rate, rank, batch_size, out, *named]
    given += [Given("--follow", "train.follow", True)] if follow else []
    launch = Launch.of_environment()
    silence_others(launch)
    with ExitStack() as held:
        checked: Start | Exception
        try:
            settings, fresh = run_settings(config, set_, given, resume=resume)
            print_kept(settings, fresh, config)
            _refuse_unused_vae(given, settings)
            to_encode = ToEncode(settings.data.source, encode_at) if encodes else None
            checked = held.enter_context(starting(settings, launch, resume=resume, to_encode=to_encode))
        except Exception as error:
            if launch.decides_alone:
                raise
            checked = error  # raised once the processes are connected, so that one of them prints it
        return _train(checked, launch, as_json=json)


def _refuse_unused_vae(given: Iterable[Given | None], config: Config) -> None:
    """ConfigError for --vae in a run that decodes no images."""
    if config.validation.vae_device is None and any(each and each.key == "model.vae" for each in given):
        do = "set validation.vae_device, or leave it out and give it to `qwen-train decode`"
        raise ConfigError("--vae is for images, and this run decodes none", do=do)


def _train(checked: Start | Exception, launch: Launch, *, as_json: bool) -> int:
    from qwen_train.train import train_started
    from qwen_train.training.processes import EndedElsewhereError, connect, naming_lost_connections, together

    try:
        with naming_lost_connections(launch):
            connect(launch)
            with together():
                if isinstance(checked, Exception):
                    raise checked
            result = train_started(checked)
            if launch.is_main:
                print_result(result, checked, as_json=as_json)
    except EndedElsewhereError:
        time.sleep(SECONDS_TO_PRINT)
        return FAILED
    except KeyboardInterrupt:
        if launch.is_main:
            raise
        time.sleep(SECONDS_TO_PRINT)
        raise SystemExit(INTERRUPTED) from None
    return 0


def print_result(result: Path, start: Start, *, as_json: bool) -> None:
    """Print the path of the result and the next commands; or as JSON, with the output folder and the last metrics."""
    from qwen_train.run import METRICS_NAME, REPORT_NAME
    from qwen_train.training.best import best_of
    from qwen_train.training.metrics import read_metrics

    if as_json:
        metrics = read_metrics(start.out / METRICS_NAME)
        print_json({"result": str(result), "output_dir": str(start.out), "metrics": metrics[-1] if metrics else {}})
        return
    print_done(result)
    console().print(f"report: {verbatim(start.out / REPORT_NAME)}", highlight=False)
    best = best_of(start.out)
    if best.step not in (None, start.config.train.max_steps):
        console().print(f"best:   step {best.step}, as the report says", highlight=False)
    print_next(*_next_commands(start))


def _next_commands(start: Start) -> Iterator[list[str]]:
    """The commands that show what was trained; for a LoRA, on the first cached sample, and that export it."""
    import pyarrow.compute as pc

    from qwen_cache.models.recorded import words_not_recorded
    from qwen_train.data.samples import Mixture
    from qwen_train.inference.decode import not_decoded
    from qwen_train.run import found_latents

    out, config = str(start.out), start.config
    if not_decoded(found_latents(start.out)):
        yield ["qwen-train", "decode", out, *words_not_recorded(config.model, ("revision", "vae"))]
    if config.train.method != "lora":
        return
    if isinstance(start.samples, Mixture):
        cache = start.samples.caches[0]
        name = cache.row(0).name
        is_one = pc.sum(pc.equal(cache.table["name"], name)).as_py() == 1
        sample = ["--from-cache", str(cache.folder), "--key", name if is_one else cache.table["key"][0].as_py()]
        model = words_not_recorded(config.model, ("revision", "transformer", "vae"))
        yield ["qwen-train", "predict", *sample, "--lora", out, *model]
    name = start.out.resolve().name
    if config.train.lora.type == "oft":  # which ComfyUI computes in another way
        model = words_not_recorded(config.model, ("revision", "transformer"))
        yield ["qwen-train", "export", out, "--to", "merged", "--out", f"{name}-merged", *model]
    else:
        yield ["qwen-train", "export", out, "--to", "comfyui", "--out", f"{name}.safetensors"]


def print_kept(config: Config, fresh: Config, path: Path | None) -> None:
    """Print the settings of a resumed run that differ from the settings file, and those that the file does not have."""
    from qwen_cache.settings.load import CONFIG_NAME
    from qwen_train.run import named_in

    file = path or Path(CONFIG_NAME)
    if not file.is_file():
        return
    own, new = config.flat(), fresh.flat()
    chosen = {name for name in ("train.layout", "train.compile") if new[name] == "auto"}
    kept = [name for name in own if own[name] != new[name] and name not in chosen]
    if named := named_in(file, kept):
        values = ", ".join(f"{name} {own[name]} (not {new[name]})" for name in named)
        text = f"this run's settings are kept, not those of {verbatim(file)}: {verbatim(values)}"
        console().print(f"{text}; --config {verbatim(file)} applies the file")
    if others := [name for name in kept if name not in named]:
        values = ", ".join(f"{name} {own[name]}" for name in others)
        text = f"this run's settings are kept, which {verbatim(file)} does not have: {verbatim(values)}"
        console().print(f"{text}; --set changes them")
