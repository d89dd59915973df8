"""The cost of a million and of a billion samples: bytes, GPU hours, requests and money; and where the design ends.

    python tools/scale_costs.py

Nothing here is measured on 10⁹ samples. Bytes and FLOPs follow from the sizes of the 20B family (FLOPs of the encoders:
torch's FlopCounterMode on networks of the real sizes), times from 40 % of a GPU's peak. Prices are assumptions, of the
source and date that PRICES names. The first table is in docs/howto/use-more-machines.md.

A billion edits keep 100 GPUs busy with encoding for ten days, and 1,000 GPUs with an epoch of training for 20 days. To
store them for a month costs three and a half times as much as to encode them: for a single pass over new data, encode
shortly before training, and remove what has been trained. Requests cost nothing next to that, since shards are large.
Reading from outside the bucket's region costs more for one epoch than two months of storage.

Where the design breaks, in this order. The manifest lists every shard, and readers refuse one above 64 MiB;
cache.shard_size raises that limit in proportion, but a lost worker then repeats more. Every process that builds,
inspects or trains holds the columns that it needs of all rows; of eight processes on a machine each can have an eighth
of its memory. Every commit writes the one index whole: with a commit after every ten million samples of a billion, ten
terabytes in all. An epoch is one permutation of all rows: 8 GB, minutes to sort, and a random read for every sample.
`verify` reads every byte: at 6 GB/s a core, 11.8 PB take 550 core hours. Keys are not on the list: of 128 bits, two
among 10⁹ are equal with a probability of 10⁻²¹.

What would be changed then: an index in parts, of which a commit adds one (a new format version); a manifest of
manifests, by the hash of each list; an order in two steps, parts and then rows within a window of parts, which holds a
few hundred MB and shares reads, but is less random; thin rows of token counts, an offset and a hash, 60 bytes, with
names and prompts in a file of their own; `verify` by sampling, with the probability of missing damage; prefix
embeddings stored once for all prompts of an image, or in eight bits, where a test shows that the loss does not suffer.
All of this makes smaller caches harder to read for other programs, so it waits for a user with 10⁸ rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

    def each(show: Callable[[Kind], str]) -> list[str]:
        return [show(kind) for kind in KINDS]

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


def million() -> Iterator[tuple[str, list[str]]]:
    """The figures that a reader decides by, for 10⁶ samples."""

    def each(show: Callable[[Kind], str]) -> list[str]:
        return [show(kind) for kind in KINDS]

    month, share = PRICES["GB and month"][0], 1e6 / SAMPLES
    yield "cache", each(lambda k: f"{k.bytes / 1e6:.1f} TB")
    yield "stored in S3 for a month", each(lambda k: f"{1e6 * k.bytes / 1e9 * month:.0f} $")
    yield "encoding, H100 hours", each(lambda k: f"{share * gpu_hours(k.encode_tflop):.1f}")
    yield "an epoch of LoRA, H100 hours", each(lambda k: f"{share * gpu_hours(k.train_tflop):.0f}")


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
            f"memory of {name}, at most {row:,} bytes a row",
            [f"{HOST / row:.2g}", f"{row * SAMPLES / 1e9:,.0f} GB in each process"],
        )
    yield "one index, written whole by each commit", ["none", f"{ROW_OF_INDEX * SAMPLES / 1e9:.0f} GB a commit"]


def table(first: str, columns: Sequence[str], lines: Iterator[tuple[str, list[str]]]) -> str:
    head = f"| {' | '.join((first, *columns))} |\n|{' --- |' * (1 + len(columns))}"
    return "\n".join((head, *(f"| {' | '.join((name, *values))} |" for name, values in lines)))


def tables() -> list[str]:
    prices = ((name, [f"{value:g} $", source]) for name, (value, source) in PRICES.items())
    return [
        table("10⁶ samples", [kind.name for kind in KINDS], million()),
        table("10⁹ samples", [kind.name for kind in KINDS], rows()),
        table("a petabyte", ["money"], petabyte()),
        table("limit", ["reached at samples", "needed for 10⁹"], limits()),
        table("price", ["assumed", "source"], prices),
    ]


if __name__ == "__main__":
    print("\n\n".join(tables()))
