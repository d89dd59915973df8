"""Promises of `build --ray`: the samples of one machine, whichever worker wrote which shard, or died.

The judge is the cache that one machine builds: equal identity, keys and hashes of all tensors.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen_cache import open_cache
from qwen_cache.encode import builder, preflight, write
from qwen_cache.encode import cluster as on_ray
from qwen_cache.encode.cluster import Node, WorkerResources, choose_nodes, choose_resources
from qwen_cache.extras import install_command
from qwen_cache.format.manifest import SHARD_PATTERN
from qwen_cache.format.staging import Destination, Staging, keys_in
from qwen_cache.settings.sections import CacheConfig

from .support import node_lanes
from .support.caches import SMALL, build
from .support.commands import Result, run
from .support.node_lanes import Log, NodeLanes
from .support.paths import ROOT
from .support.server import BUCKET
from .support.waiting import HANG

ray = pytest.importorskip("ray", reason="ray is not installed")
SHARDS = ("--set", "cache.shard_size=200kB")  # more shards than one
CPU = ("--vae-device", "cpu", "--text-device", "cpu")


Hashes = dict[str, str]


def described(folder: Path | str) -> tuple[str, list[tuple[str, str, Hashes]]]:
    """The identity of a cache, and each sample's name, key and hashes; `verify` accepts it."""
    verified = run("qwen-cache", "verify", folder)
    assert verified.code == 0, verified.stdout + verified.stderr
    cache = open_cache(folder)
    rows = [
        (row.name, row.meta.key, {name: spec.xxh3_128 for name, spec in row.meta.tensors.items()})
        for row in cache.rows()
    ]
    return cache.identity, rows


@pytest.fixture(scope="module")
def cluster(s3: object) -> Iterator[Any]:
    """A cluster of a head without CPUs, and two nodes with one each; they inherit the credentials of the bucket."""
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(node_lanes)  # so that the nodes need not import pytest
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **MEMORY})
    made.nodes = [made.add_node(num_cpus=1, **MEMORY) for _ in range(2)]
    yield made
    made.shutdown()


MEMORY = {"object_store_memory": 100 << 20}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    """Builds without encoders, here and on the nodes."""
    folder = tmp_path / "log"
    monkeypatch.setattr(preflight, "load_lanes", lambda job: NodeLanes(job, folder))
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
    assert described(tmp_path / "many") == described(tmp_path / "one")
    assert len(list((tmp_path / "many").glob("*.tar"))) > 2
    assert not list((tmp_path / "many" / ".staging").iterdir())


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
    assert described(tmp_path / "many") == described(tmp_path / "one")


@pytest.mark.slow
def test_workers_write_into_a_bucket(
    cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one of them dies, commits are made, and another run is continued after an interruption."""
    url, add = f"s3://{BUCKET}/ray/shards", Staging.add_shard
    arguments = ["build", table, "--out", url, "--model", model, *SMALL, *SHARDS, "--ray", cluster.address]

    def add_some(staging: Staging, shard: Any) -> None:
        if len(staging.sealed) == 1:
            raise KeyboardInterrupt
        add(staging, shard)

    log.doom(cluster.nodes[0], "hang")  # or too little may be left for the death
    log.doom(cluster.nodes[1], "2")
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "add_shard", add_some)
        assert run("qwen-cache", *arguments).code == 130
    first = len(log.encoded())
    log.clear()
    for node in cluster.nodes:
        log.doom(node, "")
    log.command_kill("worker", 1)
    continued = run("qwen-cache", *arguments, "--set", "cache.commit_every=8")
    assert continued.code == 0, continued.stderr
    assert log.killed()
    assert first
    assert len(log.encoded()) < 36
    assert build(table, tmp_path / "one", model, *SHARDS).code == 0
    assert described(url) == described(tmp_path / "one")
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.tar"))


@pytest.mark.slow
def test_commits_are_made_while_workers_write(
    cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits, commit = list[int](), write.commit_early

    def counting(*arguments: Any) -> Any:
        update = commit(*arguments)
        commits.append(len(open_cache(tmp_path / "many")))
        return update

    monkeypatch.setattr(write, "commit_early", counting)
    assert build_on(cluster, table, tmp_path / "many", model, "--set", "cache.commit_every=5").code == 0
    assert len(commits) >= 2
    assert commits == sorted(commits)
    assert build(table, tmp_path / "one", model, *SHARDS).code == 0
    assert described(tmp_path / "many") == described(tmp_path / "one")


@pytest.mark.slow
def test_new_masks_are_made_here_and_the_rest_by_workers(
    cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of the cluster encodes nothing, and what Ray prints of a dead node is not in the JSON."""
    out, write_chunks = tmp_path / "many", on_ray.Cluster.write

    def told(self: on_ray.Cluster, *arguments: Any) -> Any:
        print("(raylet) a node has died")
        return write_chunks(self, *arguments)

    monkeypatch.setattr(on_ray.Cluster, "write", told)
    assert build_on(cluster, table, out, model).code == 0
    table.write_text(table.read_text().replace('"cup, 4"', '"cup, changed"'))
    log.clear()
    result = build_on(cluster, table, out, model, "--set", "data.edit_mask=diff", "--replace", "--json")
    assert result.code == 0, result.stderr
    counts = json.loads(result.stdout)
    assert (counts["encoded"], counts["new_masks"]) == (1, 35)
    assert log.encoded() == {"cup#5"}
    assert run("qwen-cache", "verify", out).code == 0


@pytest.mark.slow
def test_a_folder_that_a_node_does_not_share_is_refused(
    cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Destination.of
    monkeypatch.setattr(write.Destination, "of", lambda *at: replace(of(*at), token="elsewhere"))
    result = build_on(cluster, table, tmp_path / "shards", model)
    assert result.code == 2
    address = cluster.nodes[0].node_ip_address
    what = f"error: {tmp_path / 'shards'}: this node does not see the folder of the cache, on node {address}"
    assert what in result.stderr
    assert "→ build into a folder that all nodes share, or into a bucket (--out s3://…)" in result.stderr


@pytest.mark.slow
def test_when_every_worker_dies_it_says_so(cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path) -> None:
    """Each node gets three workers."""
    for node in cluster.nodes:
        log.doom(node, "dead")
    result = build_on(cluster, table, tmp_path / "shards", model)
    assert result.code == 2
    assert "error: every worker of the Ray cluster is lost (found " in result.stderr
    assert "run the same command to continue" in result.stderr
    assert not (tmp_path / "shards" / "cache.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("fate", "found"), [("exit", "found "), ("confused", "RuntimeError: the device is confused")])
def test_a_chunk_that_fails_three_times_names_its_samples(
    fate: str, found: str, cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path
) -> None:
    """The process ends or raises an error: in both cases all samples of a chunk are named, and what is done is kept."""
    for node in cluster.nodes:
        log.doom(node, fate)
    result = build_on(cluster, table, tmp_path / "shards", model)
    assert result.code == 2
    message = result.stderr.partition(": encoding these samples failed 3 times: ")[2]
    names = [name.removeprefix("target_images/") for name in message.partition(" (found ")[0].split(", ")]
    assert len(names) > 1
    assert set(names) <= log.encoded()
    assert found in message
    assert "→ build without --ray to see which of them fails; what is complete is kept" in message
    assert "Traceback" not in result.stderr
    assert build(table, tmp_path / "shards", model, *SHARDS).code == 0


@pytest.mark.slow
def test_a_broken_node_is_left_out(cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path) -> None:
    """A chunk that failed on one node goes to the other, so it does not fail three times."""
    log.doom(cluster.nodes[0], "exit")
    log.doom(cluster.nodes[1], "2")
    result = build_on(cluster, table, tmp_path / "many", model)
    assert result.code == 0, result.stderr
    assert log.encoded(cluster.nodes[0]) <= log.encoded(cluster.nodes[1])
    assert build(table, tmp_path / "one", model, *SHARDS).code == 0
    assert described(tmp_path / "many") == described(tmp_path / "one")


VICTIMS = ("worker", "writer, before", "driver", "writer, after")
"""A worker among its samples, before and after it makes a shard durable and names it; and the process that commits."""


@pytest.mark.slow
def test_twenty_deaths_change_nothing(cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path) -> None:
    """Workers, writers and the driver are killed in turn, each at a random moment; a killed driver's build is continued
    with Ray and without."""
    assert build(table, tmp_path / "one", model, *SHARDS).code == 0
    one, chance, deaths = described(tmp_path / "one"), random.Random(0), 0
    for number in itertools.count():
        victim, out = VICTIMS[number % len(VICTIMS)], tmp_path / f"many-{number}"
        log.command_kill(victim, chance.randrange(3 if "writer" in victim else 30))
        code = drive(log, table, out, model, "--ray", cluster.address)
        deaths += log.killed()
        if victim == "driver" and code == -signal.SIGKILL:
            assert not (out / "cache.json").exists()
            finished = in_complete_shards(out, tmp_path / "one")
            log.clear()
            code = drive(log, table, out, model, *(["--ray", cluster.address] if chance.random() < 0.5 else []))
            assert not finished & log.encoded(), "work of the workers was done again"
        assert code == 0, f"{victim}, seed 0, number {number}"
        assert described(out) == one
        shutil.rmtree(out)
        if deaths == 20:
            return


def drive(log: Log, source: Path, out: Path, model: Path, *options: str) -> int:
    """The exit code of a build in a process of its own."""
    build_options = ["build", source, "--out", out, "--model", model, *SMALL, *SHARDS, *options]
    command = [sys.executable, "-m", "tests.support.node_lanes", log.folder, *build_options]
    return subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, timeout=HANG).returncode


def in_complete_shards(out: Path, one: Path) -> set[str]:
    """The names of the samples in the complete shards of a staging folder; `one` is the finished cache."""
    names = {row.meta.key: Path(row.name).name for row in open_cache(one).rows()}
    shards = [path for path in out.glob(".staging/*/*.tar") if SHARD_PATTERN.fullmatch(path.name)]
    return {names[key] for path in shards for key in keys_in(path, 2)}


@pytest.mark.slow
def test_an_interrupted_build_continues_without_ray(
    cluster: Any, log: Log, table: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, add = tmp_path / "shards", Staging.add_shard
    assert build(table, tmp_path / "one", model, *SHARDS).code == 0

    def add_some(staging: Staging, shard: Any) -> None:
        if len(staging.sealed) == 1:
            raise KeyboardInterrupt
        add(staging, shard)

    monkeypatch.setattr(Staging, "add_shard", add_some)
    log.doom(cluster.nodes[0], "hang")  # or everything may be encoded before the build is interrupted
    log.doom(cluster.nodes[1], "2")
    stopped = build_on(cluster, table, out, model)
    assert stopped.code == 130
    assert " of 36 samples finished and kept; run the same command to continue" in stopped.stderr
    monkeypatch.setattr(Staging, "add_shard", add)
    finished = in_complete_shards(out, tmp_path / "one")
    assert len(list(out.glob(".staging/*/*.tar"))) >= 2
    log.clear()
    assert build(table, out, model, *SHARDS).code == 0
    assert 0 < len(log.encoded()) <= 36 - len(finished)
    assert not log.encoded() & finished
    assert described(out) == described(tmp_path / "one")


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
    monkeypatch.setattr(builder, "make_recipe", lambda *job, **where: {**make(*job, **where), "processor": "0" * 32})
    result = build_on(cluster, table, tmp_path / "shards", model)
    assert result.code == 2
    assert "the model or the environment of this node gives another recipe, on node" in result.stderr
    assert "(found another tokenizer or processor)" in result.stderr
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
    assert described(tmp_path / "many") == described(tmp_path / "one")


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
