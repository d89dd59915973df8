"""The cost of 10⁹ samples: bytes, GPU hours, requests and money, as docs/explanation/scale.md quotes it.

    python tools/scale_costs.py

Nothing here is measured on 10⁹ samples. Bytes and FLOPs follow from the sizes of the 20B family (FLOPs of the encoders:
torch's FlopCounterMode on networks of the real sizes), times from 40 % of a GPU's peak. Prices are assumptions, of the
source and date that PRICES names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SAMPLES = 10**9
LAYERS, HEADS, HEAD_DIM, TEXT_WIDTH, CHANNELS = 60, 24, 128, 3584, 64
BYTES = 2  # of a bfloat16
VAE_TFLOP = 2.85  # to encode 1024² pixels, with 2-D convolutions
LATENTS_OF_A_MEGAPIXEL = 4096
PEAK_TFLOPS, SHARE_OF_PEAK = 989.0, 0.4  # H100 SXM, bfloat16 without sparsity
SHARD = 10**9  # bytes: cache.shard_size
BLOCK = 8_000_000  # bytes of one request: storage/remote.py
SHARDS_OF_A_MANIFEST = 400_000  # that fit into its 64 MiB: format/directory.py
ROW_OF_INDEX = 195  # bytes in Parquet: 20,000 rows with random hashes and prompts of ten words
ROW_IN_A_TRAINER, ROW_IN_A_BUILD = 300, 1500  # bytes of memory, at most: the goals that tools/bench_scale.py checks
HOST = 256 * 10**9  # bytes of memory of a machine
PUT_PART = 1 << 24  # bytes of one request when a shard is uploaded: qwen_cache/storage/stores.py
PRICES = {
    "GPU hour": (3.0, "H100 on demand; comparison sites list 2.5 to 4, early 2026"),
    "GB and month": (0.021, "S3 Standard above 500 TB, us-east-1; the provider's list, 2025"),
    "1000 PUT": (0.005, "the same list"),
    "1000 GET": (0.0004, "the same list"),
    "GB to the internet": (0.05, "above 150 TB a month; the same list. Within a region: 0"),
}
"""US dollars, and where the number comes from. They are recalled, not quoted by a shop: ask before you order."""


@dataclass(frozen=True)
class Kind:
    """Samples with a target and one control of equal size."""

    name: str
    latents: int
    """Image tokens of each of the two images."""
    text: int
    """Tokens of the prompt embeddings."""
    text_encoder_tflop: float

    @property
    def bytes(self) -> int:
        """Latents and embeddings; the empty prompt shares all but a few rows."""
        return BYTES * (2 * self.latents * CHANNELS + self.text * TEXT_WIDTH)

    @property
    def encode_tflop(self) -> float:
        return 2 * VAE_TFLOP * self.latents / LATENTS_OF_A_MEGAPIXEL + self.text_encoder_tflop

    @property
    def linear_tflop(self) -> float:
        """The linear layers of a forward pass: 12 · width² weights in each layer, for an image token as for text."""
        return self._tokens * 2 * 12 * self._width**2 * LAYERS / 1e12

    @property
    def attention_tflop(self) -> float:
        """The attention of a forward pass."""
        return self._tokens**2 * 4 * self._width * LAYERS / 1e12

    @property
    def train_tflop(self) -> float:
        """A step of LoRA with gradient checkpointing: forward twice, and backward, which needs no gradients of the
        frozen weights but twice the attention."""
        return 3 * self.linear_tflop + 4 * self.attention_tflop

    @property
    def _tokens(self) -> int:
        return 2 * self.latents + self.text

    @property
    def _width(self) -> int:
        return HEADS * HEAD_DIM


KINDS = (
    Kind("Edit, 1024²", 4096, 1500, 27.8),
    Kind("Edit-2509, 1024²", 4096, 250, 5.1),
    Kind("Edit-2509, 512²", 1024, 250, 5.1),
)


def gpu_hours(tflop: float) -> float:
    return SAMPLES * tflop / (PEAK_TFLOPS * SHARE_OF_PEAK) / 3600


def dollars(amount: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if amount >= size:
            return f"{amount / size:,.3g} {unit}$"
    return f"{amount:.3g} $"


def rows() -> Iterator[tuple[str, list[str]]]:
    """The cost of all samples of each kind."""

    def each(show: object) -> list[str]:
        return [show(kind) for kind in KINDS]  # type: ignore[operator]

    price = {name: value for name, (value, _) in PRICES.items()}
    gets = {kind: SAMPLES * -(-kind.bytes // BLOCK) for kind in KINDS}
    puts = {kind: SAMPLES * kind.bytes / PUT_PART for kind in KINDS}
    yield "bytes of a sample", each(lambda k: f"{k.bytes / 1e6:.1f} MB")
    yield "bytes in all", each(lambda k: f"{SAMPLES * k.bytes / 1e15:.1f} PB")
    yield "shards of 1 GB", each(lambda k: f"{SAMPLES * k.bytes / SHARD / 1e6:.1f} M")
    yield "encoding, TFLOP a sample", each(lambda k: f"{k.encode_tflop:.1f}")
    yield "encoding, GPU hours", each(lambda k: f"{gpu_hours(k.encode_tflop):,.0f}")
    yield "encoding, money", each(lambda k: dollars(gpu_hours(k.encode_tflop) * price["GPU hour"]))
    yield "an epoch of LoRA, TFLOP a sample", each(lambda k: f"{k.train_tflop:.0f}")
    yield "an epoch, GPU hours", each(lambda k: f"{gpu_hours(k.train_tflop):,.0f}")
    yield "an epoch, money", each(lambda k: dollars(gpu_hours(k.train_tflop) * price["GPU hour"]))
    yield "storage, money a month", each(lambda k: dollars(SAMPLES * k.bytes / 1e9 * price["GB and month"]))
    yield "writing, requests", each(lambda k: f"{puts[k] / 1e6:,.0f} M: {dollars(puts[k] / 1e3 * price['1000 PUT'])}")
    yield "an epoch, requests", each(lambda k: f"{gets[k] / 1e9:.0f} G: {dollars(gets[k] / 1e3 * price['1000 GET'])}")


def petabyte() -> Iterator[tuple[str, list[str]]]:
    """The cost of one petabyte in money."""
    price = {name: value for name, (value, _) in PRICES.items()}
    yield "stored, a month", [dollars(1e6 * price["GB and month"])]
    yield "written, in parts of 16 MiB", [dollars(1e15 / PUT_PART / 1e3 * price["1000 PUT"])]
    yield "read in its region, in requests of 8 MB", [dollars(1e15 / BLOCK / 1e3 * price["1000 GET"])]
    yield "read from elsewhere", [dollars(1e6 * price["GB to the internet"])]
    for kind in KINDS:
        hours = gpu_hours(kind.encode_tflop) * 1e15 / (SAMPLES * kind.bytes)
        yield f"encoded, {kind.name}", [f"{dollars(hours * price['GPU hour'])}, {hours:,.0f} GPU hours"]


def limits() -> Iterator[tuple[str, list[str]]]:
    """At how many samples each part of the design reaches its end, and what it needs at 10⁹."""
    fit = [SHARDS_OF_A_MANIFEST * SHARD / kind.bytes for kind in KINDS]
    most = f"{min(fit):.2g} to {max(fit):.2g}"
    needed = f"{max(kind.bytes for kind in KINDS) * SAMPLES / SHARDS_OF_A_MANIFEST / 1e9:.0f} GB"
    yield "the manifest lists every shard (64 MiB)", [most, f"shards of {needed}"]
    for name, row in (("`build`, `inspect`", ROW_IN_A_BUILD), ("a trainer", ROW_IN_A_TRAINER)):
        yield (
            f"memory of {name}, {row:,} bytes a row",
            [f"{HOST / row:.2g}", f"{row * SAMPLES / 1e9:,.0f} GB in each process"],
        )
    yield "one index, written whole by each commit", ["none", f"{ROW_OF_INDEX * SAMPLES / 1e9:.0f} GB a commit"]


def table(first: str, columns: Sequence[str], lines: Iterator[tuple[str, list[str]]]) -> str:
    head = f"| {' | '.join((first, *columns))} |\n|{' --- |' * (1 + len(columns))}"
    return "\n".join((head, *(f"| {' | '.join((name, *values))} |" for name, values in lines)))


def tables() -> list[str]:
    prices = ((name, [f"{value:g} $", source]) for name, (value, source) in PRICES.items())
    return [
        table("10⁹ samples", [kind.name for kind in KINDS], rows()),
        table("a petabyte", ["money"], petabyte()),
        table("limit", ["reached at samples", "needed for 10⁹"], limits()),
        table("price", ["assumed", "source"], prices),
    ]


if __name__ == "__main__":
    print("\n\n".join(tables()))
