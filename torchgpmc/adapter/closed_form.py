"""Covariances of common stationary kernels by their formulas, with derivatives written out where they are known."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, RQKernel, ScaleKernel
from torch import Tensor

from torchgpmc.adapter import stationary
from torchgpmc.kernels import SAAS, saas_lengthscale, saas_slopes

Values = Mapping[str, Tensor]


class ClosedForm:
    """Covariances of a stationary kernel, optionally scaled, by its formula.

    Args:
        profile: correlation from squared scaled distances.
        base: prefix of the base kernel's parameters, e.g. ``"base_kernel."``.
        smoothness: of a Matern kernel, whose derivatives are written out as the Gaussian's are; else ``None``.
        scale: name of the output scale (a variance), or ``None`` for unit variance.
        isotropic: one lengthscale for all input dimensions.
        columns: active input dimensions, or ``None`` for all.
        is_saas: whether the lengthscales are those of a :class:`torchgpmc.kernels.SAAS`, derived from its own parameters.
        constant: a variance that all function values share, added to every covariance.
    """

    def __init__(
        self,
        profile: Callable[[Tensor, Values, str], Tensor],
        smoothness: float | None,
        base: str,
        scale: str | None,
        isotropic: bool,
        columns: Tensor | None,
        is_saas: bool = False,
        constant: float = 0.0,
    ):
        self.profile = profile
        self.smoothness = smoothness
        self.base = base
        self.scale = scale
        self.isotropic = isotropic
        self.columns = columns
        self.is_saas = is_saas
        self.constant = constant

    def plus(self, constant: float) -> ClosedForm:
        """The same with a variance more that all function values share."""
        other = copy.copy(self)
        other.constant = self.constant + constant
        return other

    def lengthscale(self, values: Values) -> Tensor:
        """``(C, 1, L)``."""
        if self.is_saas:
            return saas_lengthscale(values["raw_tausq"], values["raw_relevance"])
        return values[self.base + "raw_lengthscale"]

    def lengthscale_slopes(self, values: Values, lengthscale: Tensor, slope: Tensor) -> dict[str, Tensor]:
        """Derivatives in the parameters behind the lengthscale, given those in itself ``(C, 1, L)``."""
        return saas_slopes(values, lengthscale, slope) if self.is_saas else {self.base + "raw_lengthscale": slope}

    def _active(self, x: Tensor) -> Tensor:
        return x if self.columns is None else x[..., self.columns]

    def bind(self, x1: Tensor, x2: Tensor) -> BoundClosedForm:
        second = self._active(x2)
        first = second if x1 is x2 else self._active(x1)
        return BoundClosedForm(self, stationary.prepare(first, second, self.isotropic))

    def diagonal(self, values: Values, x: Tensor) -> Tensor:
        if self.scale is not None:
            return (values[self.scale][:, None] + self.constant).expand(-1, len(x))
        return x.new_full((len(self.lengthscale(values)), len(x)), 1.0 + self.constant)


class BoundClosedForm(NamedTuple):
    """A closed form at fixed inputs."""

    form: ClosedForm
    inputs: stationary.Inputs

    def __call__(self, values: Values) -> Tensor:
        form, inputs = self.form, self.inputs
        lengthscale = form.lengthscale(values)
        if form.profile is stationary.rbf and not self._follows_inputs():
            covariance = stationary.scaled_rbf(*self._weights(values, lengthscale), inputs)
        else:
            covariance = form.profile(stationary.scaled_square(inputs, lengthscale), values, form.base)
            if form.scale is not None:
                covariance = values[form.scale][:, None, None] * covariance
        return covariance + form.constant if form.constant else covariance

    def rows(self, rows: slice | Tensor) -> BoundClosedForm:
        return BoundClosedForm(self.form, stationary.rows_of(self.inputs, rows))

    def has_slopes(self) -> bool:
        """Whether :meth:`with_slopes` knows the derivatives."""
        return (self.form.profile is stationary.rbf or self.form.smoothness is not None) and not self._follows_inputs()

    def _follows_inputs(self) -> bool:
        return self.inputs.x1.requires_grad or self.inputs.x2.requires_grad

    def _weights(self, values: Values, lengthscale: Tensor) -> tuple[Tensor, Tensor]:
        """Inverse squared lengthscales ``(C, L)`` and the log of the scale ``(C,)``."""
        weights = lengthscale[:, 0].pow(-2)
        return weights, torch.zeros_like(weights[:, 0]) if self.form.scale is None else values[self.form.scale].log()

    def with_slopes(self, values: Values) -> tuple[Tensor, Callable[[Tensor], dict[str, Tensor]]]:
        """K at ``values``, and the derivatives of sum(gradient * K) in the parameters as a function of that gradient; no graph.

        The function takes over the gradient's memory.
        """
        form = self.form
        lengthscale = form.lengthscale(values)
        weights, log_scale = self._weights(values, lengthscale)
        care = stationary.precautions(weights, self.inputs)
        if form.smoothness is None:
            covariance = response = stationary.scaled_rbf_value(weights, log_scale, self.inputs, care)
        else:
            correlation, response = stationary.matern_decay(form.smoothness, stationary.scaled_square(self.inputs, lengthscale))
            covariance = correlation
            if form.scale is not None:
                scale = values[form.scale][:, None, None]
                covariance, response = scale * correlation, scale * response

        def slopes(gradient: Tensor) -> dict[str, Tensor]:
            total = None if response is covariance else (gradient * covariance).sum((1, 2))
            found = stationary.scaled_rbf_slopes(gradient.mul_(response), self.inputs, care)
            slope = (found[0].mul_(weights).unsqueeze(1) / lengthscale).mul_(-2)
            result = form.lengthscale_slopes(values, lengthscale, slope)
            if form.scale is not None:
                result[form.scale] = (found[1] if total is None else total) / values[form.scale]
            return result

        return covariance + form.constant if form.constant else covariance, slopes


def closed_form(kernel: Kernel) -> ClosedForm | None:
    """The closed form of an RBF, Matern or rational quadratic kernel, plain or scaled, or SAAS; ``None`` for any other kernel."""
    if type(kernel) is SAAS:
        matern = stationary.MATERN[2.5]
        return ClosedForm(matern, 2.5, "", "raw_outputscale", kernel.num_dims == 1, kernel.active_dims, is_saas=True)
    scale, base, prefix, smoothness = None, kernel, "", None
    if type(kernel) is ScaleKernel:
        scale, base, prefix = "raw_outputscale", kernel.base_kernel, "base_kernel."
    if type(base) is RBFKernel:
        profile: Callable[[Tensor, Values, str], Tensor] = stationary.rbf
    elif type(base) is MaternKernel:
        profile, smoothness = stationary.MATERN[base.nu], base.nu
    elif type(base) is RQKernel:
        profile = stationary.rational_quadratic
    else:
        return None
    # A ScaleKernel takes over its base kernel's active_dims and calls its formula directly.
    return ClosedForm(profile, smoothness, prefix, scale, base.lengthscale.shape[-1] == 1, kernel.active_dims)
