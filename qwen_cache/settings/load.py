"""Reading settings: YAML within bounds, --set, options; an unknown key names the nearest known one."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from qwen_cache.errors import ConfigError, first_line
from qwen_cache.settings.given import Given
from qwen_cache.settings.sections import (
    CacheConfig,
    CaptionConfig,
    DataConfig,
    LoggingConfig,
    LrSchedulerConfig,
    MaskHeadConfig,
    ModelConfig,
    OptimizerConfig,
    PredictConfig,
    Section,
    ServeConfig,
    TrainConfig,
    ValidationConfig,
)
from qwen_cache.terminal import naming
from qwen_cache.text import expected_value, shell_line

# ---- yaml text -------------------------------------------------------------------------------------------------------
# YAML from a file or the command line, with bounds: also the qwen.yaml in a cache of somebody else is read.
#
# Plain values only, never objects. Anchors and aliases work, but count each time that they are used, so no text becomes
# larger than it looks. Refuses what is larger, deeper or longer than any settings, an alias of a value inside itself,
# and a key that is there twice, whose first value the YAML library would drop without a word.

MAX_BYTES = 1 << 20  # a file of all settings has 3 kB
MAX_NODES = 10_000  # keys and values, aliases expanded; all settings make 250, naming each layer for a LoRA 850
MAX_DEPTH = 32  # settings have five levels
MAX_DIGITS = 100  # of an integer; Python's own limit is 4,300, and it raises wherever a longer one is shown
INTEGER = "tag:yaml.org,2002:int"
MERGE = "tag:yaml.org,2002:merge"  # the key `<<`; two of them lose nothing
FIX = "simplify it; settings need nothing of this kind"
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's, where PyYAML was built with it: ten times as fast."""


def read_yaml(path: Path) -> Any:
    """The value of a file of YAML; OSError if it cannot be read, ConfigError as `parse_yaml`."""
    with naming(path), path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise _too_long(path)
    try:
        return parse_yaml(data.decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"this is not YAML: {error}", where=path) from None


def parse_yaml(text: str, where: object | None = None) -> Any:
    """The value of a YAML document; ConfigError, which names `where`, if it is not one within the bounds."""
    if len(text) > MAX_BYTES:
        raise _too_long(where)
    try:
        try:
            return _parse(text, where, LOADER)
        except (yaml.YAMLError, UnicodeEncodeError):  # PyYAML's own quotes the line, and reads a path that is no UTF-8
            return _parse(text, where, yaml.SafeLoader)
    except _BeyondError as error:
        raise ConfigError(f"the settings {error}", where=where, do=FIX) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"this is not YAML: {error}", where=where) from None
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:  # of int, datetime, …
        raise ConfigError(f"a value does not fit its YAML type: {first_line(error)}", where=where) from None


def assignment(name: str, value: Any) -> str:
    """`name=value` for --set: text as it is, if YAML reads it as the same text, else JSON."""
    with suppress(ConfigError):
        if isinstance(value, str) and parse_yaml(value) == value:
            return f"{name}={value}"
    return f"{name}={json.dumps(value, ensure_ascii=False)}"


def _parse(text: str, where: object, kind: Any) -> Any:
    """The value of a document within the bounds, by a loader of PyYAML."""
    _check_bounds(text, kind)
    loader = kind(text)
    node = loader.get_single_node()
    if node is None:
        return None
    _check_node(node, "", where)
    return loader.construct_document(node)


def _check_bounds(text: str, kind: Any) -> None:
    """_BeyondError for a text beyond the bounds, by its parts alone: no value is made."""
    count = 0
    opened: list[tuple[str | None, int]] = []  # anchors of what is not closed, and the count before it
    sizes: dict[str, int] = {}  # nodes in the value of each anchor, itself included, aliases expanded
    for event in yaml.parse(text, Loader=kind):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor:
                sizes[anchor] = count - before
        if not isinstance(event, yaml.NodeEvent):
            continue
        if len(opened) == MAX_DEPTH:
            raise _BeyondError(f"are nested more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in opened):
                raise _BeyondError(f"contain an alias inside its own value: *{event.anchor}")
            count += sizes.get(str(event.anchor), 0)
        else:
            if isinstance(event, yaml.CollectionStartEvent):
                opened.append((event.anchor, count))
            elif event.anchor:
                sizes[event.anchor] = 1
            count += 1
        if count > MAX_NODES:
            raise _BeyondError(f"have more than {MAX_NODES} values, with aliases expanded")


def _check_node(node: yaml.Node, name: str, where: object) -> None:
    """ConfigError for a key that is there twice in the value of `name`, or deeper in it; _BeyondError for an integer
    that is too long."""
    if isinstance(node, yaml.ScalarNode) and node.tag == INTEGER and len(node.value) > MAX_DIGITS:
        raise _BeyondError(f"contain an integer of {len(node.value)} digits; at most {MAX_DIGITS} are read")
    if isinstance(node, yaml.SequenceNode):
        for index, each in enumerate(node.value):
            _check_node(each, f"{name}[{index}]", where)
    if isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            inner = name
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                inner = f"{name}.{key.value}" if name else str(key.value)
                line, before = key.start_mark.line + 1, lines.get((key.tag, key.value))
                if before is not None:
                    found = f"line {line}" if line == before else f"lines {before} and {line}"
                    do = "write all that belongs to it under one of them, and remove the other"
                    raise ConfigError(f"{inner} is there twice", where=where, found=found, do=do)
                lines[key.tag, key.value] = line
            _check_node(key, name, where)
            _check_node(value, inner, where)


def _too_long(where: object) -> ConfigError:
    return ConfigError("the settings are too long", where=where, expected=f"at most {MAX_BYTES} bytes", do=FIX)


class _BeyondError(Exception):
    """A bound is exceeded."""


# ---- load ------------------------------------------------------------------------------------------------------------
# qwen.yaml: one file for both programs.
#
# Settings are named as in diffusers where it has them. An unknown key is an error that suggests the nearest known one.
# `--set a.b=value` and command options override the file; the result is saved beside every output. The old name of a
# setting is refused with the new one, but for files that an earlier version saved.

CONFIG_NAME = "qwen.yaml"


class Config(Section):
    """All of qwen.yaml."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    cache: CacheConfig = CacheConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: LrSchedulerConfig = LrSchedulerConfig()
    logging: LoggingConfig = LoggingConfig()
    validation: ValidationConfig = ValidationConfig()
    predict: PredictConfig = PredictConfig()
    mask_head: MaskHeadConfig = MaskHeadConfig()
    caption: CaptionConfig = CaptionConfig()
    serve: ServeConfig = ServeConfig()

    @property
    def validation_cache(self) -> str:
        """The folder or URL of the validation cache, which need not exist."""
        return self.validation.cache or f"{self.cache.path.rstrip('/')}/validation"

    def to_yaml(self) -> str:
        values = self.model_dump(mode="json")
        with suppress(UnicodeEncodeError):  # of a path that is no UTF-8
            text: str = yaml.dump(values, Dumper=DUMPER, sort_keys=False, allow_unicode=True)
            if "\\U" not in text:  # libyaml escapes emoji
                return text
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def load_config(
    path: Path | None, assignments: Sequence[str] | None = (), given: Iterable[Given | None] = (), **options: Any
) -> Config:
    """The settings of the file, overridden by `a.b=value`, overridden by options of the command line.

    Without `path` the file is qwen.yaml of the working directory, if it exists. `options` are dotted names with `__`
    for the dot. None means not given. Raises ConfigError, which says where the value was typed.
    """
    if path is None and Path(CONFIG_NAME).is_file():
        path = Path(CONFIG_NAME)
    return overridden(_read(path) if path else {}, str(path) if path else GIVEN, assignments, given, **options)


def load_saved(path: Path, assignments: Sequence[str] | None = (), given: Iterable[Given | None] = ()) -> Config:
    """`load_config` for the qwen.yaml of a run or a cache, which an earlier version may have written.

    It may be from other people, so a pipe is not waited for.
    """
    if path.exists() and not path.is_file():
        raise ConfigError("not a regular file", where=path)
    return overridden(_with_new_names(_read(path)), str(path), assignments, given)


def saved_settings(value: dict[str, Any], where: str) -> Config:
    """`load_saved` for settings that were already read from `where`."""
    return overridden(_with_new_names(value), where)


GIVEN = "the options given"


def overridden(
    value: dict[str, Any],
    where: str = GIVEN,
    assignments: Sequence[str] | None = (),
    given: Iterable[Given | None] = (),
    **options: Any,
) -> Config:
    """`load_config` for settings that were already read from `where`."""
    origins = _Origins(where)
    for assignment in assignments or ():
        name, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise ConfigError("--set takes section.key=value", found=assignment)
        _assign(value, name, _value_of(name, text), "--set")
        origins.assigned[name] = "--set"
    for each in given:
        if each is not None:
            _assign(value, each.key, each.value, each.option)
            origins.assigned[each.key] = each.option
    for name, option in options.items():
        if option is not None:
            _assign(value, name.replace("__", "."), option, origins.otherwise)
    for section, old, new in _old_names_in(value):
        name = f"{section}.{old}"
        raise ConfigError(f"{name} is called {section}.{new} now", where=origins.of(name))
    return _validate(value, origins)


@dataclass(frozen=True)
class _Origins:
    """The place at which each setting was typed."""

    otherwise: str
    assigned: dict[str, str] = field(default_factory=dict)

    def of(self, key: str) -> str:
        """The place of a setting: the last assignment to it or to a section around it, else the file."""
        names = list(reversed(self.assigned))
        near = (name for name in names if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}."))
        return next((self.assigned[name] for name in near), self.otherwise)


RENAMED = {
    "cache.attention": "cache.store_attention",
    "data.part": "data.slice",
    "logging.every_steps": "logging.logging_steps",
    "logging.tracker": "logging.report_to",
    "mask_head.base": "mask_head.base_channels",
    "mask_head.size": "mask_head.mask_size",
    "train.balanced_over": "train.balance_window",
    "train.loss_mean": "train.loss_reduction",
    "train.shuffle_window": "train.bucketing_window",
    "validation.every_steps": "validation.validation_steps",
    "validation.picture_steps": "validation.images_every_steps",
    "validation.pictures": "validation.num_images",
    "validation.samples": "validation.num_samples",
}
"""Names of settings in files that earlier versions saved, and today's."""
RENAMED_VALUES = {"train.loss_mean": {"samples": "per_sample", "tokens": "per_token"}}


def _with_new_names(value: dict[str, Any]) -> dict[str, Any]:
    """The settings of a saved file by today's names."""
    value = {name: dict(section) if isinstance(section, dict) else section for name, section in value.items()}
    for section, old, new in _old_names_in(value):
        setting = value[section].pop(old)
        names = RENAMED_VALUES.get(f"{section}.{old}", {})
        value[section][new] = names.get(setting, setting) if isinstance(setting, str) else setting
    return value


def _old_names_in(value: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The sections with a setting by an old name, that name, and today's."""
    names = [(*old.split("."), new.split(".")[1]) for old, new in RENAMED.items()]
    return [
        (section, old, new)
        for section, old, new in names
        if isinstance(value.get(section), dict) and old in value[section]
    ]


def parse_config(text: str) -> Config:
    """Settings from JSON, as `qwen-train run --encode-on-the-fly` passes them to `encode-worker`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"this is not JSON: {error}") from None
    return _validate(value if isinstance(value, dict) else {"": value}, _Origins("the settings given"))


def _read(path: Path) -> dict[str, Any]:
    try:
        value = read_yaml(path)
    except FileNotFoundError:
        raise ConfigError("no such file", where=path) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError("a mapping of sections is expected", where=path, found=type(value).__name__)
    return value


QUOTED = 1000  # characters of a value that an error repeats as it should be


def _value_of(name: str, text: str) -> Any:
    """The value of `--set name=text`."""
    where = f"--set {name}"
    try:
        return parse_yaml(text, where)
    except ConfigError as error:
        if error.do is not None or len(text) > QUOTED:
            raise
        quoted = shell_line(["--set", f"{name}={json.dumps(text, ensure_ascii=False)}"])
        raise ConfigError(error.fault, where=where, do=f"if it is text, put it in quotes: {quoted}") from None


def _assign(value: dict[str, Any], name: str, new: Any, where: str) -> None:
    *parents, last = name.split(".")
    for part in parents:
        value = value.setdefault(part, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{part} is not a section", where=where, found=name)
    value[last] = new


def _validate(value: Mapping[str, Any], origins: _Origins) -> Config:
    try:
        return Config.model_validate({key: {} if section is None else section for key, section in value.items()})
    except ValidationError as error:
        faults = error.errors()
        unknown = [each for each in faults if each["type"] == UNKNOWN]  # a misspelt name is missing, too
        if len(unknown) > 1:
            raise _unknown(unknown, origins) from None
        first, *others = (_error_of(each, origins) for each in unknown or faults)
        first.others = tuple(others)
        raise first from None


def _unknown(faults: Sequence[ErrorDetails], origins: _Origins) -> ConfigError:
    """The message for several unknown names, each with what may be meant."""
    errors = [_error_of(each, origins) for each in faults]
    places = {str(each.where) for each in errors}
    meant = (each.do if str(each.do).startswith("did you mean") else None for each in errors)
    names = (each.what.removeprefix("unknown key ") for each in errors)
    told = (f"{name} ({do})" if do else name for name, do in zip(names, meant, strict=True))
    return ConfigError(f"{len(faults)} unknown keys: {', '.join(told)}", where=", ".join(sorted(places)))


def _error_of(first: ErrorDetails, origins: _Origins) -> ConfigError:
    """The message for one fault; an option is named instead of the setting that it overrides."""
    parts = [str(part) for part in first["loc"]]
    key, value = ".".join(parts), first["input"]
    where = origins.of(key)
    if first["type"] == UNKNOWN:
        return ConfigError(f"unknown key {key}", where=where, do=_nearest(parts))
    what, expected, do = first["msg"], None, None
    if first["type"] == "model_type":
        what = "is a section, with settings of its own"
    elif (expected := expected_value(first)) is not None:
        what = "not a valid value"
    if first["type"] == "literal_error":
        near = difflib.get_close_matches(str(value), re.split(", | or ", expected or ""), n=1)
        do = f"did you mean {near[0]}?" if near else None
    name = f"{key}: " if where in ("--set", origins.otherwise) else ""
    found = "nothing" if value is None else value if isinstance(value, str) and value else repr(value)
    return ConfigError(f"{name}{what}", where=where, expected=expected, found=found, do=do)


UNKNOWN = "extra_forbidden"
"""Pydantic's type of a name that no setting has."""

OTHER_NAMES = {
    "optimizer.learning_rate": ("lr", "learningrate"),
    "train.max_steps": ("epochs", "num_epochs", "num_train_epochs", "max_train_epochs", "steps", "max_train_steps"),
    "train.lora.rank": ("rank", "dim", "network_dim", "lora_rank"),
    "train.lora.lora_alpha": ("alpha", "network_alpha"),
    "train.checkpointing_steps": ("save_every", "save_every_n_steps", "save_steps"),
    "train.output_dir": ("out", "output", "output_name"),
    "train.batch_size": ("train_batch_size",),
    "model.quantization": ("fp8", "fp8_base", "quantize"),
    "train.offload_blocks": ("blocks_to_swap",),
    "train.offload_activations": ("enable_activation_offloading", "gradient_checkpointing_cpu_offload"),
    "train.timestep_shift": ("discrete_flow_shift", "flow_shift"),
    "train.assistant_lora": ("assistant_lora_path",),
    "train.caches": ("teacher", "diff_output_preservation", "prior_preservation"),
    "train.caption_dropout": ("caption_dropout_rate",),
    "validation.prompts": ("sample_prompts", "samples"),
}
"""The names of settings in other trainers."""


def setting_named(name: str) -> str | None:
    """The setting that this name, or its name in another trainer, stands for alone; None if there is none."""
    meant = [key for key, names in OTHER_NAMES.items() if name in names]
    meant += [key for key in known_keys() if key.rpartition(".")[2] == name and key.count(".")]
    return meant[0] if meant and (len(meant) == 1 or meant[0] in OTHER_NAMES) else None


def _nearest(location: list[str]) -> str:
    """A suggestion for an unknown key: by its name in other trainers, else the most similar name in its section or
    another."""
    *section, last = (part for part in location if not part.isdigit())
    if meant := next((key for key, names in OTHER_NAMES.items() if last in names and key != ".".join(location)), None):
        return f"did you mean {meant}?"
    known = [key.split(".") for key in known_keys()]
    here = {key[-1]: ".".join(key) for key in known if key[:-1] == section}
    anywhere = {key[-1]: ".".join(key) for key in reversed(known) if key[0] != "mask_head"}
    for candidates, similarity in ((here, 0.6), (anywhere, 0.8)):
        if nearest := difflib.get_close_matches(last, candidates, n=1, cutoff=similarity):
            return f"did you mean {candidates[nearest[0]]}?"
    return "known here: " + ", ".join(sorted(here))


def known_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted name that qwen.yaml may contain, sections included."""
    names: list[str] = []
    for name, each in section.model_fields.items():
        names.append(prefix + name)
        for kind in (each.annotation, *get_args(each.annotation)):  # a section, or a list of them
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names += known_keys(kind, f"{prefix}{name}.")
    return names
