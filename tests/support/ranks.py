"""One process of two, without the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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
