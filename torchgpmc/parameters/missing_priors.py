"""What to say where parameters have no prior: all of them at once, each with a prior that suits its support."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from torchgpmc.adapter.functional import constraint_of


class Missing(NamedTuple):
    """A parameter that is neither sampled nor fixed."""

    name: str  # as in Posterior.samples
    raw_name: str  # as in model.named_parameters()
    owner: nn.Module
    leaf: str


def suggested_prior(missing: Missing) -> str:
    """A gpytorch prior with the parameter's support, as Python text; its numbers suit standardised data.

    Example:
        >>> from gpytorch.kernels import RBFKernel
        >>> suggested_prior(Missing("kernel.lengthscale", "kernel.raw_lengthscale", RBFKernel(), "raw_lengthscale"))
        'GammaPrior(2.0, 1.0)'
    """
    constraint = constraint_of(missing.owner, missing.leaf)
    if missing.leaf == "raw_noise":
        return "GammaPrior(1.1, 10.0)"  # which leaves small noise possible
    if constraint is None:
        return "NormalPrior(0.0, 1.0)"
    lower, upper = float(constraint.lower_bound.min()), float(constraint.upper_bound.max())
    if math.isinf(lower):
        return "NormalPrior(0.0, 1.0)"
    if math.isfinite(upper):
        return f"UniformPrior({lower:g}, {upper:g})"
    # Above a bound that matters most of the prior has to lie: of degrees of freedom above 2, Gamma(2, 0.1).
    return f"GammaPrior(2.0, {0.2 / lower:g})" if lower >= 1 else "GammaPrior(2.0, 1.0)"


def suggested_ways(missing: Missing) -> str:
    r"""How to give that prior, where the parameter's module takes one, and how to fix the parameter, as Python text.

    gpytorch's constructors ignore options that they do not know, and ``SpectralMixtureKernel``'s some that it lists: an option
    is named only where some constructor lists it and registers priors.

    Example:
        >>> from gpytorch.kernels import RQKernel
        >>> print(suggested_ways(Missing("kernel.alpha", "kernel.raw_alpha", RQKernel(), "raw_alpha")).replace(", or ", "\n"))
        kernel.register_prior("alpha_prior", gpytorch.priors.GammaPrior(2.0, 1.0), "alpha")
        kernel.raw_alpha.requires_grad_(False)
        >>> from gpytorch.kernels import SpectralMixtureKernel
        >>> missing = Missing("kernel.mixture_means", "kernel.raw_mixture_means", SpectralMixtureKernel(2), "raw_mixture_means")
        >>> suggested_ways(missing).split(", gpytorch")[0]
        'kernel.register_prior("mixture_means_prior"'
    """
    value, prior = missing.leaf.removeprefix("raw_"), f"gpytorch.priors.{suggested_prior(missing)}"
    path = re.sub(r"\.(\d+)(?=\.)", r"[\1]", missing.raw_name)  # as Python indexes modules in a list
    fixed = f"{path}.requires_grad_(False)"
    constructors = (vars(cls)["__init__"] for cls in type(missing.owner).__mro__ if "__init__" in vars(cls))
    if any(_registers(constructor, f"{value}_prior") for constructor in constructors):
        return f"{value}_prior={prior}, or {fixed}"
    if hasattr(missing.owner, "register_prior"):
        return f'{path.removesuffix(missing.leaf)}register_prior("{value}_prior", {prior}, "{value}"), or {fixed}'
    return fixed


def _registers(constructor: Any, option: str) -> bool:
    """Whether a constructor has an option, and registers priors at all."""
    code = getattr(constructor, "__code__", None)
    return option in inspect.signature(constructor).parameters and (code is None or "register_prior" in code.co_names)


def missing_priors_message(missing: Sequence[Missing]) -> str:
    """One sentence of what is expected, and a line a parameter."""
    count = len(missing)
    subject = f"parameter '{missing[0].name}' has no prior" if count == 1 else f"{count} parameters have no prior"
    lines = [f"  {entry.name}: {suggested_ways(entry)}" for entry in missing]
    return (
        f"{subject}. Expected every parameter to be sampled or fixed: give it a gpytorch prior, in its module's constructor or by "
        f"`register_prior`, or fix it. For standardised data, for instance:\n" + "\n".join(lines)
    )
