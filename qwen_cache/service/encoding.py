"""A build whose encoders are on a server."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from qwen_cache.encode.builder import (
    BuildJob,
    Encoded,
    FindLatents,
    RunningEncoders,
    check_family,
    check_tokens,
    most_bytes,
    plan_build,
    read_job,
)
from qwen_cache.encode.plan import PlannedSample, read_again
from qwen_cache.encode.validation import check_wanted, is_wanted, read_validation
from qwen_cache.errors import ConfigError, SourceError
from qwen_cache.format import directory
from qwen_cache.format.cache import Sample
from qwen_cache.format.update import Existing
from qwen_cache.service.client import MAX_SAMPLE, Client, sample_parts, served_model, served_settings
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import check_compression
from qwen_cache.sources.rows import SLIDER, Row
from qwen_cache.sources.sizes import Resolution
from qwen_cache.storage.remote import location
from qwen_cache.storage.stores import destination
from qwen_cache.terminal import counting, print_problems

THREADS = 16  # requests at a time: several are in each batch of the server's lanes
IN_FLIGHT = 48  # samples ahead of the writer


def prepare_all_at(config: Config, client: Client, *, alone: bool) -> list[BuildJob]:
    """`validation.prepare_with_validation` with the recipe of a server; the errors of `prepare_at`."""
    description = client.description
    served = served_settings(config, description, client.url, all_given=True)
    model = served_model(description)
    if served.data.edit_mask in ("head", "auto"):
        what, do = "edit masks of a mask head are not built through a server", "build where the encoders are"
        raise ConfigError(what, where=client.url, found=f"data.edit_mask={served.data.edit_mask}", do=do)
    check_wanted(config, alone=alone)
    validation = []
    if is_wanted(config):
        if description.format_version == 1:
            do = "leave the prompts out, or start the server with --format v2"
            raise ConfigError("format v1 cannot hold images to generate", where=client.url, do=do)
        job = read_validation(served, model, check_tokens)  # the server checks the lengths
        validation = [replace(job, recipe=description.recipe, vae_encoders=description.vae_encoders)]
    return validation if alone else [prepare_at(config, None, client), *validation]


def prepare_at(config: Config, source: str | None, client: Client) -> BuildJob:
    """`builder.prepare_build` with the recipe of a server.

    ConfigError if the server cannot be used or settings contradict it, SourceError if the source cannot be read.
    """
    description = client.description
    config = served_settings(config, description, client.url)
    source, folder, model = source or config.data.source, destination(config.cache.path), served_model(description)
    if directory.is_same(location(source), folder):
        what = "the cache would be among the images that it is made from"
        raise ConfigError(what, where=config.cache.path, do="choose another folder with --out")
    Resolution.of(config.data)
    check_compression(config.cache.format, config.cache.compression)
    check_family(model, config)
    recipe = description.recipe
    masks = description.format_version > 1 and config.data.edit_mask != "none"
    phrases = "mask_head" in recipe or "attention" in recipe
    job = read_job(config, source, folder, model, check_tokens, masks=masks, phrases=phrases)
    return replace(job, recipe=recipe, vae_encoders=description.vae_encoders)


def plan_at(config: Config, source: str, client: Client) -> tuple[BuildJob, list[PlannedSample]]:
    """The samples of a source as a build into an empty folder would have them.

    Prints the problems of rows; SourceError unless the others may be used.
    """
    job = prepare_at(config, source, client)
    with counting("reading the source", total=len(job.rows)) as on_rows:
        plan = plan_build(job, Existing.empty(job.format_version), lambda: on_rows(1))
    print_problems(plan.problems)
    if not plan.samples or (plan.problems and config.data.on_error == "stop"):
        do = "fix these rows, or skip them with data.on_error=skip"
        raise SourceError("nothing can be trained", where=source, do=do)
    return job, list(plan.samples)


def text_tokens(client: Client, samples: Sequence[PlannedSample]) -> list[int]:
    """The exact length of each sample's prompt embeddings, without encoding it."""
    prompts = [(sample.row.prompt, sample.originals[1:]) for sample in samples]
    return client.lengths(prompts)


def encoded(client: Client, job: BuildJob, sample: PlannedSample) -> Sample:
    """A sample, sent if the server does not know it. SourceError if it cannot be encoded."""
    most = min(MAX_SAMPLE, most_bytes(sample, job))
    try:
        return client.fetch(sample.key, lambda: (fields_of(sample.row), files_of(sample)), most)
    except SourceError as error:
        raise SourceError(f"{sample.row.name}: {error.fault}", where=sample.row.where, do=error.do) from None


class ServerEncoders(RunningEncoders):
    """A server in place of the lanes of this machine. It takes known latents from caches of its own."""

    def __init__(self, client: Client, job: BuildJob) -> None:
        self._client, self._job = client, job
        self._threads = ThreadPoolExecutor(THREADS, "encode-at")

    def close(self) -> None:
        """Requests that are left, after an error or Ctrl-C, are not waited for: the client ends them when it closes."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def submit(self, sample: PlannedSample, known: FindLatents | None = None) -> Future[Encoded]:
        return self._threads.submit(lambda: sample_parts(encoded(self._client, self._job, sample)))

    def result(self, work: Future[Encoded]) -> Encoded:
        return work.result()


def fields_of(row: Row) -> dict[str, str]:
    """The text fields of a row for a server."""
    fields = {"prompt": row.prompt, "name": row.name}
    fields |= {"phrase": str([list(span) for span in row.phrase])} if row.phrase else {}
    fields |= {"seed": str(row.seed)} if row.seed is not None else {}
    fields |= dict(zip(SLIDER, row.slider, strict=True)) if row.slider else {}
    if row.target is None:
        fields["generate"] = "1"
    if row.size is not None:
        fields |= {"width": str(row.size[0]), "height": str(row.size[1])}
    return fields


def files_of(sample: PlannedSample) -> list[tuple[str, bytes]]:
    """The images of a sample for a server, unchanged since they were planned."""
    row, inputs = sample.row, sample.inputs
    named = [("target", row.target, inputs.target)]
    named += [("control", file, digest) for file, digest in zip(row.controls, inputs.controls, strict=True)]
    named += [("mask", row.mask, inputs.mask), ("rejected", row.rejected, inputs.rejected)]
    return [(name, read_again(file, digest)) for name, file, digest in named if file is not None and digest is not None]
