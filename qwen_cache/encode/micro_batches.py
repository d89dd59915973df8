"""One kind of work, done in batches by copies of an encoder, each on its own device.

Which pieces make a batch follows from the pieces and the order in which they come, never from timing. How many of them
a GPU takes at once follows from its memory: the first piece goes alone and is measured, and where memory runs out all
the same, half as many go from there on. A piece that does not fit alone is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

import torch

from qwen_cache.errors import DeviceError

Item = TypeVar("Item")
Result = TypeVar("Result")
Takes = TypeVar("Takes", contravariant=True)
Gives = TypeVar("Gives", covariant=True)
SHARE = 0.8  # of the free memory that a batch may be expected to take, since other shapes run other kernels


class Encoder(Protocol[Takes, Gives]):
    """What a lane needs of an encoder."""

    device: torch.device

    def encode(self, items: Sequence[Takes], /) -> Sequence[Gives]: ...


@dataclass(frozen=True)
class Piece(Generic[Item, Result]):
    """A piece of work: what it waits for, what it becomes then, what that costs, and where the result goes."""

    about: Future[Any]
    item: Callable[[Any], Item]
    cost: int
    result: Future[Result] = field(default_factory=Future)


@dataclass
class Batch(Generic[Item, Result]):
    """Pieces that are done together, the first of which came as number `begun`."""

    begun: int
    pieces: list[Piece[Item, Result]] = field(default_factory=list)
    cost: int = 0


class Room:
    """How much fits into the memory of a device at once, in the unit of the costs. Only GPUs are measured."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_measured = device, device.type == "cuda"
        self.most = 0.0 if self.is_measured else float("inf")
        self._bytes_per_unit = 1e-9

    def take(self, costs: Sequence[int]) -> int:
        """How many of these fit, from the first on; at least one."""
        return max(1, sum(total <= self.most for total in accumulate(costs)))

    @contextmanager
    def measuring(self, cost: int) -> Iterator[None]:
        """Learn from work that costs so much. What else happens on the device counts as if it belonged to it."""
        if not self.is_measured:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield
        used = torch.cuda.max_memory_allocated(self.device) - before
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + cached
        self._bytes_per_unit = max(self._bytes_per_unit, used / cost)
        self.most = SHARE * free / self._bytes_per_unit

    def ran_out(self, cost: int) -> None:
        """So much was too much."""
        self._bytes_per_unit *= 2
        self.most = cost / 2


class Lane(Generic[Item, Result]):
    """One copy of an encoder, and the thread that feeds it."""

    def __init__(self, encoder: Encoder[Item, Result], name: str) -> None:
        self.encoder, self.thread, self.room = encoder, ThreadPoolExecutor(1, name), Room(encoder.device)
        self._sent = self._done = 0

    @property
    def load(self) -> int:
        """How many pieces of work it has."""
        return self._sent - self._done

    def send(self, batch: Batch[Item, Result]) -> None:
        def end(work: Future[None]) -> None:
            self._done += len(batch.pieces)
            for piece in batch.pieces:
                if work.cancelled():
                    piece.result.cancel()
                elif not piece.result.done():
                    piece.result.set_exception(work.exception())

        self._sent += len(batch.pieces)
        self.thread.submit(self._do, batch.pieces).add_done_callback(end)

    def _do(self, batch: Sequence[Piece[Item, Result]]) -> None:
        pieces = [piece for piece in batch if _is_ready(piece)]
        while pieces:
            some = pieces[: self.room.take([piece.cost for piece in pieces])]
            results = self._try([piece.item(piece.about.result()) for piece in some], sum(piece.cost for piece in some))
            if results is not None:
                for piece, result in zip(some, results, strict=True):
                    piece.result.set_result(result)
                pieces = pieces[len(some) :]

    def _try(self, items: Sequence[Item], cost: int) -> Sequence[Result] | None:
        """The results; None where fewer have to be tried."""
        try:
            with self.room.measuring(cost):
                return self.encoder.encode(items)
        except torch.OutOfMemoryError as error:
            if len(items) == 1:
                raise DeviceError(
                    "a device has too little memory for one sample",
                    found=str(error).splitlines()[0],
                    do="close what else uses it, name another with --vae-device or --text-device, or lower "
                    "data.vae_image_size; what is encoded is kept",
                ) from None
        self.room.ran_out(cost)
        return None


def _is_ready(piece: Piece[Any, Any]) -> bool:
    """Wait for what a piece is about; False where that failed, which then is its own result."""
    if error := piece.about.exception():
        piece.result.set_exception(error)
    return error is None


class Batcher(Generic[Item, Result]):
    """Makes batches of pieces of one kind, up to a cost of `most`, and gives each to the lane that has the least to do.

    A piece about the same as the one before goes to the lane which has that. A batch waits for more until it is full,
    or until `send` is told that its time has come.
    """

    def __init__(self, lanes: Sequence[Lane[Item, Result]], most: int) -> None:
        self.lanes, self.most = lanes, most
        self._growing: dict[Hashable, Batch[Item, Result]] = {}
        self._last: tuple[Future[Any] | None, Lane[Item, Result]] = (None, lanes[0])

    def submit(
        self, number: int, about: Future[Any], item: Callable[[Any], Item], *, kind: Hashable, cost: int
    ) -> Future[Result]:
        """The result of a piece of work that comes as `number`. Pieces of one `kind` go together."""
        growing = self._growing.get(kind)
        if growing and growing.cost + cost > self.most:
            self._send(kind)
        batch = self._growing.setdefault(kind, Batch(number))
        piece: Piece[Item, Result] = Piece(about, item, cost)
        batch.pieces.append(piece)
        batch.cost += cost
        if batch.cost >= self.most:
            self._send(kind)
        return piece.result

    def send(self, number: int) -> None:
        """Wait no longer with what came up to `number`."""
        for kind in [kind for kind, batch in self._growing.items() if batch.begun <= number]:
            self._send(kind)

    def _send(self, kind: Hashable) -> None:
        batch = self._growing.pop(kind)
        about, lane = self._last
        if batch.pieces[0].about is not about:
            lane = min(self.lanes, key=lambda lane: lane.load)
        lane.send(batch)
        self._last = batch.pieces[-1].about, lane
