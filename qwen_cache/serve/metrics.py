"""The metrics of a service, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from qwen_cache.models.devices import device_module, reports_memory
from qwen_cache.serve.engine import Engine

COUNTS = {
    "hits": "samples that clients sent and that were known already",
    "misses": "samples that clients sent and that were not known",
    "encoded": "samples encoded",
    "copied": "samples copied from caches of cache.reuse",
    "reused": "images whose latents were known",
    "failed": "samples that could not be encoded",
    "stored": "samples committed",
    "commits": "commits",
    "failed_commits": "commits that failed",
}


class Metrics:
    """Requests by route and status, and what the engine counts."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_OfEngine(engine))
        labels = ("method", "route", "status")
        self.requests = Counter("qwen_cache_requests", "requests answered", labels, registry=self.registry)
        self.seconds = Histogram("qwen_cache_request_seconds", "time of a request", ("route",), registry=self.registry)

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)


class _OfEngine(Collector):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        observer, (samples, size) = self.engine.observer, self.engine.waiting
        for name, text in COUNTS.items():
            yield CounterMetricFamily(f"qwen_cache_{name}", text, value=observer.counts[name])
        yield CounterMetricFamily("qwen_cache_commit_seconds", "time of commits", value=observer.commit_seconds)
        yield GaugeMetricFamily("qwen_cache_queue_samples", "samples that wait or are encoded", value=samples)
        yield GaugeMetricFamily("qwen_cache_queue_bytes", "bytes of images that wait", value=size)
        yield GaugeMetricFamily("qwen_cache_samples", "samples in the store", value=len(self.engine.store))
        yield GaugeMetricFamily("qwen_cache_ready", "whether the encoders are loaded", value=self.engine.ready)
        batches = CounterMetricFamily("qwen_cache_batches", "batches encoded", labels=("lane",))
        items = CounterMetricFamily("qwen_cache_batch_items", "images or prompts in batches", labels=("lane",))
        for lane, (count, total) in self.engine.batches().items():
            batches.add_metric([lane], count)
            items.add_metric([lane], total)
        yield from (batches, items, _memory(self.engine))


def _memory(engine: Engine) -> GaugeMetricFamily:
    """Bytes that this process has on each accelerator that reports it."""
    family = GaugeMetricFamily("qwen_cache_device_memory_bytes", "memory of an accelerator", labels=("device",))
    for device in engine.devices:
        if reports_memory(device):
            family.add_metric([str(device)], device_module(device).memory_reserved(device))
    return family
