"""Priors that gpytorch has not, and how a property of a module gets one."""

from __future__ import annotations

from functools import partial
from typing import Any

import gpytorch
import torch
from gpytorch.priors import GammaPrior, Prior
from torch import Tensor
from torch.distributions import constraints

from torchgpmc.checks import check_positive


def register_prior_of(module: gpytorch.Module, name: str, prior: Prior) -> None:
    """Puts ``prior`` on what the attribute ``name`` of a module gives, by functions that can be pickled, unlike gpytorch's.

    Args:
        module: whose ``initialize`` takes the attribute.
        name: of an attribute, for instance a property, in constrained values.
        prior: on it.

    Example:
        >>> import torchgpmc as tg
        >>> kernel = tg.kernels.White(0.5)
        >>> register_prior_of(kernel, "variance", GammaPrior(2.0, 4.0))
        >>> [(name, float(read(module))) for name, module, prior, read, assign in kernel.named_priors()]
        [('variance_prior', 0.5)]
    """
    module.register_prior(f"{name}_prior", prior, partial(_read, name), partial(_assign, name))


def _read(name: str, module: Any) -> Tensor:
    value: Tensor = getattr(module, name)
    return value


def _assign(name: str, module: Any, value: Tensor) -> None:
    module.initialize(**{name: value})


def with_named_closures(module: Any) -> Any:
    """The module, whose parts' priors get functions that can be pickled in place of gpytorch's own lambdas.

    Args:
        module: whose own functions are kept, and changed in place.

    Example:
        >>> import pickle
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))  # gpytorch's own could not be pickled
        >>> pickle.loads(pickle.dumps(with_named_closures(kernel))).lengthscale_prior.rate
        tensor(4.)
    """
    for part in module.modules():
        for prior_name, (prior, closure, _) in getattr(part, "_priors", {}).items():
            name, kind = prior_name.removesuffix("_prior"), getattr(closure, "__qualname__", "")
            if kind.endswith("<lambda>") and closure.__module__.startswith("gpytorch.") and hasattr(part, name):
                part._priors[prior_name] = (prior, partial(_read, name), partial(_assign, name))
    return module


class ShiftedGammaPrior(GammaPrior):
    r"""x = shift + z with z ~ Gamma(concentration, rate).

    With (0.9, 10, 1e-4) BoTorch's prior of a noise variance: the likelihood then needs
    ``noise_constraint=GreaterThan(1e-4)``, or ``Positive()``.

    Args:
        concentration: of z; its mean is ``concentration / rate``.
        rate: of z.
        shift: the least value of x, positive.

    Raises:
        ValueError: a number that is not positive.

    Example:
        >>> import torch
        >>> ShiftedGammaPrior(0.9, 10.0, 1e-4).log_prob(torch.tensor(0.05)).exp()
        tensor(6.0905)
    """

    def __init__(self, concentration: float, rate: float, shift: float):
        for name, value in (("concentration", concentration), ("rate", rate), ("shift", shift)):
            check_positive(name, value)
        super().__init__(concentration, rate)
        self.shift = float(shift)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.greater_than(self.shift)

    @property
    def mean(self) -> Tensor:
        return self.shift + super().mean

    @property
    def mode(self) -> Tensor:
        return self.shift + super().mode

    def log_prob(self, x: Tensor) -> Tensor:
        """Elementwise; -inf up to the shift."""
        above = x > self.shift
        return torch.where(above, super().log_prob(torch.where(above, x - self.shift, 1.0)), -torch.inf)

    def cdf(self, x: Tensor) -> Tensor:
        """P(x' < x), elementwise."""
        return super().cdf((x - self.shift).clamp_min(0.0))

    def rsample(self, sample_shape: torch.Size = torch.Size(), **options: Any) -> Tensor:  # noqa: B008  # torch's own signature
        return self.shift + super().rsample(sample_shape, **options)  # since 2.14 with a generator
