"""`cache` in qwen.yaml."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize

from qwen_cache.errors import ConfigError
from qwen_cache.settings.section import Names, Positive, Section

LOCAL_COPIES_SIZE = 100_000_000_000
"""Disk space for local copies of remote shards, in bytes."""


class CacheConfig(Section):
    path: str = "shards"
    """The folder of the cache, or a URL such as s3://bucket/shards; caches are written to s3, gs and hf://datasets/…."""
    recipe: str | None = None
    """The name of the recipe, if the cache holds several; `default` when building."""
    format: Literal["v1", "v2"] = "v2"
    """The format that `build` writes."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The dtype in which the encoders compute, and in which the cache stores their outputs."""
    vae_device: str = "auto"
    """The device of the VAE, or several with commas; `auto` is the first accelerator, or the CPU."""
    text_device: str = "auto"
    """The device of the text encoder, or several; `auto` is the second accelerator, else the first, or the CPU."""
    text_quantization: Literal["none", "int8", "fp8", "nf4"] = "none"
    """Quantise the language model inside the text encoder to 8 bits (torchao) or 4 (bitsandbytes). This changes
    the embeddings, so it is part of the recipe."""
    text_offload: bool = False
    """Keep the text encoder's layers in host memory, two at a time on the accelerator. The embeddings are the same."""
    vae_batch_pixels: Positive | None = None
    """Pixels per VAE batch, of images of one shape, 8 samples at most; 2 megapixels on CUDA, else one image."""
    text_batch_tokens: Positive | None = None
    """Tokens per text encoder batch, 8 samples at most; 2048 on CUDA. Elsewhere, or with 1: one sample."""
    thumbnails: bool = True
    """Store small images of each sample for `inspect --html`: 4 to 12 kB each. v2 only."""
    store_attention: bool = False
    """Store the attention of each prompt to its first image, for `qwen-train mask-head`: a fifth more bytes. v2 only.
    Experimental."""
    compression: Literal["none", "zstd"] = "none"
    """zstd: 0.7 of the bytes; worth it when reading is slower than 0.8 GB/s. v2 only."""
    shard_size: ByteSize = ByteSize(1_000_000_000)
    """Start a new shard when one reaches this many bytes."""
    commit_every: Positive | None = None
    """Commit whenever this many new samples are there, for runs that follow the build; by default once, at the end.
    Shards end at commits. Samples that replace others wait for the last one."""
    reuse: Names = []
    """Caches to copy samples from in place of encoding them: those with the same content and recipe. They need the same
    format version."""
    local_copies: str | None = None
    """The folder for local copies of remote caches; qwen-cache/shards in the user's cache folder by default."""
    local_copies_size: ByteSize = ByteSize(LOCAL_COPIES_SIZE)
    """Disk space for local copies; the least recently used are removed first."""


def check_compression(format_version: str, compression: str) -> None:
    """ConfigError if the format version does not support this compression."""
    if format_version == "v1" and compression != "none":
        raise ConfigError("format v1 has no compression", found=f"cache.compression={compression}")
