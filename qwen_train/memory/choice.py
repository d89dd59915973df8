"""The choice of how a model is held in memory: the fastest candidate that fits a machine, and the next best.

A candidate is a value for each setting of `CHOSEN`, and whether compiled blocks keep their attention. All are in one
list (`candidates`); `refusal` says why settings cannot be combined, by the checks of a run. Memory is predicted
(`prediction.py`), seconds are computed (`cost.py`). `qwen-train plan --fit`, `train.memory: auto`,
`train.gradient_checkpointing: auto` and `train.compile: auto` differ only in the settings that are left open. What
changes the result, a quantisation and the table of the modulation, is in the list only where the caller allows it.
Imports torch only for what is not remembered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from qwen_cache.errors import ConfigError, ModelError
from qwen_cache.models.hardware import ON_DEVICE, Kind, piece_sizes
from qwen_cache.settings.load import Config
from qwen_train.lora.files import check_adapter
from qwen_train.memory.cost import CARDS, Way, Work, step_seconds
from qwen_train.memory.prediction import (
    ACCELERATOR,
    FRAGMENTATION,
    Memory,
    attention_bytes,
    block_bytes,
    changed,
    in_parts,
    input_bytes,
    predict_memory,
)
from qwen_train.memory.sizes import SampleSize
from qwen_train.model.combinations import check_combination, kind_of, may_compile, with_layout

QUANTISATION, TABLE, OFFLOAD = "model.quantization", "train.tabulated_modulation", "train.offload_blocks"
ACTIVATIONS, CHECKPOINTING = "train.offload_activations", "train.gradient_checkpointing"
COMPILE, FSDP = "train.compile", "train.fsdp"
CHOSEN = (QUANTISATION, TABLE, OFFLOAD, ACTIVATIONS, CHECKPOINTING, COMPILE, FSDP)
"""The settings of a candidate."""
KINDS: tuple[Kind, ...] = ("none", "int8", "int8_convrot", "fp8_w8a8", "nf4")
"""The quantisations that are compared; fp8 takes the bytes and the time of int8, with three times its error."""
BESIDE_OFFLOAD = 6
"""The parts of all blocks in which recomputed ones are counted beside offloaded blocks; else each block counts."""
INPUTS_ON_DEVICE = 4
"""Recomputed blocks whose inputs are on the device at once with offload_activations, as a step on "meta" shows."""


@dataclass(frozen=True)
class Machine:
    """The machine to choose for."""

    card: str
    """A row of `CARDS`."""
    memory: float
    """Bytes of each GPU that a step may take."""
    host_memory: float | None = None
    """Bytes of host memory that each process may take for what it offloads; None: any."""
    gpus: int = 1


@dataclass(frozen=True)
class Open:
    """The values that a setting of `CHOSEN` may have; one that is missing here stays as it is set."""

    values: dict[str, tuple[Any, ...]]

    @classmethod
    def of_plan(cls, settings: Config, machine: Machine, transformer: dict[str, Any]) -> Open:
        """Everything that is at its default, for `plan --fit`, which proposes and changes nothing."""
        default, given = Config().flat(), settings.flat()
        is_frozen = settings.train.method == "lora"
        whole = is_frozen and not transformer.get("quantization_config")
        tabulated = (False, True) if is_frozen else (False,)
        every: dict[str, tuple[Any, ...]] = {QUANTISATION: KINDS if whole else ("none",), TABLE: tabulated}
        every |= cls.same_result(machine, compiles=may_compile(settings.train)).values
        return cls({name: values for name, values in every.items() if given[name] in (default[name], "auto")})

    @classmethod
    def same_result(cls, machine: Machine, *, compiles: bool) -> Open:
        """Everything that leaves the result the same, but for the order of sums: for train.memory=auto."""
        return cls(
            {
                OFFLOAD: ("any",),
                ACTIVATIONS: (False, True),
                CHECKPOINTING: ("any",),
                COMPILE: (True, False) if compiles else (False,),
                FSDP: (False, True) if machine.gpus > 1 else (False,),
            }
        )

    @classmethod
    def of_run(cls, settings: Config, machine: Machine, compiles: tuple[Any, ...], *, is_new: bool = True) -> Open:
        """The settings that a run chooses: with train.memory=auto all that leaves the result the same, and for a new
        one the quantisations that it may take; else what is `auto` itself. `compiles` are the values of train.compile.
        """
        train, chosen = settings.train, {COMPILE: compiles}
        if train.memory == "manual":
            return cls(chosen)
        if train.method == "lora" and is_new:
            chosen[QUANTISATION] = tuple(dict.fromkeys((settings.model.quantization, *train.memory_quantization)))
        return cls({**cls.same_result(machine, compiles=True).values, **chosen})


@dataclass(frozen=True)
class Candidate:
    """A way to hold the model, with what it takes."""

    settings: dict[str, Any]
    """The values of `CHOSEN`."""
    recomputed: int
    """Blocks that are recomputed in the backward pass."""
    keeps_attention: bool
    """True if they keep the output of their attention, which is for compiled blocks."""
    memory: int
    """Bytes of each GPU at the peak."""
    host_memory: int
    """Bytes of what each process offloads, pinned."""
    seconds: float
    """The time of a step, in which each GPU trains a batch; computed."""

    def fits(self, machine: Machine) -> bool:
        on_host = machine.host_memory is None or self.host_memory <= machine.host_memory
        return self.memory <= machine.memory and on_host

    @property
    def kind(self) -> tuple[Any, ...]:
        """Candidates of one kind differ in numbers of blocks, in offloaded activations, and in what is compiled."""
        given = self.settings
        return (given[QUANTISATION], given[TABLE], given[OFFLOAD] > 0, given[FSDP])

    def changes(self, settings: Config) -> dict[str, Any]:
        """The values that differ from `settings`, but for what train.compile=auto decides in the same way."""
        given = {name: value_of(settings, name) for name in self.settings}
        as_auto = given[COMPILE] == "auto" and not (self.settings[OFFLOAD] and self.settings[COMPILE])
        names = [name for name in self.settings if name != COMPILE or not as_auto]
        return {name: self.settings[name] for name in names if self.settings[name] != given[name]}

    def is_exact(self, settings: Config) -> bool:
        """True if it leaves the result of `settings` the same, but for the order of sums."""
        return not {QUANTISATION, TABLE} & self.changes(settings).keys()

    def words(self, settings: Config) -> str:
        """The settings to change, in words."""
        changes = self.changes(settings).items()
        return " ".join(f"{name}={json.dumps(value)}" for name, value in changes).replace('"', "") or "as it is set"


def value_of(settings: Config, name: str) -> Any:
    """The value of a setting by its dotted name."""
    section, key = name.split(".")
    return getattr(getattr(settings, section), key)


# ---- one candidate ---------------------------------------------------------------------------------------------------


def refusal(settings: Config, transformer: dict[str, Any], processes: int = 1) -> str:
    """Why a run refuses settings on this config.json; "" if it does not."""
    try:
        check_adapter(settings, transformer)
        check_combination(settings, transformer, processes)
    except (ConfigError, ModelError) as error:
        return error.what
    return ""


class Prediction:
    """The memory of a step by the number of blocks that are recomputed, offloaded, and sharded.

    Between its two ends, all blocks recomputed and none, memory is linear in them. What is offloaded is subtracted: it
    is not measured for each number.
    """

    def __init__(
        self,
        transformer: dict[str, Any],
        settings: Config,
        batch: Sequence[SampleSize],
        image: SampleSize | None,
    ) -> None:
        """`settings` with the quantisation and the table of the candidates."""
        whole = {OFFLOAD: 0, ACTIVATIONS: False, CHECKPOINTING: True, COMPILE: False, FSDP: False}
        self.transformer, self.batch, self.image = transformer, batch, image
        self.settings = with_layout(changed(settings, whole), ACCELERATOR)
        self.layers = int(transformer["num_layers"])
        self.block = block_bytes(transformer, self.settings)
        self.attention = attention_bytes(transformer, self.settings, batch)
        self.inputs = input_bytes(transformer, self.settings, batch)
        self.least = self._of(True)

    def _of(self, checkpointing: bool) -> Memory:
        settings = changed(self.settings, {CHECKPOINTING: checkpointing})
        return predict_memory(self.transformer, settings, self.batch, image=self.image)

    @cached_property
    def most(self) -> int:
        """The total if no block is recomputed."""
        return self._of(False).total

    def total(
        self,
        recomputed: int,
        offloaded: int = 0,
        processes: int = 1,
        *,
        keeps_attention: bool = False,
        keeps_inputs: bool = True,
    ) -> int:
        """Bytes on each device."""
        total = float(self.least.total)
        if recomputed < self.layers:  # beside the one that is being recomputed
            more = self.most - self.least.total
            total += more * (self.layers - recomputed) / max(1, self.layers - 1) if recomputed else more
        total += recomputed * self.attention if keeps_attention else 0
        away = max(0, offloaded - ON_DEVICE) * self.block
        away += 0 if keeps_inputs else max(0, recomputed - INPUTS_ON_DEVICE) * self.inputs
        if processes > 1:
            whole = replace(self.least, reserved=0)
            away += whole.total - in_parts(whole, self.transformer, self.settings, self.batch, processes).total
        return int(total - (1 + FRAGMENTATION) * away)

    def on_host(self, offloaded: int, inputs: int) -> int:
        """Bytes of the offloaded blocks of a process, and of the inputs of `inputs` blocks."""
        blocks = offloaded * sum(piece_sizes(self.block)) if offloaded else 0
        return blocks + (inputs * sum(piece_sizes(self.inputs)) if inputs else 0)


# ---- all candidates --------------------------------------------------------------------------------------------------


def candidates(
    transformer: dict[str, Any],
    settings: Config,
    batch: Sequence[SampleSize],
    machine: Machine,
    left_open: Open,
    image: SampleSize | None = None,
) -> Iterator[Candidate]:
    """Every candidate that a run does not refuse, for its largest batch and image.

    Raises ConfigError or ModelError if none is left, with the reason of the first one.
    """
    settings, card = with_layout(settings, ACCELERATOR), CARDS[machine.card]
    flat, layers, work = settings.flat(), int(transformer["num_layers"]), Work.of(transformer, settings, batch)
    values = {name: left_open.values.get(name, (flat[name],)) for name in CHOSEN}
    reasons, count = list[str](), 0
    for quantisation, table in product(values[QUANTISATION], values[TABLE]):
        weights = changed(settings, {QUANTISATION: quantisation, TABLE: table})
        is_plain = {OFFLOAD: 0, ACTIVATIONS: False, CHECKPOINTING: True, COMPILE: False, FSDP: False}
        if reason := refusal(changed(weights, is_plain), transformer):
            reasons.append(reason)
            continue
        kind = kind_of(transformer, weights)
        if kind in ("int8_convrot", "fp8_w8a8") and kind not in card.in_8_bits and quantisation != flat[QUANTISATION]:
            reasons.append(f"{machine.card} is not faster with {kind}")
            continue
        predicted: Prediction | None = None
        for compiled, fsdp, activations in product(values[COMPILE], values[FSDP], values[ACTIVATIONS]):
            processes = machine.gpus if fsdp else 1
            for offload, checkpointing, recomputed in _blocks(values[OFFLOAD], values[CHECKPOINTING], layers):
                chosen = {
                    QUANTISATION: quantisation,
                    TABLE: table,
                    OFFLOAD: max(offload),
                    ACTIVATIONS: activations,
                    CHECKPOINTING: checkpointing,
                    COMPILE: compiled,
                    FSDP: fsdp,
                }
                is_part = checkpointing == "auto"  # which a run turns into a number of blocks
                held = changed(weights, {**chosen, CHECKPOINTING: 2} if is_part else chosen)
                if reason := refusal(held, transformer, machine.gpus):
                    reasons.append(reason)
                    continue
                predicted = predicted or Prediction(transformer, weights, batch, image)
                inputs = max(0, recomputed - 1) if activations else 0  # those of the last block stay
                for blocks, keeps in product(offload, (False, True) if compiled and recomputed else (False,)):
                    way = Way(recomputed, keeps, blocks, inputs * predicted.inputs, processes)
                    count += 1
                    memory = predicted.total(
                        recomputed, blocks, processes, keeps_attention=keeps, keeps_inputs=not activations
                    )
                    yield Candidate(
                        {**chosen, OFFLOAD: blocks},
                        recomputed,
                        keeps,
                        memory,
                        predicted.on_host(blocks, inputs),
                        step_seconds(transformer, held, work, way, card, kind, predicted.block),
                    )
    if not count:
        raise ConfigError("no setting can be combined with these", found=next(iter(reasons), None), do="change them")


def _blocks(
    offload: Sequence[Any], checkpointing: Sequence[Any], layers: int
) -> Iterator[tuple[Sequence[int], Any, int]]:
    """The numbers of offloaded blocks, a value of gradient_checkpointing that goes with them, and the number of blocks
    that it recomputes. Memory is saved from one offloaded block more than stay on the device."""
    numbers = (0, *range(ON_DEVICE + 1, layers + 1)) if offload == ("any",) else tuple(offload)
    is_open = checkpointing in (("any",), ("auto",))
    for of_kind in ([each for each in numbers if not each], [each for each in numbers if each]):
        if of_kind and is_open:
            counts = {layers * part // BESIDE_OFFLOAD for part in range(BESIDE_OFFLOAD + 1)}
            for count in sorted(counts) if of_kind[0] else range(layers + 1):
                yield of_kind, {0: False, layers: True}.get(count, "auto"), count
        elif of_kind:
            yield from ((of_kind, value, _count(value, layers)) for value in checkpointing)


def _count(setting: Any, layers: int) -> int:
    """The blocks that a value of gradient_checkpointing recomputes."""
    every = int(setting)
    return -(-layers // every) if every else 0


# ---- the choice ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The fastest candidates that fit, the fastest of each kind, best first; and the one that takes least."""

    best: list[Candidate]
    nearest: Candidate


CLOSE = 1.02
"""Times that differ by less count as equal: those of the steps in docs/gpu/ vary by as much."""


def choose(found: Collection[Candidate], settings: Config, machine: Machine) -> Choice:
    """Order `found`, which has one candidate or more. Of those that are as fast, one that leaves the result the same
    comes first, then the one that takes less host memory, that recomputes less, and that takes less memory."""
    fitting = [each for each in found if each.fits(machine)]
    fastest = min((each.seconds for each in fitting), default=1.0)

    def order(each: Candidate) -> tuple[Any, ...]:
        slower = int(math.log(each.seconds / fastest, CLOSE)) if fitting else 0
        again = each.recomputed, not each.keeps_attention
        return slower, not each.is_exact(settings), each.host_memory, *again, each.memory

    best: dict[tuple[Any, ...], Candidate] = {}
    for each in sorted(fitting, key=order):
        best.setdefault(each.kind, each)
    nearest = min(found, key=lambda each: (not replace(each, memory=0).fits(machine), each.memory, order(each)))
    return Choice(list(best.values()), nearest)
