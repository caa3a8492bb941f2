"""What the gradient noise scale says of a batch: progress per sample and per step, learning rates, learning goodput.

With noise scale φ, a step with B samples makes as much progress as 1 / (1 + φ / B) steps along the exact gradient
(McCandlish et al., arXiv 1812.06162, equation 2.7). A sample of a batch of B is then worth (φ + B₀) / (φ + B) samples
of a batch of B₀ (Qiao et al., OSDI 2021, equation 4); a step is worth r = (φ / B₀ + 1) / (φ / B + 1) steps, the
gain of AdaScale (Johnson et al., arXiv 2007.05105, equation 3).
"""

from __future__ import annotations

from typing import Literal

ScalingRule = Literal["linear", "sqrt", "adascale", "adascale-sqrt"]


def statistical_efficiency(noise: float, batch: float, base: float) -> float:
    """Return the progress of one sample of a batch, relative to one sample of another batch.

    Args:
        noise: gradient noise scale, in samples.
        batch: number of samples of a step.
        base: number of samples of the steps that it is compared with.
    """
    return (noise + base) / (noise + batch)


def adascale_gain(noise: float, batch: float, base: float) -> float:
    """Return the progress of one step with a batch, relative to one step with another: efficiency times batch / base.

    Args:
        noise: gradient noise scale, in samples.
        batch: number of samples of a step.
        base: number of samples of the steps that it is compared with.
    """
    return statistical_efficiency(noise, batch, base) * batch / base


def learning_rate_factor(rule: ScalingRule, noise: float, batch: float, base: float) -> float:
    """Return by what factor the learning rate follows the batch.

    Args:
        rule: "linear": batch / base, right while both are far below the noise scale. "sqrt": its root. "adascale":
            the gain, which is linear below the noise scale and levels off above it. "adascale-sqrt": the root of the
            gain, for optimizers that divide by the gradient's size, as Adam.
        noise: gradient noise scale, in samples.
        batch: number of samples of a step.
        base: number of samples that the learning rate was chosen for.
    """
    power = 0.5 if rule in ("sqrt", "adascale-sqrt") else 1.0
    factor = batch / base if rule in ("linear", "sqrt") else adascale_gain(noise, batch, base)
    return float(factor**power)


def choose_rule(divides_gradients: bool) -> ScalingRule:
    """Return the rule by which an optimizer's learning rate follows the batch.

    Args:
        divides_gradients: whether it divides gradients by their size, as Adam.
    """
    return "adascale-sqrt" if divides_gradients else "adascale"


def learning_goodput(samples_per_second: float, noise: float, batch: float, base: float) -> float:
    """Return the throughput times the statistical efficiency: samples of batches of ``base`` that a second is worth.

    Args:
        samples_per_second: throughput with the batch.
        noise: gradient noise scale, in samples.
        batch: number of samples of a step.
        base: number of samples of the steps whose samples it is counted in.
    """
    return samples_per_second * statistical_efficiency(noise, batch, base)
