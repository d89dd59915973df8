"""Flow matching: the mathematics of training, as pure functions.

Noise is at sigma = 1 and data at sigma = 0 (diffusers' convention):

    x_sigma  = (1 - sigma) · x_0 + sigma · noise            (rectified flow, arXiv 2209.03003)
    velocity = noise - x_0                                  what the transformer predicts
    sigma    = stretch(shift(u, mu(S)))                     with u sampled from a density on (0, 1)

Shift and stretch equal those of diffusers' FlowMatchEulerDiscreteScheduler, so training sees the noise levels that
inference visits at each sample's resolution, unless the settings fix the shift.

Letters: B batch, S image tokens (target first, then controls, then padding), C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qwen_cache.errors import ModelError

_SUPPORTED = {
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "invert_sigmas": False,
}
"""FlowMatchEulerDiscreteScheduler settings under which inference visits the noise levels computed here."""

Density = Literal["uniform", "logit_normal", "mode"]
Weighting = Literal["none", "sigma_sqrt", "cosmap", "min_snr", "debiased"]


@dataclass(frozen=True)
class NoiseSchedule:
    """Maps a random number u to a noise level, with the model's scheduler configuration.

    The fields are those of scheduler_config.json (diffusers' FlowMatchEulerDiscreteScheduler), the defaults are
    Qwen-Image's: two lengths of the target in tokens (16×16 pixels each), the shift mu at each of them, and the lowest
    noise level (None for 0). `shift` replaces e^mu for every length: that of a scheduler without
    `use_dynamic_shifting`, or a setting of the training.
    """

    base_image_seq_len: int = 256
    max_image_seq_len: int = 8192
    base_shift: float = 0.5
    max_shift: float = 0.9
    shift_terminal: float | None = 0.02
    shift: float | None = None

    @classmethod
    def of_config(cls, config: dict[str, Any]) -> NoiseSchedule:
        """From scheduler_config.json; missing keys take FlowMatchEulerDiscreteScheduler's defaults.

        Raises:
            ModelError: a setting under which inference would visit other noise levels, such as `use_karras_sigmas`.
        """
        is_dynamic = config.get("use_dynamic_shifting", False)
        supported_values = _SUPPORTED | ({"time_shift_type": "exponential"} if is_dynamic else {})
        for name, supported in supported_values.items():
            if (value := config.get(name, supported)) != supported:
                raise ModelError(
                    "the scheduler's setting is not supported", where=name, expected=supported, found=value
                )
        defaults = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
        values = {name: config.get(name, default) for name, default in defaults.items()}
        shift = None if is_dynamic else float(config.get("shift", 1.0))
        return cls(**values, shift_terminal=config.get("shift_terminal"), shift=shift)

    def mu(self, target_tokens: int) -> float:
        """The shift for a target of this many tokens: `base_shift` at `base_image_seq_len`, `max_shift` at
        `max_image_seq_len`, and linear in between and beyond (diffusers' `calculate_shift`).
        """
        slope = (self.max_shift - self.base_shift) / (self.max_image_seq_len - self.base_image_seq_len)
        return slope * (target_tokens - self.base_image_seq_len) + self.base_shift

    def sigma(self, u: float, target_tokens: int) -> float:
        """The noise level for `u` in [0, 1], in [shift_terminal, 1]; larger for larger images.

            shifted = e^mu / (e^mu + 1 / u - 1)
            sigma   = 1 - (1 - shifted) · (1 - shift_terminal)

        These are FlowMatchEulerDiscreteScheduler's `time_shift_type="exponential"`, then its
        `stretch_shift_to_terminal` in the limit of many steps. A fixed `shift` replaces e^mu: the first line is then
        the scheduler's static shift · u / (1 + (shift - 1) · u).
        """
        shift = math.exp(self.mu(target_tokens)) if self.shift is None else self.shift
        sigma = shift / (shift + (1 / u - 1)) if u > 0 else 0.0
        return 1 - (1 - sigma) * (1 - (self.shift_terminal or 0.0))

    def levels(self, steps: int, target_tokens: int) -> list[float]:
        """The noise levels of a generation in `steps` steps, from 1 on, without the final 0: exactly the scheduler's,
        whose stretch makes the last one `shift_terminal`."""
        unstretched = replace(self, shift_terminal=None)
        levels = [unstretched.sigma(1 - i / steps, target_tokens) for i in range(steps)]
        if self.shift_terminal is None:
            return levels
        factor = (1 - self.shift_terminal) / (1 - levels[-1])
        return [1 - (1 - level) * factor for level in levels]


def sample_u(
    generator: torch.Generator,
    density: Density,
    *,
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
    mode_scale: float = 1.29,
) -> float:
    """Sample from a density on (0, 1), one of Stable Diffusion 3's (arXiv 2403.03206, section 3.1)."""
    if density == "logit_normal":
        normal = float(torch.randn((), generator=generator, dtype=torch.float64))
        return 1 / (1 + math.exp(-(logit_mean + logit_std * normal)))
    u = float(torch.rand((), generator=generator, dtype=torch.float64))
    if density == "mode":
        return 1 - u - mode_scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)
    return u


def weighting(scheme: Weighting, sigma: float, snr_gamma: float = 5.0) -> float:
    """The loss weight of a sample at this noise level, as in diffusers' `compute_loss_weighting_for_sd3`, or by its
    signal-to-noise ratio.

    sigma_sqrt: 1 / sigma², the Karras weighting of a rectified flow; cosmap: 2 / (pi · (1 - 2 sigma + 2 sigma²))
    (arXiv 2403.03206, section 3.1). As in diffusers, they are not normalised: over a uniform sigma, cosmap has a mean
    of 1 and ranges from 0.64 to 1.27; sigma_sqrt is 1 at pure noise and 2500 at sigma = 0.02, where gradient clipping
    decides the update.

    min_snr (arXiv 2303.09556) and debiased (arXiv 2310.08442) are defined for other predictions than the velocity. At a
    given x_sigma = (1 - sigma) · x_0 + sigma · noise, the velocity noise - x_0 = (x_sigma - x_0) / sigma and the noise
    (x_sigma - (1 - sigma) · x_0) / sigma, so the squared errors are related by

        error of x_0    = sigma²       · error of the velocity
        error of noise  = (1 - sigma)² · error of the velocity         SNR = ((1 - sigma) / sigma)²

    min_snr weighs the error of x_0 by min(SNR, gamma): here min((1 - sigma)², gamma · sigma²). debiased weighs the
    error of the noise by 1 / √SNR: here sigma · (1 - sigma). Neither is normalised: over a uniform sigma their means
    are 0.16 (gamma = 5) and 1/6. Both approach 0 at pure noise, where an image's composition is decided.
    """
    if scheme == "sigma_sqrt":
        return sigma**-2
    if scheme == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
    if scheme == "min_snr":
        return min((1 - sigma) ** 2, snr_gamma * sigma**2)
    if scheme == "debiased":
        return sigma * (1 - sigma)
    return 1.0


def interpolate(
    clean: Float[Tensor, "B S C"],
    noise: Float[Tensor, "B S C"],
    sigma: Float[Tensor, " B"] | Float[Tensor, "B S"],
    is_target: Bool[Tensor, "B S"],
) -> Float[Tensor, "B S C"]:
    """The transformer's noisy input `[B, S, C]`: `(1 - sigma) · clean + sigma · noise` at the target's tokens.

    That is x_sigma of rectified flow (arXiv 2209.03003). Controls and padding stay as in `clean`. `sigma` is in 0..1,
    one per sample, or one per token; `clean` and `noise` are normalised latents (C = 64).
    """
    level = sigma.reshape(len(sigma), -1, 1)
    return torch.where(is_target[..., None], (1 - level) * clean + level * noise, clean)


def pseudo_huber(difference: Float[Tensor, "B S C"], c: Float[Tensor, "B _ 1"] | float) -> Float[Tensor, "B S C"]:
    """`2c · (√(d² + c²) - c)`: d² for |d| far below c, 2c · |d| far above it.

    The pseudo-Huber loss of arXiv 2403.16728, scaled as diffusers' and kohya's trainers scale their `huber`. It is
    computed as 2c · d² / (√(d² + c²) + c), which does not cancel.
    """
    square = difference.square()
    return 2 * c * square / ((square + c * c).sqrt() + c)


def scheduled_huber_c(huber_c: float, sigma: Float[Tensor, "B T"]) -> Float[Tensor, "B T 1"]:
    """The c of `pseudo_huber` at each noise level: 1 for clean images, `huber_c` for pure noise.

    The exponential schedule of arXiv 2403.16728, c = exp(sigma · log huber_c), whose t / T is sigma here: of each token
    (T = S), or of each sample (T = 1).
    """
    return (sigma * math.log(huber_c)).exp()[..., None]


def flow_loss(
    velocity: Float[Tensor, "B S C"],
    clean: Float[Tensor, "B S C"],
    noise: Float[Tensor, "B S C"],
    weight: Float[Tensor, "B S"],
    sample_weight: Float[Tensor, " B"],
    target: Float[Tensor, "B S C"] | None = None,
    error_of: Callable[[Tensor], Tensor] = torch.square,
) -> Float[Tensor, ""]:
    """The mean over samples of `sample_weight` times a sample's weighted mean error over tokens, in float32.

        error[b, s] = mean over channels of error_of(velocity - target), the squared error by default
        loss        = mean over b of sample_weight[b] · (sum over s of weight[b, s] · error[b, s]) / (sum of weight[b])

    Without a `target` it is `noise - clean`, that of rectified flow (arXiv 2209.03003). `weight` is 0 for controls and
    padding; its sum must be positive in every sample. Dividing by this sum keeps the effective learning rate
    independent of the size of an edit mask and of padding. `sample_weight` is 1 for equal samples; otherwise the
    product of those that apply: the noise level's `weighting`, the loss weight of the sample's cache, and its target
    tokens relative to the batch's mean.
    """
    errors = sample_errors(velocity, noise - clean if target is None else target, weight, error_of)
    return (sample_weight * errors).mean()


def sample_errors(
    velocity: Float[Tensor, "B S C"],
    target: Float[Tensor, "B S C"],
    weight: Float[Tensor, "B S"],
    error_of: Callable[[Tensor], Tensor] = torch.square,
) -> Float[Tensor, " B"]:
    """The weighted mean error of each sample over its tokens and channels, as in `flow_loss`."""
    error = error_of(velocity.float() - target).mean(dim=-1)
    return (error * weight).sum(dim=1) / weight.sum(dim=1)
