"""Micro-batches of one kind of work for the copies of an encoder, each on its own device.

The work items and their order decide what makes a batch; timing never does. The memory of a GPU decides how many items
it takes at once: the first item runs by itself and is measured, and after an out-of-memory error the limit is half of
what failed. Lanes on one device work at the same time, each on a stream of its own; work to be measured, and an item
that did not fit, wait until they have the device alone. An item that does not fit then is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Condition
from typing import Any, Generic, Protocol, TypeVar

import torch

from qwen_cache.errors import DeviceError
from qwen_cache.models.devices import device_module, new_stream, on_stream, reports_memory

Item = TypeVar("Item")
Result = TypeVar("Result")
Takes = TypeVar("Takes", contravariant=True)
Gives = TypeVar("Gives", covariant=True)
MEMORY_FRACTION = 0.8  # of the free memory, for the predicted peak of a batch: other shapes run other kernels


class Encoder(Protocol[Takes, Gives]):
    """The interface of an encoder that a lane uses."""

    device: torch.device

    def encode(self, items: Sequence[Takes], /) -> Sequence[Gives]: ...

    # One that computes what does not fit in another way also has `encode_beside`, which does not: the work of another
    # lane on the device may be why.


@dataclass(frozen=True)
class WorkItem(Generic[Item, Result]):
    """The inputs to wait for, the encoder's item to make of them, its cost, and where the result goes."""

    inputs: Future[Any]
    make: Callable[[Any], Item]
    cost: int
    result: Future[Result] = field(default_factory=Future)


@dataclass
class Batch(Generic[Item, Result]):
    """Work items to encode together; the first one was submitted as number `first`."""

    first: int
    items: list[WorkItem[Item, Result]] = field(default_factory=list)
    cost: int = 0


class MemoryBudget:
    """The cost that fits into a device's memory at once, in the unit of the work items. Only GPUs are measured."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_measured = device, reports_memory(device)
        self.limit = 0.0 if self.is_measured else float("inf")
        self._bytes_per_unit, self._largest = 1e-9, 0

    def take(self, costs: Sequence[int]) -> int:
        """How many of `costs`, from the first on, fit together; at least one."""
        return max(1, sum(total <= self.limit for total in accumulate(costs)))

    def is_largest(self, cost: int) -> bool:
        """Whether work of this cost is to be measured: any that is larger than all before."""
        return self.is_measured and cost > self._largest

    @contextmanager
    def measuring(self, cost: int, lanes: int = 1) -> Iterator[None]:
        """Set the limit from the peak memory of work of this cost; other use of the device counts as part of it.

        Lanes that share the device get equal parts of what is free.
        """
        if not self.is_measured:
            yield
            return
        counters = device_module(self.device)
        counters.reset_peak_memory_stats(self.device)
        before = counters.memory_allocated(self.device)
        yield
        used = counters.max_memory_allocated(self.device) - before
        cached = counters.memory_reserved(self.device) - counters.memory_allocated(self.device)
        free = counters.mem_get_info(self.device)[0] + cached
        self._bytes_per_unit = max(self._bytes_per_unit, used / cost)
        self.limit = MEMORY_FRACTION * free / lanes / self._bytes_per_unit
        self._largest = max(self._largest, cost)

    def ran_out(self, cost: int) -> None:
        """Halve the limit after work of this cost ran out of memory."""
        self._bytes_per_unit *= 2
        self.limit = cost / 2


class Turns:
    """A readers-writer lock of the lanes of one device: their work shares the device, or has it alone."""

    def __init__(self) -> None:
        self.lanes = 0
        self._changed = Condition()
        self._shared, self._alone = 0, False

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._shared += 1
        try:
            yield
        finally:
            with self._changed:
                self._shared -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing begins from now on; what has begun ends first."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._alone = True
            self._changed.wait_for(lambda: not self._shared)
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


@dataclass(frozen=True)
class LaneState:
    """How far one copy of an encoder is."""

    name: str
    """Such as `vae-0`."""
    device: str
    done: int
    """Images that the VAE has encoded, or prompts that the text encoder has."""
    busy: float
    """The share of the time since it was loaded in which it encoded."""


class Lane(Generic[Item, Result]):
    """One copy of an encoder, and the thread that feeds it; lanes of one device have their `turns` in common."""

    def __init__(self, encoder: Encoder[Item, Result], name: str, turns: Turns | None = None) -> None:
        self.encoder, self.thread, self.memory = encoder, ThreadPoolExecutor(1, name), MemoryBudget(encoder.device)
        self.turns, self._stream = turns or Turns(), new_stream(encoder.device)
        self.turns.lanes += 1
        self.name = name
        self.batches = self.done = 0
        """Batches that were encoded, and work items that are finished."""
        self._sent = 0
        self._began, self._busy = time.monotonic(), 0.0

    @property
    def load(self) -> int:
        """The number of its work items that are not finished."""
        return self._sent - self.done

    @property
    def state(self) -> LaneState:
        busy = self._busy / max(time.monotonic() - self._began, 1e-6)
        return LaneState(self.name, str(self.encoder.device), self.done, busy)

    def send(self, batch: Batch[Item, Result]) -> None:
        def end(work: Future[None]) -> None:
            self.done += len(batch.items)
            for item in batch.items:
                if work.cancelled():
                    item.result.cancel()
                elif not item.result.done():
                    item.result.set_exception(work.exception())

        self._sent += len(batch.items)
        self.thread.submit(self._encode, batch.items).add_done_callback(end)

    def _encode(self, batch: Sequence[WorkItem[Item, Result]]) -> None:
        items = [item for item in batch if _is_ready(item)]
        while items:
            some = items[: self.memory.take([item.cost for item in items])]
            try:
                results = self._try([item.make(item.inputs.result()) for item in some], sum(item.cost for item in some))
            except Exception as error:
                if len(some) > 1:
                    raise
                some[0].result.set_exception(error)  # the others of the batch may fit
                items = items[1:]
                continue
            self.batches += 1
            if results is not None:
                for item, result in zip(some, results, strict=True):
                    item.result.set_result(result)
                items = items[len(some) :]

    def _try(self, items: Sequence[Item], cost: int) -> Sequence[Result] | None:
        """The results; None if the device ran out of memory and fewer items must be tried.

        What did not fit beside the work of another lane is tried once more without it.
        """
        begins_alone = self.turns.lanes == 1 or self.memory.is_largest(cost)
        for alone in [True] if begins_alone else [False, True]:
            try:
                return self._results(items, cost, alone=alone)
            except torch.OutOfMemoryError as error:  # what it refers to is freed before the next attempt
                found = str(error).splitlines()[0]
        if len(items) > 1:
            self.memory.ran_out(cost)
            return None
        raise DeviceError(
            "a device has too little memory for one sample",
            found=found,
            do="close what else uses it, name another with --vae-device or --text-device, set cache.text_offload=true, "
            "or lower data.vae_image_size; encoded samples are kept",
        )

    def _results(self, items: Sequence[Item], cost: int, *, alone: bool) -> Sequence[Result]:
        """The encoder's results, which it returns on the host: then nothing of this stream is under way."""
        measured = self.memory.measuring(cost, self.turns.lanes) if alone else nullcontext()
        with self.turns.alone() if alone else self.turns.shared(), on_stream(self._stream), measured:
            encode, begin = self.encoder.encode, time.monotonic()
            if not alone and self.memory.is_measured:
                encode = getattr(self.encoder, "encode_beside", encode)
            try:
                return encode(items)
            finally:
                self._busy += time.monotonic() - begin


def _is_ready(item: WorkItem[Any, Any]) -> bool:
    """Wait for the inputs of an item; False if they failed, and then their error is its result."""
    if error := item.inputs.exception():
        item.result.set_exception(error)
    return error is None


class Batcher(Generic[Item, Result]):
    """Groups work items of one kind into batches that cost up to `limit`; each batch goes to the least loaded lane.

    An item with the same inputs as the item before it goes to the same lane. A batch waits until it is full, or until
    `send` says that it may wait no longer.
    """

    def __init__(self, lanes: Sequence[Lane[Item, Result]], limit: int) -> None:
        self.lanes, self.limit = lanes, limit
        self._growing: dict[Hashable, Batch[Item, Result]] = {}
        self._last: tuple[Future[Any] | None, Lane[Item, Result]] = (None, lanes[0])

    def submit(
        self, number: int, inputs: Future[Any], make: Callable[[Any], Item], *, kind: Hashable, cost: int
    ) -> Future[Result]:
        """The result of the work item with this number of submission. Items of one `kind` are batched together."""
        growing = self._growing.get(kind)
        if growing and growing.cost + cost > self.limit:
            self._send(kind)
        batch = self._growing.setdefault(kind, Batch(number))
        item: WorkItem[Item, Result] = WorkItem(inputs, make, cost)
        batch.items.append(item)
        batch.cost += cost
        if batch.cost >= self.limit:
            self._send(kind)
        return item.result

    def send(self, number: int) -> None:
        """Send every batch that has an item submitted up to `number`."""
        for kind in [kind for kind, batch in self._growing.items() if batch.first <= number]:
            self._send(kind)

    def _send(self, kind: Hashable) -> None:
        batch = self._growing.pop(kind)
        last_inputs, lane = self._last
        if batch.items[0].inputs is not last_inputs:
            lane = min(self.lanes, key=lambda lane: lane.load)
        lane.send(batch)
        self._last = batch.items[-1].inputs, lane
