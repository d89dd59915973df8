"""Terminal front end of `qwen-train run`: the checks first, then torch.

Of several processes only the main one prints. Each prints its own error; an error that several share is printed once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.settings.given import Given
from qwen_cache.settings.load import CONFIG_NAME, Config
from qwen_cache.terminal import FAILED, INTERRUPTED, console, print_done, print_json, verbatim
from qwen_train.run import METRICS_NAME, Launch, ToEncode, named_in, run_settings, silence_others
from qwen_train.training.start import Start, starting

SECONDS_TO_PRINT = 5
"""torchrun kills all processes as soon as one fails; so the others wait until the one with the error has printed it."""


def run_train(
    path: Path | None,
    assignments: Sequence[str] | None,
    given: Iterable[Given | None],
    *,
    resume: bool,
    encode_on_the_fly: bool,
    encode_at: str | None,
    as_json: bool,
) -> int:
    """Train, and print the path of the result; the exit code."""
    require("torch")
    given, launch = list(given), Launch.of_environment()
    silence_others(launch)
    with ExitStack() as held:
        checked: Start | Exception
        try:
            config, fresh = run_settings(path, assignments, given, resume=resume)
            print_kept(config, fresh, path)
            _refuse_unused_vae(given, config)
            encodes = encode_on_the_fly or encode_at is not None
            to_encode = ToEncode(config.data.source, encode_at) if encodes else None
            checked = held.enter_context(starting(config, launch, resume=resume, to_encode=to_encode))
        except Exception as error:
            if launch.decides_alone:
                raise
            checked = error  # raised once the processes are connected, so that one of them prints it
        return _train(checked, launch, as_json=as_json)


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
                print_result(result, checked.out, as_json=as_json)
    except EndedElsewhereError:
        time.sleep(SECONDS_TO_PRINT)
        return FAILED
    except KeyboardInterrupt:
        if launch.is_main:
            raise
        time.sleep(SECONDS_TO_PRINT)
        raise SystemExit(INTERRUPTED) from None
    return 0


def print_result(result: Path, out: Path, *, as_json: bool) -> None:
    """Print the path of the result; with `as_json` also the output folder and the last metrics."""
    from qwen_train.training.metrics import read_metrics

    if not as_json:
        print_done(result)
        return
    metrics = read_metrics(out / METRICS_NAME)
    print_json({"result": str(result), "output_dir": str(out), "metrics": metrics[-1] if metrics else {}})


def print_kept(config: Config, fresh: Config, path: Path | None) -> None:
    """Print the settings of a resumed run that differ from the settings file, and those that the file does not have."""
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
