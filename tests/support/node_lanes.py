"""In place of the encoders on the nodes of a Ray cluster: bytes that depend on the key alone, and deaths on command.

Run as a program, it is `qwen-cache` with such lanes: python -m tests.support.node_lanes LOG ARGUMENTS…
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from qwen_cache.encode.builder import BuildJob, RunningEncoders
from qwen_cache.encode.plan import PlannedSample
from qwen_cache.errors import ModelError
from qwen_cache.format.identity import content_hash, recipe_id
from qwen_cache.format.sample import SampleMeta, TensorSpec, token_count
from qwen_cache.format.shard import ShardWriter


class NodeLanes(RunningEncoders):
    """Notes in `log` which node encoded what."""

    def __init__(self, job: BuildJob, log: Path) -> None:
        import ray

        self.job, self.log = job, log
        self.node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else "here"
        self.fate = (log / "fates" / self.node).read_text() if (log / "fates" / self.node).exists() else ""
        if self.fate == "broken":
            raise ModelError("the weights are damaged", where="vae", do="download them again")
        if self.fate == "dead":
            os._exit(1)
        if self.node != "here":
            ShardWriter.seal = dying(ShardWriter.seal, log)  # type: ignore[method-assign]

    def close(self) -> None:
        pass

    def busy(self) -> set[str]:
        """The nodes that have something to do."""
        return {path.name.split("@")[1] for path in self.log.glob("*@*")}

    def submit(self, sample: PlannedSample, known: object = None) -> PlannedSample:
        if self.fate == "blind":
            (self.log / "no such folder").read_bytes()
        (self.log / f"{Path(sample.row.name).name}@{self.node}").touch()
        return sample

    def result(self, sample: PlannedSample) -> tuple[SampleMeta, dict[str, memoryview]]:
        if self.fate == "exit":
            os._exit(1)
        if self.fate == "confused":
            raise RuntimeError("the device is confused")
        while self.fate == "hang" or (self.fate.isdecimal() and len(self.busy()) < int(self.fate)):
            time.sleep(0.05)
        if self.node != "here":
            self.kill("worker")
            self.kill("driver")
        shapes = sample.img_shapes
        wanted = {"image_latents": (token_count(shapes[:1]), 64), "control_latents": (token_count(shapes[1:]), 64)}
        wanted |= {"prompt_embeds": (20, 64), "empty_prompt_embeds": (5, 64)}
        data = {name: memoryview(noise(sample.key + name, shape[0] * 64)) for name, shape in wanted.items()}
        tensors = {name: TensorSpec("F32", shape, content_hash(data[name])) for name, shape in wanted.items()}
        return SampleMeta(recipe_id(self.job.recipe), sample.inputs, sample.row.prompt, shapes, 15, tensors), data

    def kill(self, who: str) -> None:
        """Kill this worker or the driver, if that is commanded for this moment."""
        if is_time(self.log, who):
            pid = os.getpid() if who == "worker" else int((self.log / "driver").read_text())
            os.kill(pid, signal.SIGKILL)


def dying(seal: Any, log: Path) -> Any:
    """`ShardWriter.seal` in a process that may be killed before or after it."""

    def call(*arguments: Any) -> Any:
        if is_time(log, "writer, before"):
            os.kill(os.getpid(), signal.SIGKILL)
        sealed = seal(*arguments)
        if is_time(log, "writer, after"):
            os.kill(os.getpid(), signal.SIGKILL)
        return sealed

    return call


def is_time(log: Path, who: str) -> bool:
    """Count one moment of this kind; whether it is the one of the command, for the first process that comes to it."""
    for path in log.glob(f"kill/{who}@*"):
        moment = int(path.name.split("@")[1])
        with suppress(FileNotFoundError):
            if moment == 0:
                path.unlink()
                return True
            path.rename(path.with_name(f"{who}@{moment - 1}"))
    return False


def noise(seed: str, count: int) -> bytes:
    """`count` floats between 1 and 2."""
    mantissas = hashlib.shake_128(seed.encode()).digest(2 * count)
    return b"".join(mantissas[2 * i : 2 * i + 2] + b"\x80\x3f" for i in range(count))


class Log:
    """The log of the nodes, and the events to come: a number waits until that many nodes are busy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "fates").mkdir(parents=True)
        (folder / "kill").mkdir()

    def doom(self, node: Any, fate: str) -> None:
        (self.folder / "fates" / node.node_id).write_text(fate)

    def command_kill(self, who: str, moment: int) -> None:
        (self.folder / "kill" / f"{who}@{moment}").touch()

    def killed(self) -> bool:
        """True if the command was carried out; it is withdrawn."""
        left = list((self.folder / "kill").iterdir())
        for path in left:
            path.unlink()
        return not left

    def encoded(self, node: Any = None) -> set[str]:
        """The names of the samples that were started, on one node or on all."""
        names = (path.name.split("@") for path in self.folder.glob("*@*"))
        return {name for name, where in names if node is None or where == node.node_id}

    def clear(self) -> None:
        for path in self.folder.glob("*@*"):
            path.unlink()


def main() -> None:
    import ray

    from qwen_cache import cli
    from qwen_cache.encode import preflight
    from tests.support import node_lanes

    ray.cloudpickle.register_pickle_by_value(node_lanes)
    log = Path(sys.argv.pop(1))
    (log / "driver").write_text(str(os.getpid()))
    preflight.load_lanes = lambda job: node_lanes.NodeLanes(job, log)  # type: ignore[assignment]
    cli.main()


if __name__ == "__main__":
    main()
