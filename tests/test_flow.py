"""The mathematics of training, against diffusers: its scheduler, its pipeline's shift, its densities.

The noise levels of training have to be those that inference visits, so the judge is the stock scheduler, set up as the
stock pipeline does it. The loss is compared with its definition, written as loops over samples and tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_shift, retrieve_timesteps
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from torch import Tensor

from qwen_cache import QwenCacheError
from qwen_train.flow import (
    Density,
    NoiseSchedule,
    Weighting,
    flow_loss,
    interpolate,
    pseudo_huber,
    sample_u,
    scheduled_huber_c,
    weighting,
)

TOKENS = [64, 256, 1600, 4096, 8192, 12288]
SAMPLES = 20_000
SAME_DISTRIBUTION = 1.95 * math.sqrt(2 / SAMPLES)
"""Kolmogorov and Smirnov's bound for two samples of that many draws, at one false alarm in a thousand."""


@pytest.fixture
def scheduler(tiny_model: Callable[[str], Path]) -> FlowMatchEulerDiscreteScheduler:
    """The stock scheduler with the settings of the published models."""
    return FlowMatchEulerDiscreteScheduler.from_pretrained(tiny_model("edit-plus") / "scheduler")


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the checks of types, which take longer than to draw a number: for tests with many draws."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def stock_sigmas(scheduler: FlowMatchEulerDiscreteScheduler, steps: int, tokens: int) -> np.ndarray[Any, Any]:
    """The noise levels at which the stock pipeline calls the transformer, from 1 downwards."""
    config = scheduler.config
    mu = calculate_shift(
        tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    retrieve_timesteps(scheduler, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler.sigmas[:-1].double().numpy()


def our_sigmas(schedule: NoiseSchedule, steps: int, tokens: int) -> np.ndarray[Any, Any]:
    return np.array([schedule.sigma(u, tokens) for u in np.linspace(1.0, 1 / steps, steps)])


def distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """The largest difference between two empirical distributions (Kolmogorov and Smirnov's statistic)."""
    values = np.concatenate([a, b])
    shares = [np.searchsorted(np.sort(draws), values, side="right") / len(draws) for draws in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


# ---- noise levels ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("tokens", TOKENS)
def test_sigma_is_the_scheduler_s_as_its_steps_become_many(
    scheduler: FlowMatchEulerDiscreteScheduler, tokens: int
) -> None:
    """With n steps the scheduler divides 1 - sigma by a factor that puts its last level, of u = 1/n, on the terminal.

    We have no last level, so we take the limit: u = 0 is put there. The two differ by about sigma(1/n), that is, by
    less than e^mu / n; a hundred times the steps are a hundredth of the difference.
    """
    schedule = NoiseSchedule.of_config(dict(scheduler.config))
    errors = {n: np.abs(our_sigmas(schedule, n, tokens) - stock_sigmas(scheduler, n, tokens)).max() for n in (50, 5000)}
    for n, error in errors.items():
        assert error < math.exp(schedule.mu(tokens)) / n
    assert errors[5000] == pytest.approx(errors[50] / 100, rel=0.1)


@pytest.mark.parametrize("tokens", TOKENS)
def test_without_a_terminal_sigma_is_the_scheduler_s_at_any_number_of_steps(
    scheduler: FlowMatchEulerDiscreteScheduler, tokens: int
) -> None:
    stock = FlowMatchEulerDiscreteScheduler.from_config({**scheduler.config, "shift_terminal": None})
    schedule = NoiseSchedule.of_config(dict(stock.config))
    np.testing.assert_allclose(our_sigmas(schedule, 50, tokens), stock_sigmas(stock, 50, tokens), rtol=1e-6)


def test_what_the_configuration_leaves_out_is_the_scheduler_s_default() -> None:
    stock = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    schedule = NoiseSchedule.of_config({"use_dynamic_shifting": True})
    np.testing.assert_allclose(our_sigmas(schedule, 50, 4096), stock_sigmas(stock, 50, 4096), rtol=1e-6)


@pytest.mark.parametrize("other", [{"time_shift_type": "linear"}, {"use_beta_sigmas": True}])
def test_a_scheduler_of_another_kind_is_refused(
    scheduler: FlowMatchEulerDiscreteScheduler, other: dict[str, Any]
) -> None:
    """Its noise levels are others: to train on those of the exponential shift would be wrong without a word."""
    with pytest.raises(QwenCacheError, match=next(iter(other))):
        NoiseSchedule.of_config({**scheduler.config, **other})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("tokens", [256, 8192])
def test_histogram_of_training_is_that_of_inference(scheduler: FlowMatchEulerDiscreteScheduler, tokens: int) -> None:
    """Uniform draws, shifted for the resolution, are spread as the steps of a long inference are."""
    schedule, generator = NoiseSchedule.of_config(dict(scheduler.config)), torch.Generator().manual_seed(0)
    sampled = np.array([schedule.sigma(sample_u(generator, "uniform"), tokens) for _ in range(SAMPLES)])
    visited = stock_sigmas(scheduler, SAMPLES, tokens)
    assert distance(sampled, visited) < SAME_DISTRIBUTION
    other = stock_sigmas(scheduler, SAMPLES, 8192 + 256 - tokens)
    assert distance(sampled, other) > 3 * SAME_DISTRIBUTION, "the comparison does not see the resolution"


@pytest.mark.parametrize("terminal", [0.02, None])
def test_sigma_begins_at_the_terminal_ends_at_one_and_grows(terminal: float | None) -> None:
    schedule = NoiseSchedule(shift_terminal=terminal)
    for tokens in TOKENS:
        levels = [schedule.sigma(u, tokens) for u in (0.0, 1e-9, 0.1, 0.5, 0.9, 1.0)]
        assert levels == sorted(levels)
        assert levels[0] == pytest.approx(terminal or 0.0, abs=1e-12)
        assert levels[-1] == 1.0
    middle = [schedule.sigma(0.5, tokens) for tokens in TOKENS]
    assert middle == sorted(middle)
    assert len(set(middle)) == len(TOKENS)


# ---- densities -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("density", "settings"),
    [
        ("uniform", {}),
        ("logit_normal", {"logit_mean": 0.0, "logit_std": 1.0}),
        ("logit_normal", {"logit_mean": -0.7, "logit_std": 0.5}),
        ("mode", {"mode_scale": 1.29}),
        ("mode", {"mode_scale": -0.8}),
    ],
)
def test_densities_are_those_of_diffusers(density: Density, settings: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(1)
    ours = np.array([sample_u(generator, density, **settings) for _ in range(SAMPLES)])
    stock = compute_density_for_timestep_sampling(
        density, SAMPLES, **settings, generator=torch.Generator().manual_seed(2)
    ).numpy()
    assert distance(ours, stock) < SAME_DISTRIBUTION
    assert ours.min() >= 0
    assert ours.max() <= 1
    uniform = np.linspace(0, 1, SAMPLES)
    assert density == "uniform" or distance(ours, uniform) > 3 * SAME_DISTRIBUTION, "nothing tells it from uniform"


def uniform_quantile(p: float) -> float:
    return p


def logit_normal_quantile(p: float) -> float:
    """The sigmoid grows, so it carries the quantiles of the normal distribution over."""
    return 1 / (1 + math.exp(-NormalDist(0.4, 0.8).inv_cdf(p)))


def mode_quantile(p: float, scale: float = 0.9) -> float:
    """The draw falls as the uniform number grows."""
    u = 1 - p
    return 1 - u - scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("tokens", [256, 8192])
@pytest.mark.parametrize(
    ("density", "quantile"),
    [("uniform", uniform_quantile), ("logit_normal", logit_normal_quantile), ("mode", mode_quantile)],
)
def test_histogram_of_training_is_the_density_s_under_the_scheduler_s_shift(
    scheduler: FlowMatchEulerDiscreteScheduler, density: Density, quantile: Callable[[float], float], tokens: int
) -> None:
    """The distribution in closed form: its quantiles are the density's, shifted and stretched by the stock scheduler.

    It stretches by the last level that it is given: that of the smallest u that is not yet nothing.
    """
    schedule, generator = NoiseSchedule.of_config(dict(scheduler.config)), torch.Generator().manual_seed(5)
    draws = [
        sample_u(generator, density, logit_mean=0.4, logit_std=0.8, mode_scale=0.9)  # of each density, what it has
        for _ in range(SAMPLES)
    ]
    sigmas = np.sort([schedule.sigma(u, tokens) for u in draws])
    parts = np.linspace(0.98, 0.02, 49)
    config = scheduler.config
    mu = calculate_shift(
        tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    scheduler.set_timesteps(sigmas=[*(quantile(float(p)) for p in parts), 1e-7], mu=mu)
    levels = scheduler.sigmas[: len(parts)].double().numpy()
    found = np.searchsorted(sigmas, levels) / SAMPLES
    one_sample = 1.95 / math.sqrt(SAMPLES)  # Kolmogorov's bound, at one false alarm in a thousand
    assert np.abs(found - parts).max() < one_sample
    other = np.searchsorted([schedule.sigma(u, 8192 + 256 - tokens) for u in sorted(draws)], levels) / SAMPLES
    assert np.abs(other - parts).max() > 3 * one_sample, "the comparison does not see the resolution"


def test_a_sampled_u_depends_on_the_generator_alone() -> None:
    draws = [sample_u(torch.Generator().manual_seed(7), "mode") for _ in range(2)]
    torch.rand(3)
    assert draws == [sample_u(torch.Generator().manual_seed(7), "mode")] * 2
    assert draws[0] != sample_u(torch.Generator().manual_seed(8), "mode")


# ---- weightings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "cosmap"])
def test_weightings_are_those_of_diffusers(scheme: Weighting) -> None:
    sigmas = torch.linspace(0.02, 1, 99, dtype=torch.float64)
    ours = torch.tensor([weighting(scheme, float(sigma)) for sigma in sigmas])
    torch.testing.assert_close(ours, compute_loss_weighting_for_sd3(scheme, sigmas).float(), rtol=1e-6, atol=0)


def test_cosmap_leaves_the_mean_loss_as_it_is_where_sigma_is_uniform() -> None:
    """The formula of its docstring, with its least and its most."""
    places, parts = np.polynomial.legendre.leggauss(100)
    assert sum(parts * [weighting("cosmap", (1 + place) / 2) for place in places]) / 2 == pytest.approx(1, rel=1e-9)
    weights = np.array([weighting("cosmap", sigma) for sigma in np.linspace(0, 1, 101).tolist()])
    assert (round(weights.min(), 2), round(weights.max(), 2)) == (0.64, 1.27)
    assert weighting("sigma_sqrt", 1.0) == 1
    assert weighting("sigma_sqrt", 0.02) == pytest.approx(2500)


@pytest.mark.parametrize(("scheme", "mean"), [("min_snr", 0.16), ("debiased", 1 / 6)])
def test_weights_by_snr_are_those_of_the_papers_on_their_predictions(scheme: Weighting, mean: float) -> None:
    """Min-SNR weighs the error of the clean image by min(SNR, gamma); debiased that of the noise by 1 / √SNR."""
    generator = torch.Generator().manual_seed(0)
    clean, noise, velocity = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    sigmas = np.linspace(0.001, 0.999, 999)
    for sigma in sigmas:
        noisy = (1 - sigma) * clean + sigma * noise
        of_clean = float((noisy - sigma * velocity - clean).square().mean())
        of_noise = float((noisy + (1 - sigma) * velocity - noise).square().mean())
        snr = ((1 - sigma) / sigma) ** 2
        expected = min(snr, 5.0) * of_clean if scheme == "min_snr" else of_noise / math.sqrt(snr)
        found = weighting(scheme, float(sigma)) * float((velocity - (noise - clean)).square().mean())
        assert found == pytest.approx(expected, rel=1e-9)
    assert np.mean([weighting(scheme, float(sigma)) for sigma in sigmas]) == pytest.approx(mean, rel=0.01)
    assert weighting("min_snr", 0.1, 1.0) == pytest.approx(0.01)
    assert weighting(scheme, 1.0) == 0


# ---- noise and velocity ----------------------------------------------------------------------------------------------


def padded_batch(*sizes: tuple[int, int], channels: int = 8, length: int | None = None) -> dict[str, Tensor]:
    """Random samples of (target, control) tokens, in rows of `length`; padding is 0 as the batches make it."""
    generator = torch.Generator().manual_seed(3)
    length = length or max(map(sum, sizes))
    batch = {
        "clean": torch.zeros(len(sizes), length, channels),
        "noise": torch.zeros(len(sizes), length, channels),
        "is_target": torch.zeros(len(sizes), length, dtype=torch.bool),
    }
    for i, (target, control) in enumerate(sizes):
        batch["clean"][i, : target + control] = torch.randn(target + control, channels, generator=generator)
        batch["noise"][i, :target] = torch.randn(target, channels, generator=generator)
        batch["is_target"][i, :target] = True
    return batch


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0])
def test_a_fixed_shift_is_the_stock_schedulers_for_every_length(shift: float) -> None:
    """The shift of a setting, and the model's own: that of Qwen-Image-2.1-Turbo is 1."""
    stock = FlowMatchEulerDiscreteScheduler(shift=shift)
    stock.set_timesteps(sigmas=np.linspace(1.0, 1 / 50, 50).tolist())
    for schedule in (NoiseSchedule(shift_terminal=None, shift=shift), NoiseSchedule.of_config(dict(stock.config))):
        for tokens in TOKENS:
            np.testing.assert_allclose(our_sigmas(schedule, 50, tokens), stock.sigmas[:-1].double().numpy(), rtol=1e-6)
    assert NoiseSchedule(shift=shift).sigma(0.0, 256) == pytest.approx(0.02)


def test_stock_scheduler_steps_along_our_velocity(scheduler: FlowMatchEulerDiscreteScheduler) -> None:
    """The same conventions: stock `scale_noise` is `interpolate`, and stock steps by noise - clean stay on the line."""
    batch = padded_batch((12, 0))
    clean, noise, is_target = batch["clean"], batch["noise"], batch["is_target"]
    levels = torch.from_numpy(stock_sigmas(scheduler, 5, 256)).float()
    x = interpolate(clean, noise, levels[:1], is_target)
    torch.testing.assert_close(x, noise)  # the first level is 1
    for i, t in enumerate(scheduler.timesteps):
        torch.testing.assert_close(x, scheduler.scale_noise(clean, t[None], noise), rtol=0, atol=1e-6)
        x = scheduler.step(noise - clean, t, x, return_dict=False)[0]
        level = levels[i + 1 : i + 2] if i + 1 < len(levels) else torch.zeros(1)
        torch.testing.assert_close(x, interpolate(clean, noise, level, is_target), rtol=0, atol=1e-6)
    torch.testing.assert_close(x, clean, rtol=0, atol=1e-6)


def test_subtracting_sigma_times_velocity_gives_the_clean_target_and_controls_stay_clean() -> None:
    batch, sigma = padded_batch((6, 4), (3, 5), (9, 0)), torch.tensor([0.02, 0.5, 1.0])
    noisy = interpolate(**batch, sigma=sigma)
    target = batch["is_target"][..., None].expand_as(noisy)
    restored = noisy - sigma[:, None, None] * (batch["noise"] - batch["clean"])
    torch.testing.assert_close(restored[target], batch["clean"][target], rtol=0, atol=1e-6)
    assert torch.equal(noisy[~target], batch["clean"][~target])
    assert not torch.equal(noisy[target], batch["clean"][target])


# ---- loss ------------------------------------------------------------------------------------------------------------

SIZES = ((6, 4), (3, 5), (9, 0))


def plain_loss(velocity: Tensor, batch: dict[str, Tensor], sizes: tuple[tuple[int, int], ...] = SIZES) -> float:
    """The definition: over the samples, the mean of the mean squared error of the target's tokens."""
    losses = []
    for i, (target, _) in enumerate(sizes):
        wanted = batch["noise"][i, :target] - batch["clean"][i, :target]
        losses.append(float(torch.nn.functional.mse_loss(velocity[i, :target], wanted)))
    return sum(losses) / len(losses)


def loss_of(velocity: Tensor, batch: dict[str, Tensor], weight: Tensor) -> float:
    return float(flow_loss(velocity, batch["clean"], batch["noise"], weight, torch.ones(len(weight))).detach())


def random_velocity(batch: dict[str, Tensor]) -> Tensor:
    return torch.randn(batch["clean"].shape, generator=torch.Generator().manual_seed(4))


def test_loss_is_the_mean_over_samples_of_the_target_s_mean_squared_error() -> None:
    batch = padded_batch(*SIZES)
    velocity, weight = random_velocity(batch), batch["is_target"].float()
    assert loss_of(velocity, batch, weight) == pytest.approx(plain_loss(velocity, batch), rel=1e-6)
    assert loss_of(batch["noise"] - batch["clean"], batch, weight) == 0


def test_what_the_model_says_of_controls_and_padding_does_not_count() -> None:
    batch = padded_batch(*SIZES)
    velocity, weight = random_velocity(batch).requires_grad_(), batch["is_target"].float()
    elsewhere = torch.where(batch["is_target"][..., None], velocity, 1e3)
    assert loss_of(elsewhere, batch, weight) == loss_of(velocity, batch, weight)
    loss = flow_loss(velocity, batch["clean"], batch["noise"], weight, torch.ones(3))
    (gradient,) = torch.autograd.grad(loss, velocity)
    assert not gradient[~batch["is_target"]].any()
    assert gradient[batch["is_target"]].all()


@pytest.mark.parametrize("length", [10, 11, 64])
def test_loss_does_not_depend_on_padding_and_is_the_mean_of_single_samples(length: int) -> None:
    batch = padded_batch(*SIZES, length=length)
    velocity, weight = random_velocity(batch), batch["is_target"].float()
    singles = []
    for i, (target, control) in enumerate(SIZES):
        row = slice(i, i + 1), slice(0, target + control)
        singles.append(loss_of(velocity[row], {name: t[row] for name, t in batch.items()}, weight[row]))
    assert loss_of(velocity, batch, weight) == pytest.approx(sum(singles) / len(singles), rel=1e-6)


def test_weights_are_a_mean_so_their_scale_means_nothing() -> None:
    """Equal weights inside and outside of a mask give the plain loss, and doubling all changes nothing."""
    batch = padded_batch(*SIZES)
    velocity, plain = random_velocity(batch), batch["is_target"].float()
    uneven = plain * torch.linspace(0.5, 2, plain.numel()).view_as(plain)
    assert loss_of(velocity, batch, 7 * plain) == pytest.approx(loss_of(velocity, batch, plain), rel=1e-6)
    assert loss_of(velocity, batch, 7 * uneven) == pytest.approx(loss_of(velocity, batch, uneven), rel=1e-6)
    assert loss_of(velocity, batch, uneven) != pytest.approx(loss_of(velocity, batch, plain), rel=1e-3)


def test_weighted_loss_by_hand() -> None:
    """Two tokens, errors 1 and 4, weights 3 and 1: (3 * 1 + 1 * 4) / 4; a sample of error 9 that counts a third."""
    clean, noise = torch.zeros(2, 3, 2), torch.zeros(2, 3, 2)
    velocity = torch.tensor([[[1.0, 1.0], [2.0, -2.0], [9.0, 9.0]], [[3.0, 3.0], [0.0, 0.0], [0.0, 0.0]]])
    weight = torch.tensor([[3.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    first = clean[:1], noise[:1], weight[:1], torch.ones(1)
    assert float(flow_loss(velocity[:1], *first)) == pytest.approx(7 / 4)
    assert flow_loss(velocity[:1].bfloat16(), *first).dtype == torch.float32
    both = flow_loss(velocity, clean, noise, weight, torch.tensor([1.0, 1 / 3]))
    assert float(both) == pytest.approx((7 / 4 + 9 / 3) / 2)


def test_pseudo_huber_is_the_papers_formula_in_double_precision() -> None:
    """arXiv 2403.16728: δ²(√(1 + (d/δ)²) - 1), times 2 as in the trainers' `huber`; δ = exp(t/T · log δ₀)."""
    d = torch.tensor([0.0, 1e-4, -0.03, 0.1, -2.0, 300.0]).reshape(1, -1, 1)
    sigma = torch.tensor([[0.02, 0.1, 0.5, 0.9, 1.0, 1.0]])
    c = scheduled_huber_c(0.1, sigma)
    delta = torch.exp(sigma.double() * math.log(0.1))[..., None]
    expected = 2 * delta**2 * torch.expm1(0.5 * torch.log1p((d.double() / delta) ** 2))
    torch.testing.assert_close(pseudo_huber(d, c).double(), expected, rtol=1e-5, atol=0)
    assert scheduled_huber_c(0.1, torch.tensor([[0.0, 1.0]])).flatten().tolist() == pytest.approx([1, 0.1])
    assert pseudo_huber(torch.tensor([[[1e-3], [1e3]]]), 0.1).flatten().tolist() == pytest.approx(
        [1e-6, 2 * 0.1 * 1e3], rel=1e-3
    )
