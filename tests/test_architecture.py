"""The architecture: imports, public names, and the files that docs/explanation/architecture.md names."""

from __future__ import annotations

import ast
import json
import pkgutil
import re
import sys
import tomllib
from types import ModuleType

import pytest
import torch

import qwen_cache
import qwen_cache.format
import qwen_cache.settings
import qwen_cache.sources
import qwen_cache.storage
import qwen_train

from .support.commands import HEAVY, command
from .support.commands import run as here
from .support.paths import ROOT
from .support.processes import run

LIGHT = ("qwen_cache", "qwen_cache.cli", "qwen_train", "qwen_train.cli", "qwen_cache.trainers", "qwen_cache.html.page")
"""`--help` takes less than half a second because these import nothing large."""
TORCHLESS = (
    *(
        f"qwen_cache.{room.__name__.split('.')[-1]}.{module.name}"
        for room in (
            qwen_cache.format,
            qwen_cache.settings,
            qwen_cache.sources,
            qwen_cache.storage,
        )
        for module in pkgutil.iter_modules(room.__path__)
    ),
    "qwen_cache.batching",
    "qwen_cache.inspect.summary",
    "qwen_cache.inspect.compare",
    "qwen_cache.inspect.page",
    "qwen_cache.models.folder",
    "qwen_cache.encode.builder",
    "qwen_cache.encode.plan",
)
"""Modules that read, check and plan."""


def test_imports_stay_light() -> None:
    """`--help` and a build with nothing to do are fast; training loads no encoder. What is loaded stays loaded."""
    code = (
        "import importlib, json, sys\n"
        "stages = json.loads(sys.argv[1])\n"
        "for name in [name for name in sys.modules if name.startswith(('qwen_cache', 'qwen_train'))]:\n"
        "    del sys.modules[name]\n"
        "for modules, forbidden in stages:\n"
        "    for module in modules:\n"
        "        importlib.import_module(module)\n"
        "        loaded = sorted(sys.modules.keys() & set(forbidden))\n"
        "        assert not loaded, f'{module} loads {loaded}'\n"
    )
    encoders = ("qwen_cache.encode.text", "qwen_cache.encode.vae", "qwen_train.inference.pipeline")
    stages = [
        (LIGHT, (*HEAVY, "jinja2", "pyarrow", "numpy", "pydantic")),
        (TORCHLESS, HEAVY),
    ]
    for fresh, its in ((True, stages), (False, [(["qwen_train.train"], encoders)])):  # our modules alone, where forked
        done = run([sys.executable, "-c", code, json.dumps(its)], capture_output=True, text=True, fresh=fresh)
        assert done.returncode == 0, done.stderr


def test_imports_go_one_way() -> None:
    """`make check` runs the contracts of pyproject.toml: layers that name every room, and no exemption from them.

    The trainer's contract with the cache has one rule with a condition: inference and the UI alone use sources.
    """
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = [each for each in contracts if each["type"] == "layers" and "containers" in each]
    assert {name for each in layers for name in each["containers"]} == {"qwen_cache", "qwen_train"}
    assert all(each["exhaustive"] for each in layers)
    ignored = [edge for each in contracts for edge in each.get("ignore_imports", ())]
    assert {edge.partition(" -> ")[0] for edge in ignored} == {"qwen_train.inference.**", "qwen_train.ui.**"}
    assert any(each["type"] == "acyclic_siblings" for each in contracts)
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ncheck:")[2].partition("\n\n")[0]
    assert "lint-imports" in recipe


def test_differences_of_systems_about_files_are_in_one_module() -> None:
    """Modules that one system lacks, and the calls whose order decides what a crash leaves."""
    lacking = re.compile(r"^\s*(?:import|from) (?:fcntl|msvcrt|filelock|platformdirs|resource|pwd)\b", re.MULTILINE)
    for path in [*(ROOT / "qwen_cache").rglob("*.py"), *(ROOT / "qwen_train").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if path != ROOT / "qwen_cache" / "storage" / "files.py":
            assert not lacking.search(text), path
            assert 'XDG_CACHE_HOME"' not in text, path
            assert not re.search(r"os\.(?:fsync|link|rename)\(", text), path


CUDA_ALONE = {
    "qwen_cache/models/devices.py": "the switches of TF32",
    "qwen_cache/models/hardware.py": "what a build of torch supports, and the names of devices on other machines",
    "qwen_cache/models/quantization.py": "torch's 8-bit products",
    "qwen_cache/cli/doctor.py": "the driver's reason for refusing a device",
    "qwen_cache/encode/cluster.py": "Ray's GPUs, by the name that torch gives those of NVIDIA and AMD",
    "qwen_train/ui/train.py": "CUDA_VISIBLE_DEVICES, which AMD's runtime reads too",
    "qwen_train/ui/job_file.py": "the numbers in CUDA_VISIBLE_DEVICES",
    "qwen_train/model/kernels.py": "torch's variable-length flash attention, cuDNN's, and FlashAttention-3",
    "qwen_train/memory/prediction.py": "an accelerator, whichever",
    "qwen_train/memory/exhausted.py": "a setting of CUDA's allocator",
}


def test_cuda_is_named_only_where_nothing_else_is_meant() -> None:
    """ROCm, XPU and MPS take the same path: `qwen_cache/models/devices.py` says what a device can do."""
    named = set()
    for path in [*(ROOT / "qwen_cache").rglob("*.py"), *(ROOT / "qwen_train").rglob("*.py")]:
        if "cuda" not in (text := path.read_text(encoding="utf-8")):
            continue
        tree = ast.parse(text)
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if "cuda" in attributes or any(re.fullmatch(r"cuda(:.*)?", text) for text in texts):
            named.add(path.relative_to(ROOT).as_posix())
    assert named == CUDA_ALONE.keys()


NAMES_ITS_PARSER = {
    "Image.open": "formats",
    "torch.load": "weights_only",
    "AutoTokenizer.from_pretrained": "trust_remote_code",
    "tarfile.open": "mode",
}
"""Calls that would let a file choose what reads it, and the argument that takes the choice."""
CHOOSES_ITS_PARSER = (
    *("eval", "exec", "os.system", "pickle.load", "pickle.loads"),
    *("yaml.load", "yaml.safe_load", "yaml.full_load"),
)


def test_no_file_chooses_what_reads_it() -> None:
    """An image Ghostscript, a pickle its code, a model's folder its Python, YAML a loader without bounds."""
    calls = {*NAMES_ITS_PARSER, *CHOOSES_ITS_PARSER}
    pattern = re.compile(rf"(?<![.\w])({'|'.join(map(re.escape, calls))})\(")
    found = {}
    for path in [*(ROOT / "qwen_cache").rglob("*.py"), *(ROOT / "qwen_train").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if not pattern.search(text):
            continue
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            if (name := ast.unparse(call.func)) in calls:
                arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                found[path.relative_to(ROOT).as_posix(), name] = arguments.get(NAMES_ITS_PARSER.get(name))
    assert found == {
        ("qwen_cache/trainers/files.py", "torch.load"): "True",
        ("qwen_cache/models/encoders.py", "AutoTokenizer.from_pretrained"): "False",
        ("qwen_cache/sources/images.py", "Image.open"): "FORMATS",
        ("qwen_cache/sources/webdataset.py", "tarfile.open"): "'r:'",
        ("qwen_train/ui/runs.py", "Image.open"): "['PNG']",
        ("qwen_train/inference/images.py", "Image.open"): "['PNG']",
        ("qwen_train/training/publish.py", "Image.open"): "['PNG']",
        ("qwen_train/training/report.py", "Image.open"): "['PNG']",
    }


@pytest.mark.parametrize("package", [qwen_cache, qwen_train])
def test_public_names(package: ModuleType) -> None:
    assert list(package.__all__) == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name)
    with pytest.raises(AttributeError, match="has no attribute 'open_shards'"):
        _ = package.open_shards


def test_files_that_the_architecture_page_names_exist() -> None:
    """In the text, a module is named from the repository's root, or within `qwen_cache`."""
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    names = re.findall(r"`(\w+(?:/\w+)+\.py)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert len(names) > 20
    assert [name for name in names if not ((ROOT / name).exists() or (ROOT / "qwen_cache" / name).exists())] == []


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_docstrings_begin_with_a_sentence_or_a_noun() -> None:
    """A reader of a list of first lines, as the tree of the reference is, must not need what stands around."""
    first = re.compile("(What|Those|Whether|Of|As|Where|It) ")
    begins_a_text = re.compile(f"[\"']{first.pattern}")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in (
        file for folder in ("qwen_cache", "qwen_train", "tests", "tools") for file in (ROOT / folder).rglob("*.py")
    ):
        if not begins_a_text.search(source := path.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(ast.parse(source)):
            body = node.body if isinstance(node, kinds) else []
            for text in (each.value.value for each in body if isinstance(each, ast.Expr) and is_text(each.value)):
                assert not first.match(text), f"{path}: {text}"  # those of attributes, too


@pytest.mark.parametrize("program", ["qwen-cache", "qwen-train"])
def test_help_and_version(program: str) -> None:
    assert command(program, "--version").stdout.splitlines()[0] == f"{program} {qwen_cache.__version__}"
    result = here(program, "--help")
    assert result.code == 0
    assert "Usage" in result.stdout
    assert here(program, "no-such-command").code == 2


def test_a_silent_broadcast_is_an_error_in_the_tests() -> None:
    """jaxtyping's hook is on (pyproject.toml): three noise levels against a batch of one would broadcast to three."""
    from qwen_train.flow import interpolate

    with pytest.raises(Exception, match=r"(?i)type-check error"):
        interpolate(torch.zeros(1, 3, 4), torch.zeros(1, 3, 4), torch.zeros(3), torch.ones(1, 3, dtype=torch.bool))
