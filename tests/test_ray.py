"""What `build --ray` promises: the cache of one machine, byte for byte, whichever node encoded what or died."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from qwen_cache.cli import build as build_command
from qwen_cache.encode import builder
from qwen_cache.encode.builder import BuildJob
from qwen_cache.encode.cluster import Node, WorkerResources, choose_nodes, choose_resources
from qwen_cache.encode.plan import PlannedSample
from qwen_cache.errors import ModelError
from qwen_cache.extras import install_command
from qwen_cache.format.identity import content_hash, recipe_id
from qwen_cache.format.sample import SampleMeta, token_count
from qwen_cache.format.staging import Staging
from qwen_cache.format.tensor import TensorSpec
from qwen_cache.settings.cache import CacheConfig

from .support.caches import build, contents
from .support.commands import Result, run

ray = pytest.importorskip("ray", reason="ray is not installed")
SHARDS = ("--set", "cache.shard_size=200kB")  # more shards than one
CPU = ("--vae-device", "cpu", "--text-device", "cpu")


class NodeLanes(AbstractContextManager[Any]):
    """In place of the encoders: bytes that depend on the key alone. Notes in `log` which node encoded what."""

    def __init__(self, job: BuildJob, log: Path) -> None:
        import ray

        self.job, self.log = job, log
        self.node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else "here"
        self.fate = (log / "fates" / self.node).read_text() if (log / "fates" / self.node).exists() else ""
        if self.fate == "broken":
            raise ModelError("the weights are damaged", where="vae", do="download them again")

    def __exit__(self, *_: object) -> None:
        pass

    def busy(self) -> set[str]:
        """The nodes that have something to do."""
        return {path.name.split("@")[1] for path in self.log.glob("*@*")}

    def submit(self, sample: PlannedSample) -> PlannedSample:
        if self.fate == "blind":
            (self.log / "no such folder").read_bytes()
        (self.log / f"{Path(sample.row.name).name}@{self.node}").touch()
        return sample

    def result(self, sample: PlannedSample) -> tuple[SampleMeta, dict[str, memoryview]]:
        if self.fate == "exit":
            os._exit(1)
        while self.fate == "hang" or (self.fate.isdecimal() and len(self.busy()) < int(self.fate)):
            time.sleep(0.05)
        shapes = sample.img_shapes
        wanted = {"image_latents": (token_count(shapes[:1]), 64), "control_latents": (token_count(shapes[1:]), 64)}
        wanted |= {"prompt_embeds": (20, 64), "empty_prompt_embeds": (5, 64)}
        data = {name: memoryview(noise(sample.key + name, shape[0] * 64)) for name, shape in wanted.items()}
        tensors = {name: TensorSpec("F32", shape, content_hash(data[name])) for name, shape in wanted.items()}
        return SampleMeta(recipe_id(self.job.recipe), sample.inputs, sample.row.prompt, shapes, 15, tensors), data


def noise(seed: str, count: int) -> bytes:
    """`count` floats between 1 and 2."""
    mantissas = hashlib.shake_128(seed.encode()).digest(2 * count)
    return b"".join(mantissas[2 * i : 2 * i + 2] + b"\x80\x3f" for i in range(count))


class Log:
    """What the nodes logged, and what will happen to them: a number waits until that many nodes are busy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "fates").mkdir(parents=True)

    def doom(self, node: Any, fate: str) -> None:
        (self.folder / "fates" / node.node_id).write_text(fate)

    def encoded(self, node: Any = None) -> set[str]:
        """The names of the samples that were started, on one node or on all."""
        names = (path.name.split("@") for path in self.folder.glob("*@*"))
        return {name for name, where in names if node is None or where == node.node_id}

    def clear(self) -> None:
        for path in self.folder.glob("*@*"):
            path.unlink()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of a head without CPUs, and two nodes with one each."""
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that the nodes need not import pytest
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **MEMORY})
    made.nodes = [made.add_node(num_cpus=1, **MEMORY) for _ in range(2)]
    yield made
    made.shutdown()


MEMORY = {"object_store_memory": 100 << 20}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    """Builds without encoders, here and on the nodes."""
    folder = tmp_path / "log"
    monkeypatch.setattr(build_command, "load_lanes", lambda job: NodeLanes(job, folder))
    return Log(folder)


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


@pytest.fixture
def table(pairs: Path) -> Path:
    """36 rows: each pair under nine prompts."""
    rows = [
        {"target": f"target_images/{name}.png", "control": f"control_images/{name}.png", "prompt": f"{name}, {i}"}
        for name in ("cat", "china", "cup", "flower")
        for i in range(9)
    ]
    path = pairs / "table.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def build_on(cluster: Any, source: Path, out: Path, model: Path, *options: str) -> Result:
    return build(source, out, model, "--ray", cluster.address, *SHARDS, *options)


@pytest.mark.slow
def test_a_cluster_makes_the_cache_of_one_machine(
    cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path
) -> None:
    for node in cluster.nodes:
        log.doom(node, "2")
    result = build_on(cluster, table, tmp_path / "many", model, "--json")
    assert result.code == 0, result.stderr
    expected = {"encoded": 36, "copied": 0, "kept": 0, "new_masks": 0, "samples": 36, "up_to_date": False}
    assert json.loads(result.stdout) == expected
    one, other = (log.encoded(node) for node in cluster.nodes)
    assert one
    assert other
    assert not one & other, "each sample was encoded once"
    assert len(one | other) == 36
    assert build(table, tmp_path / "one", model, *SHARDS).code == 0
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert len(list((tmp_path / "one").glob("*.tar"))) > 2
    assert run("qwen-cache", "verify", tmp_path / "many").code == 0


@pytest.mark.slow
def test_only_the_difference_is_encoded(cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path) -> None:
    out = tmp_path / "shards"
    assert build_on(cluster, table, out, model).code == 0
    log.clear()
    again = build_on(cluster, table, out, model)
    assert (again.code, log.encoded()) == (0, set())
    assert "nothing to do" in again.stderr
    table.write_text(table.read_text().replace('"cup, 4"', '"cup, changed"'))
    assert build_on(cluster, table, out, model).code == 0
    assert log.encoded() == {"cup#5"}


@pytest.mark.slow
def test_the_work_of_a_killed_node_is_done_again_elsewhere(
    cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path
) -> None:
    doomed = cluster.add_node(num_cpus=1, **MEMORY)
    log.doom(doomed, "hang")
    for node in cluster.nodes:
        log.doom(node, "3")

    def kill_when_busy() -> None:
        while not log.encoded(doomed):
            time.sleep(0.05)
        cluster.remove_node(doomed, allow_graceful=False)

    killer = threading.Thread(target=kill_when_busy)
    killer.start()
    result = build_on(cluster, table, tmp_path / "many", model)
    killer.join()
    assert result.code == 0, result.stderr
    lost = log.encoded(doomed)
    assert lost
    assert lost <= log.encoded(cluster.nodes[0]) | log.encoded(cluster.nodes[1])
    assert build(table, tmp_path / "one", model, *SHARDS).code == 0
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


@pytest.mark.slow  # Ray takes ten seconds to be sure
def test_when_every_worker_dies_what_is_done_is_kept(
    cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path
) -> None:
    for node in cluster.nodes:
        log.doom(node, "exit")
    result = build_on(cluster, table, tmp_path / "shards", model)
    assert result.code == 2
    assert "error: every worker of the Ray cluster is lost (found " in result.stderr
    assert "run the same command to continue" in result.stderr
    assert not (tmp_path / "shards" / "cache.json").exists()


@pytest.mark.slow
def test_an_interrupted_build_continues_without_ray(
    cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, add = tmp_path / "shards", Staging.add
    assert build(table, tmp_path / "one", model, *SHARDS).code == 0

    def add_some(staging: Staging, *sample: Any) -> None:
        if staging.position == 20:
            raise KeyboardInterrupt
        add(staging, *sample)

    monkeypatch.setattr(Staging, "add", add_some)
    stopped = build_on(cluster, table, out, model)
    assert stopped.code == 130
    assert "20 of 36 samples finished and kept; run the same command to continue" in stopped.stderr
    monkeypatch.setattr(Staging, "add", add)
    log.clear()
    assert build(table, out, model, *SHARDS).code == 0
    assert len(log.encoded()) == 16
    assert contents(out) == contents(tmp_path / "one")


@pytest.mark.slow
def test_what_a_worker_cannot_load_is_said_as_ours(
    cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path
) -> None:
    log.doom(cluster.nodes[0], "broken")
    log.doom(cluster.nodes[1], "2")  # or it may have done everything before the other has loaded
    result = build_on(cluster, table, tmp_path / "shards", model)
    assert result.code == 2
    assert f"error: vae: the weights are damaged, on node {cluster.nodes[0].node_ip_address}" in result.stderr
    assert "→ download them again" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_node_without_the_source_is_named(cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path) -> None:
    for node in cluster.nodes:  # whichever begins
        log.doom(node, "blind")
    result = build_on(cluster, table, tmp_path / "shards", model)
    assert result.code == 2
    what = "cannot read this: No such file or directory"
    lost = [f"error: {log.folder / 'no such folder'}: node {n.node_ip_address} {what}" for n in cluster.nodes]
    assert any(message in result.stderr for message in lost)
    assert "→ put source and model where every node has them under the same path" in result.stderr


@pytest.mark.slow
def test_a_node_with_other_weights_is_refused(
    cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = builder.make_recipe
    monkeypatch.setattr(builder, "make_recipe", lambda *job: {**make(*job), "vae": "0" * 32})
    result = build_on(cluster, table, tmp_path / "shards", model)
    assert result.code == 2
    assert "the model or the environment of this node gives another recipe, on node" in result.stderr
    assert "(found another VAE)" in result.stderr
    assert not log.encoded()


@pytest.mark.slow
def test_the_real_encoders_on_a_node(cluster: Any, pairs: Path, tmp_path: Path, model: Path) -> None:
    """One sample, with relative paths: they mean the same on the nodes."""
    for path in [*pairs.rglob("china.*"), *pairs.rglob("cup*"), *pairs.rglob("flower.*")]:
        path.unlink()
    (pairs / "control_images" / "cat_control_1.png").unlink()
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        many = build_on(cluster, Path("data"), Path("many"), model, *CPU)
    finally:
        os.chdir(before)
    assert many.code == 0, many.stderr
    assert build(pairs, tmp_path / "one", model, *SHARDS, *CPU).code == 0
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


def test_without_a_cluster_or_without_ray_it_says_so(
    table: Path, tmp_path: Path, model: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = build(table, tmp_path / "shards", model, "--ray", "127.0.0.1:1")
    assert result.code == 2
    assert "error: 127.0.0.1:1: --ray: no cluster answers: [Errno 111] Connection refused" in result.stderr
    monkeypatch.setitem(sys.modules, "ray", None)
    missing = build(table, tmp_path / "shards", model, "--ray", "local")
    assert missing.code == 2
    assert f"--ray: the package ray is not installed\n  → {install_command('ray')}" in missing.stderr


@pytest.mark.parametrize(
    ("vae", "text", "has_gpus", "expected"),
    [
        ("auto", "auto", True, WorkerResources(1, "cuda:0", "cuda:0")),
        ("auto", "auto", False, WorkerResources(0, "cpu", "cpu")),
        ("cuda:1", "cuda:2", True, WorkerResources(2, "cuda:0", "cuda:1")),
        ("cuda", "cuda:0", True, WorkerResources(1, "cuda:0", "cuda:0")),
        ("cuda:3", "auto", True, WorkerResources(1, "cuda:0", "cuda:0")),
        ("cpu", "auto", True, WorkerResources(1, "cpu", "cuda:0")),
        ("cpu", "cpu", True, WorkerResources(0, "cpu", "cpu")),
        ("cuda:4,cuda:2", "cuda:0", True, WorkerResources(3, "cuda:0,cuda:1", "cuda:2")),
    ],
)
def test_devices_become_those_that_ray_shows_a_worker(
    vae: str, text: str, has_gpus: bool, expected: WorkerResources
) -> None:
    assert choose_resources(CacheConfig(vae_device=vae, text_device=text), has_gpus=has_gpus) == expected


def test_each_node_gets_as_many_workers_as_fit() -> None:
    def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"NodeID": name, "NodeManagerAddress": f"ip-{name}", "Alive": alive, "Resources": resources}

    nodes = [node("a", CPU=32, GPU=5), node("b", CPU=6, GPU=2), node("head", CPU=0), node("dead", False, CPU=9, GPU=9)]
    on_two = [Node("a", "ip-a", 4)] * 2 + [Node("b", "ip-b", 4)]
    assert choose_nodes(nodes, WorkerResources(2, "cuda:0", "cuda:1")) == on_two
    assert choose_nodes(nodes, WorkerResources(1, "cuda:0", "cuda:0"))[5:] == [Node("b", "ip-b", 3)] * 2
    assert choose_nodes(nodes, WorkerResources(0, "cpu", "cpu")) == [Node("a", "ip-a", 32), Node("b", "ip-b", 6)]
