"""The simulated accelerator reports what it should, and nothing else; results are the CPU's.

Its programs run in one process of their own, because an accelerator is installed for good, and for every test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .simulated_device.build import build, obstacle
from .support.paths import ROOT
from .support.waiting import HANG

Outcome = dict[str, Any]
pytestmark = pytest.mark.slow

EVENTS: dict[str, dict[str, int]] = {
    "a_prefetch": {},
    "a_prefetch_whose_stream_waits_before_it_frees": {},
    "a_prefetch_used_without_waiting": {"race": 1},
    "a_prefetch_freed_without_recording": {"race": 1},
    "two_fixed_buffers": {},
    "two_fixed_buffers_refilled_too_early": {"race": 4},  # the first two of six copies find their buffers unused
    "two_fixed_buffers_read_too_early": {"race": 6},
    "two_fixed_buffers_whose_memory_was_in_use": {"race": 2},
    "order_through_a_third_stream": {},
    "an_event_recorded_too_early": {"race": 1},
    "host_waits_for_the_wrong_stream": {"race": 1},
    "gradients_on_a_stream": {},
    "two_devices": {},
    "pinned_memory_refilled": {},
    "pinned_memory_refilled_too_early": {"race": 2},
    "pinned_memory_used_by_two_streams": {},
    "pinned_memory_used_by_two_streams_too_early": {"race": 5},
    "pinned_memory_freed_at_once": {},
    "one_part_of_pinned_memory_refilled": {},
    "a_download_read_too_early": {},
    "scalars_and_indices_of_the_cpu": {"upload": 2, "download": 2},
    "tensors_of_two_devices": {"mixed": 10},
    "every_wait": {"item": 2, "download": 2, "shape": 3, "synchronize": 3, "upload": 1, "upload-pageable": 1},
    "no_waits": {},
    "memory_of_a_recorded_stream": {"synchronize": 1},
    "out_of_memory_and_recovery": {},
    "the_allocator_waits_for_other_streams": {"allocator-wait": 1},
}
"""The events of each program; those without `item` and `synchronize` may have them, since they read their results."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    if reason := obstacle():
        pytest.skip(reason)
    build()
    process = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.simulated_device.programs"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert process.returncode == 0, process.stderr
    result: dict[str, Outcome] = json.loads(process.stdout)
    return result


def kinds(outcome: Outcome) -> dict[str, int]:
    found = Counter[str]()
    for event in outcome["events"]:
        found[event["kind"]] += event["count"]
    return dict(found)


@pytest.mark.parametrize("name", EVENTS)
def test_it_reports_what_it_should(outcomes: dict[str, Outcome], name: str) -> None:
    expected, found = EVENTS[name], kinds(outcomes[name])
    reading = {"item", "synchronize"} - expected.keys()
    assert {kind: count for kind, count in found.items() if kind not in reading} == expected
    for event in outcomes[name]["events"]:
        path, _, line = event["place"].partition(":")
        assert path == str(Path("tests", "simulated_device", "programs.py"))
        assert int(line) > 0


def test_a_race_names_both_operators(outcomes: dict[str, Outcome]) -> None:
    races = [it["what"] for it in outcomes["a_prefetch_used_without_waiting"]["events"] if it["kind"] == "race"]
    assert races[0].startswith("aten::sum on stream 0 of simu:0 reads what a copy from the host on stream ")


def test_correct_programs_have_correct_results_and_late_copies_are_seen(outcomes: dict[str, Outcome]) -> None:
    returned = {name: outcome["returned"] for name, outcome in outcomes.items()}
    assert returned["a_prefetch"] == returned["a_prefetch_whose_stream_waits_before_it_frees"] == 4096
    assert returned["two_fixed_buffers"] == [4096 * i for i in range(6)]
    assert returned["gradients_on_a_stream"] == returned["two_devices"] == 3 * 4096
    assert returned["pinned_memory_freed_at_once"] == 3 * 4096
    assert returned["one_part_of_pinned_memory_refilled"] == 0
    assert returned["pinned_memory_refilled"] == returned["pinned_memory_used_by_two_streams"] == [0, 4096, 8192]
    assert returned["scalars_and_indices_of_the_cpu"] == [2, 4, 9, 1, 2, 3]
    assert returned["a_download_read_too_early"]  # NaN before, the values afterwards
    for name in ("a_prefetch_used_without_waiting",):
        assert returned[name] != returned[name], name  # NaN
    assert returned["two_fixed_buffers_read_too_early"] != returned["two_fixed_buffers"]


def test_tensors_of_two_devices_are_refused_as_on_cuda(outcomes: dict[str, Outcome]) -> None:
    *messages, generator = outcomes["tensors_of_two_devices"]["returned"]
    for message in messages:
        assert message.startswith("Expected all tensors to be on the same device, but found at least two devices")
    assert generator == "Expected a 'simu' device type for generator but found 'cpu'"


def test_memory_is_counted_as_by_cudas_allocator(outcomes: dict[str, Outcome]) -> None:
    returned = {name: outcome["returned"] for name, outcome in outcomes.items()}
    assert returned["memory_of_a_recorded_stream"] == [[0, 1], [0, 0]]
    message, allocated, failures = returned["out_of_memory_and_recovery"]
    assert message.startswith("simu out of memory. Tried to allocate 1048576 bytes.")
    assert (allocated, failures) == (4, 1)
    assert returned["the_allocator_waits_for_other_streams"] == 2
    assert returned["operators_in_place_do_not_allocate"] == 0
    assert returned["fresh_memory_is_nan"]
    assert returned["pinned_bytes"] == [3, 4]
    without, with_mask = returned["attention_makes_no_logits"]
    assert without < with_mask < 1.2  # the logits would be 64 times the output


def test_results_are_the_cpus(outcomes: dict[str, Outcome]) -> None:
    assert set(outcomes["results_of_the_cpu"]["returned"].values()) == {0}
    assert outcomes["random_numbers"]["returned"] == [True, True, True]


def test_autocast_has_cudas_lists(outcomes: dict[str, Outcome]) -> None:
    half, single = "torch.bfloat16", "torch.float32"
    assert outcomes["autocast"]["returned"] == {
        "linear": half,
        "gelu": half,
        "layer_norm": single,
        "softmax": single,
        "sum": single,
        "norm": single,
        "addcmul": single,
    }


def test_variable_length_attention(outcomes: dict[str, Outcome]) -> None:
    """Against softmax in float32, aligned to the bottom right; what the kernel does not take is refused."""
    result = outcomes["variable_length_attention"]["returned"]
    assert max(result["(-1, -1)"], result["(-1, 0)"]) < 2**-8  # of bfloat16
    assert result["calls"] == 6
    single, on_cpu, long, longest, mixed = result["refused"]
    assert single == mixed == "flash attention takes fp16 and bf16"
    assert "simu:0 and cpu" in on_cpu
    assert long == "bounds must be contiguous int32"
    assert longest == "a sequence is longer than the longest"
