"""Ranks of a group in one process: one of two without the other, or both in threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .waiting import HANG

T = TypeVar("T")


@contextmanager
def second_of_two() -> Iterator[DeviceMesh]:
    """The mesh of two processes, of which this is the second while entered: torch's fake backend sends nothing.

    Always the same one: torch remembers the parts of a process for all meshes that are equal.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def in_two_threads(work: Callable[[int], T]) -> tuple[T, T]:
    """The results of `work` for the ranks 0 and 1, which exchange tensors as two processes would.

    The error of one ends the other, and so does a rank that ends while the other waits for it.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    found, errors, store = dict[int, T](), list[BaseException](), dist.HashStore()

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
        try:
            result = work(rank)
            dist.barrier()  # meets a call of the other that this rank does not take part in, which torch refuses
            found[rank] = result
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        threads = [Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
    if errors:
        raise errors[0]
    return found[0], found[1]
