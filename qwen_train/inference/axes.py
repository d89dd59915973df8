"""`--grid` of `predict`: one axis or two, and the cells between them, found and checked without torch.

An axis replaces the setting of its name. `lora_weight` and `checkpoint` vary the single `--lora`: its weight, of which
0 is without it, and the training step in the folder of a run. Refused: an unknown axis, with the nearest; an axis or a
value given twice; a value that its setting refuses; and an axis of something that is not there: of no LoRA or of
several, of a step without a checkpoint, of guidance without a negative prompt, of steps beside `--sigmas`.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen_cache.errors import ConfigError
from qwen_cache.settings.given import Given
from qwen_cache.settings.load import overridden
from qwen_cache.settings.sections import PredictConfig
from qwen_train.lora.files import WEIGHTS_NAME, WeightedLora, find_lora, parse_lora, split_weight
from qwen_train.run_folder import checkpoints

LORA_WEIGHT, CHECKPOINT = "lora_weight", "checkpoint"
OF_LORA = (LORA_WEIGHT, CHECKPOINT)
SETTINGS = ("num_inference_steps", "true_cfg_scale", "seed")
"""Axes that are settings of `predict`."""
AXES = (*OF_LORA, *SETTINGS)
FINAL = "final"
"""The checkpoint that is the finished LoRA."""
MOST_VALUES = 20
"""Of an axis: many programs cannot show a larger image of all cells."""

Value = int | float | str


@dataclass(frozen=True)
class Axis:
    """A name of AXES and its values: numbers, or `final`."""

    name: str
    values: tuple[Value, ...]

    def titles(self) -> list[str]:
        """Each value with the name, such as `lora_weight=0.5`."""
        return [f"{self.name}={value}" for value in self.values]


@dataclass(frozen=True)
class Cell:
    """What one image is generated with."""

    values: Mapping[str, Value]
    """By axis, in the order of the axes."""
    config: PredictConfig
    loras: tuple[WeightedLora, ...]

    def name(self, stem: str) -> str:
        """The name of its file without `.png`, such as `out-lora_weight=0.5`."""
        return "-".join([stem, *(f"{axis}={value}" for axis, value in self.values.items())])


def parse_axes(texts: Sequence[str], config: PredictConfig) -> list[Axis]:
    """The axes of the texts `AXIS=V1,V2,…`, columns before rows; `grid_cells` checks that checkpoints exist."""
    if len(texts) > 2:
        raise ConfigError("a grid has columns and rows", where="--grid", expected="one or two axes", found=len(texts))
    axes: list[Axis] = []
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals:
            raise ConfigError("--grid takes AXIS=V1,V2,…", expected="such as seed=0,1,2", found=text)
        if name not in AXES:
            near = [axis for axis in AXES if name and name in axis] or difflib.get_close_matches(name, AXES, n=1)
            do = f"did you mean {near[0]}?" if near else None
            raise ConfigError("unknown axis", where="--grid", expected=" or ".join(AXES), found=name, do=do)
        if name in (axis.name for axis in axes):
            raise ConfigError("this axis is given twice", where="--grid", found=name, do="list all its values in one")
        axes.append(Axis(name, _values(name, values.split(","), config)))
    return axes


def _values(name: str, texts: Sequence[str], config: PredictConfig) -> tuple[Value, ...]:
    values = [_value(name, text.strip(), config) for text in texts]
    twice = [value for value in values if values.count(value) > 1]
    if twice or len(values) > MOST_VALUES:
        what = "a value is given twice" if twice else "too many values"
        expected = None if twice else f"at most {MOST_VALUES}"
        raise ConfigError(what, where=f"--grid {name}", expected=expected, found=twice[0] if twice else len(values))
    return tuple(values)


def _value(name: str, text: str, config: PredictConfig) -> Value:
    """A value of the axis, written in one way: 0.5 for 0.50, 1 for 1.0."""
    where = f"--grid {name}"
    if name == CHECKPOINT:
        if text == FINAL or (text.isascii() and text.isdigit()):
            return text if text == FINAL else int(text)
        raise ConfigError("not a checkpoint", where=where, expected=f"a training step, or {FINAL}", found=text or "''")
    if name == LORA_WEIGHT:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError("not a valid value", where=where, expected="a number", found=text or "''")
    else:
        number = getattr(_with(config, name, text), name)
    return int(number) if number == int(number) else number


def _with(config: PredictConfig, name: str, value: Value) -> PredictConfig:
    """The settings with another one; ConfigError if it is not valid."""
    given = Given(f"--grid {name}", f"predict.{name}", value)
    return overridden({"predict": config.model_dump(exclude_none=True)}, given=[given]).predict


# ---- cells -----------------------------------------------------------------------------------------------------------


def grid_cells(axes: Sequence[Axis], config: PredictConfig, loras: Sequence[str]) -> list[Cell]:
    """The cells, row by row; `loras` are the values of `--lora`.

    Raises ConfigError for an axis of something that is not there, TrainError for a path without a LoRA.
    """
    names = {axis.name for axis in axes}
    _check_sampling(names, config)
    files = _varied_files(axes, loras) if names & set(OF_LORA) else {}
    fixed = [] if files else [parse_lora(text) for text in loras]
    weight = split_weight(loras[0])[1] if files else 1.0
    cells = []
    for combination in itertools.product(*(axis.values for axis in reversed(axes))):
        values = dict(zip((axis.name for axis in axes), reversed(combination), strict=True))
        own = config
        for name in SETTINGS:
            own = _with(own, name, values[name]) if name in values else own
        varied = (
            [WeightedLora(files[values.get(CHECKPOINT, FINAL)], float(values.get(LORA_WEIGHT, weight)))]
            if files
            else []
        )
        cells.append(Cell(values, own, () if values.get(LORA_WEIGHT) == 0 else (*fixed, *varied)))
    return cells


def _check_sampling(names: set[str], config: PredictConfig) -> None:
    """Raise ConfigError for an axis that would make no difference."""
    if "true_cfg_scale" in names and config.negative_prompt is None:
        what = "without a negative prompt there is nothing to guide away from"
        raise ConfigError(what, where="--grid true_cfg_scale", do='give one: --negative-prompt " "')
    if "num_inference_steps" in names and config.sigmas is not None:
        what = "predict.sigmas are the noise levels, so the number of steps would be ignored"
        raise ConfigError(what, where="--grid num_inference_steps", do="leave one of them out")


def _varied_files(axes: Sequence[Axis], loras: Sequence[str]) -> dict[Value, Path]:
    """The files of the LoRA whose weight or step is varied: by checkpoint, or the one that --lora names as `final`."""
    names = [axis.name for axis in axes if axis.name in OF_LORA]
    if len(loras) != 1:
        found = "no --lora" if not loras else f"{len(loras)} of them"
        raise ConfigError(
            "this axis is about one LoRA", where=f"--grid {names[0]}", expected="--lora PATH", found=found
        )
    path, weight = split_weight(loras[0])
    if LORA_WEIGHT in names and path != loras[0]:
        found = f"--lora …:{weight:g} and --grid {LORA_WEIGHT}"
        raise ConfigError("the weight is given twice", where=path, found=found, do="leave one of them out")
    steps = next((axis.values for axis in axes if axis.name == CHECKPOINT), None)
    return {FINAL: find_lora(Path(path))} if steps is None else _of_checkpoints(Path(path), steps)


def _of_checkpoints(folder: Path, steps: Sequence[Value]) -> dict[Value, Path]:
    """The LoRA of each checkpoint of a run; ConfigError, which lists those that exist, if one of them does not."""
    where = f"--grid {CHECKPOINT}"
    if not folder.is_dir():
        raise ConfigError("checkpoints are in the folder of a run", where=where, found=folder, do="name it with --lora")
    there: dict[Value, Path] = dict(checkpoints(folder))
    if (folder / WEIGHTS_NAME).is_file():
        there[FINAL] = folder
    if missing := [step for step in steps if step not in there]:
        known = ", ".join(map(str, there)) or "none in this folder"
        what = f"{folder} has no such checkpoint"
        raise ConfigError(what, where=where, expected=known, found=", ".join(map(str, missing)))
    return {step: find_lora(there[step]) for step in steps}
