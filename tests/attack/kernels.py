"""Random kernels and means: gpytorch's modules beside their formulas, from S values ``{name: (S, *shape)}`` to ``(S, N, M)``."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gpytorch
import numpy as np

from tests.attack.parameters import Parameter, below


class Part(NamedTuple):
    """A module, its parameters in its own order, and its formula."""

    module: Any
    parameters: list[Parameter]
    formula: Callable


def square_distance(lengthscale, x1, x2):
    """Of inputs over lengthscales ``(S, 1, D or 1)``: ``(S, N, M)``."""
    gap = (x1[:, None, :] - x2[None, :, :]) / lengthscale[:, None]
    return (gap**2).sum(-1)


def gaussian(values, x1, x2):
    return np.exp(-0.5 * square_distance(values["raw_lengthscale"], x1, x2))


def linear(values, x1, x2):
    return np.einsum("nd,sad,md->snm", x1, values["raw_variance"] * np.ones(x1.shape[1]), x2)


def polynomial(power):
    return lambda values, x1, x2: (x1 @ x2.T + values["raw_offset"][:, :, None]) ** power


def constant(values, x1, x2):
    return values["raw_constant"][:, :, None] * np.ones((len(x1), len(x2)))


def matern(nu):
    def formula(values, x1, x2):
        r = np.sqrt(2 * nu * square_distance(values["raw_lengthscale"], x1, x2))
        return np.exp(-r) * {0.5: 1, 1.5: 1 + r, 2.5: 1 + r + r**2 / 3}[nu]

    return formula


def rational_quadratic(values, x1, x2):
    alpha = values["raw_alpha"][:, :, None]
    return (1 + square_distance(values["raw_lengthscale"], x1, x2) / (2 * alpha)) ** -alpha


def periodic(values, x1, x2):
    gap = x1[:, None, :] - x2[None, :, :]
    wave = np.sin(math.pi * gap / values["raw_period_length"][:, None]) ** 2
    return np.exp(-2 * (wave / values["raw_lengthscale"][:, None]).sum(-1))


def cosine(values, x1, x2):
    return np.cos(math.pi * np.sqrt(square_distance(values["raw_period_length"], x1, x2)))


def piecewise_polynomial(q):
    """Rasmussen & Williams (2006), eq. 4.21; gpytorch's with q = 2 has a coefficient that is not theirs."""

    def formula(values, x1, x2):
        r = np.sqrt(square_distance(values["raw_lengthscale"], x1, x2))
        j = x1.shape[-1] // 2 + q + 1
        factor = {
            0: 1,
            1: (j + 1) * r + 1,
            3: 1 + (j + 3) * r + (6 * j**2 + 36 * j + 45) / 15 * r**2 + (j**3 + 9 * j**2 + 23 * j + 15) / 15 * r**3,
        }[q]
        return np.maximum(1 - r, 0) ** (j + q) * factor

    return formula


def spectral_mixture(values, x1, x2):
    gap = x1[:, None, :] - x2[None, :, :]  # (N, M, D); a mixture in each dimension, and their product
    scales, means = (values[f"raw_mixture_{name}"][:, :, None] for name in ("scales", "means"))  # (S, Q, 1, 1, D)
    waves = np.exp(-2 * (math.pi * gap * scales) ** 2) * np.cos(2 * math.pi * gap * means)
    return (values["raw_mixture_weights"][:, :, None, None, None] * waves).sum(1).prod(-1)


def leaf(drawing, num_columns):
    """A kernel that is not made of others."""
    rng, kernels = drawing.rng, gpytorch.kernels
    ard = int(num_columns) if rng.uniform() < 0.6 else None
    ard_or_one = {"ard_num_dims": ard}
    every = {"ard_num_dims": num_columns}  # that kernel's default is for one column
    columns = slice(None)
    if num_columns > 1 and rng.uniform() < 0.2:
        only = int(rng.integers(num_columns))
        columns, ard_or_one = slice(only, only + 1), {"active_dims": (only,)}
    nu, q, power = rng.choice([0.5, 1.5, 2.5]), int(rng.choice([0, 1, 3])), int(rng.integers(1, 4))
    kinds = {
        "rbf": (6, lambda: kernels.RBFKernel(**ard_or_one), gaussian),
        "matern": (4, lambda: kernels.MaternKernel(nu=nu, **ard_or_one), matern(nu)),
        "rational quadratic": (2, lambda: kernels.RQKernel(**ard_or_one), rational_quadratic),
        "periodic": (2, lambda: kernels.PeriodicKernel(**(ard_or_one if "active_dims" in ard_or_one else every)), periodic),
        "cosine": (1 if num_columns == 1 else 0, lambda: kernels.CosineKernel(), cosine),
        "linear": (2, lambda: kernels.LinearKernel(**ard_or_one), linear),
        "polynomial": (1, lambda: kernels.PolynomialKernel(power=power), polynomial(power)),
        "piecewise polynomial": (1, lambda: kernels.PiecewisePolynomialKernel(q=q, **ard_or_one), piecewise_polynomial(q)),
        "constant": (1, lambda: kernels.ConstantKernel(), constant),
        "spectral mixture": (1, lambda: kernels.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=num_columns), spectral_mixture),
    }
    shares = np.array([share for share, _, _ in kinds.values()], float)
    _, make, formula = kinds[rng.choice(list(kinds), p=shares / shares.sum())]
    module = make()
    if module.active_dims is None:
        columns = slice(None)
    parameters = [drawing.parameter(module, name) for name, _ in list(module.named_parameters())]
    return Part(module, parameters, lambda values, a, b: formula(values, a[:, columns], b[:, columns]))


def own(values, prefix):
    """The values of a child's parameters under the child's names."""
    return {name.removeprefix(f"{prefix}."): value for name, value in values.items() if name.startswith(f"{prefix}.")}


def scaled(drawing, part):
    module = gpytorch.kernels.ScaleKernel(part.module)
    parameters = [drawing.parameter(module, "raw_outputscale"), *below("base_kernel", part.parameters)]
    return Part(module, parameters, lambda v, a, b: v["raw_outputscale"][:, None, None] * part.formula(own(v, "base_kernel"), a, b))


def combined(kind, reduce, first, second):
    parameters = [*below("kernels.0", first.parameters), *below("kernels.1", second.parameters)]
    return Part(
        kind(first.module, second.module),
        parameters,
        lambda v, a, b: reduce(first.formula(own(v, "kernels.0"), a, b), second.formula(own(v, "kernels.1"), a, b)),
    )


def random_kernel(drawing, num_columns):
    """A leaf, scaled or not; sometimes a sum or product of two."""
    first = leaf(drawing, num_columns)
    chance = drawing.rng.uniform()
    if chance < 0.55:
        return scaled(drawing, first)
    if chance < 0.7:
        return first
    second = leaf(drawing, num_columns)
    if chance < 0.85:
        return combined(gpytorch.kernels.AdditiveKernel, np.add, scaled(drawing, first), second)
    return scaled(drawing, combined(gpytorch.kernels.ProductKernel, np.multiply, first, second))


def random_mean(drawing, num_columns):
    """Formulas from values and inputs ``(N, D)`` to ``(S, N)``."""
    chance = drawing.rng.uniform()
    if chance < 0.6:
        return Part(gpytorch.means.ZeroMean(), [], lambda values, x: np.zeros((1, len(x))))
    if chance < 0.8:
        module = gpytorch.means.ConstantMean()
        parameter = drawing.parameter(module, "raw_constant", -math.inf)
        return Part(module, [parameter], lambda v, x: v["raw_constant"][:, None] * np.ones(len(x)))
    module = gpytorch.means.LinearMean(num_columns)
    parameters = [drawing.parameter(module, name, -math.inf) for name in ("weights", "bias")]
    return Part(module, parameters, lambda v, x: (x @ v["weights"])[..., 0] + v["bias"])
