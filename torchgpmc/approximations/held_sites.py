"""EP's marginal posterior density of theta with searches for sites that all begin at the same ones: a third of the sweeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations.ep import EP
from torchgpmc.approximations.gaussian_form import LatentProblem
from torchgpmc.approximations.single_precision import are_labels, in_single_precision, may_be_single, rounding_shows
from torchgpmc.density import keep_freed_memory, mask_failures, mask_value
from torchgpmc.models.exact_evidence import has_the_kernels_prior
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import likelihood_parameters
from torchgpmc.models.reverse import by_autograd, prior_part
from torchgpmc.trees import mapped, put
from torchgpmc.types import Resolution

_LOOSE = 0.1  # of the worst datum: evidence is off by a twentieth of a nat, as its error is of second order in the sites'
# Where a mean is sampled, to which what is off at every datum adds up: of 200 counts of little signal its slope was -77 in place of
# 0.6, by sites of 0.02. They are quadratic near their fixed point: this is a sweep more, or none.
_OF_A_MEAN = 1e-3
_RESOLUTION = Resolution(slope=0.05, gain=1e-3, step=0.2)


class _Found(NamedTuple):
    """Of sites that were found."""

    converged: Tensor  # (C,)
    log_evidence: Tensor  # (C,)
    alpha: Tensor  # (C, N)
    slope: Tensor  # (C, N, N), of the log evidence in the covariance
    cavity_mean: Tensor  # (C, N)
    cavity_variance: Tensor  # (C, N)


class HeldSitesMarginal(NamedTuple):
    r"""The density :math:`p(\theta) |dx / d\theta| \, q(y | \theta)` of theta, q by EP from sites that are held.

    Sites are found to 0.1, or to EP's own tolerance, for chains whose weights make up for the rest. Those of labels, to 1e-3 or
    more, are found in single precision, in half the time, where the covariance is not so large that this would show: no label
    tells so much that cavities would lose their digits. A value depends on theta alone, since searches never begin at a
    neighbour's sites; it jumps, by some hundredths, where one takes a sweep more. Gradients are those at the sites that were
    found, as if these were at their fixed point (Seeger 2005): leapfrog steps may follow any field.

    Args:
        model: a :class:`GP` with one latent function and a factorised likelihood.
        approximation: EP's options.
        sites: ``(2 N,)``, what :meth:`EP.importance_density` at a theta that is typical leaves as its ``start``.
    """

    model: GPModel
    approximation: EP
    sites: Tensor

    @classmethod
    def at(cls, model: GPModel, approximation: EP, theta: Tensor) -> HeldSitesMarginal:
        """With the sites that a search from nothing ends with at a theta ``(1, P)`` that is typical."""
        with torch.no_grad():
            found = approximation.importance_density(model, model.prior(theta))
        return cls(model, approximation, torch.nan_to_num(found.start).squeeze(0))

    @property
    def resolution(self) -> Resolution:
        """Of gradients on the scale of the priors, of sites found to some hundredths."""
        return _RESOLUTION

    def roughly(self) -> HeldSitesMarginal:
        """Itself: nothing is cheaper."""
        return self

    def __call__(self, position: Tensor) -> Tensor:
        """The density ``(C,)``, -inf where EP does not converge."""
        return self.value_and_grad(position)[0]

    def draw(self, position: Tensor, generator: torch.Generator) -> tuple[Tensor, tuple[()]]:
        """The density ``(C,)``, and nothing with it."""
        return mask_value(self(position)), ()

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The density ``(C,)`` and the field ``(C, P)``, part by part: half of EP's time from nothing is autograd's otherwise."""
        model, layout, count = self.model, self.model.layout, len(position)
        keep_freed_memory()
        with torch.no_grad():
            at = layout.evaluate(position.detach())
            values: dict[str, Any] = at.hyperparameters.by_module
            prior = prior_part(model, model.bindings.among_latents, model.train_x, values, count)
            covariance = prior.covariance.expand(count, -1, -1).clone(memory_format=torch.contiguous_format)
            covariance.diagonal(dim1=-2, dim2=-1).add_(model.latent_jitter)
            mean = prior.mean.expand(count, -1)
            problem = LatentProblem(model, covariance, mean, likelihood_parameters(values["likelihood"]), model.targets)
            found = self._found(problem)
        # Of the likelihood's parameters what the tilted normalisers have, at cavities that are held.
        likelihood = by_autograd(
            lambda parameters: (
                problem._replace(values=likelihood_parameters(dict(parameters)))
                .tilted_moments(found.cavity_mean, found.cavity_variance)
                .log_normaliser.sum(-1)
            ),
            values["likelihood"],
            layout.sampled_names("likelihood"),
        )
        slopes = {"likelihood": likelihood.slopes(torch.ones_like(found.log_evidence)), **prior.slopes(found.slope, found.alpha)}
        gradient = torch.addcmul(at.log_prior_slope, at.derivative, layout.gather(slopes, position))
        value = torch.where(found.converged, at.log_prior + found.log_evidence, torch.nan)
        return mask_failures(value, gradient)

    @property
    def _tolerance(self) -> float:
        asked = self.approximation.tolerance or _LOOSE
        return min(asked, _OF_A_MEAN) if self.model.layout.sampled_names("mean") else asked

    def _found(self, problem: LatentProblem) -> _Found:
        """In single precision where it will do, else in double: a chain must not be kept from where rounding lets no search end."""
        if not (are_labels(self.model) and may_be_single(self.model, self._tolerance)):
            return self._found_as(problem)
        found = mapped(
            lambda leaf: leaf.to(problem.mean) if leaf.is_floating_point() else leaf, self._found_as(in_single_precision(problem))
        )
        again = (~found.converged | rounding_shows(problem, self.sites.chunk(2)[0])).nonzero().squeeze(-1)
        return put(found, again, self._found_as(problem.select(again))) if len(again) else found

    def _found_as(self, problem: LatentProblem) -> _Found:
        start = self.sites.to(problem.mean).repeat(len(problem.mean), 1)
        found, point = replace(self.approximation, tolerance=self._tolerance).found_from(problem, _LOOSE, start)
        slope = point.slope_in_covariance()
        return _Found(found.converged, found.log_evidence, found.alpha, slope, point.cavity_mean, point.cavity_variance)

    def select(self, rows: Tensor) -> HeldSitesMarginal:
        """Itself: chains share the data."""
        return self


def can_hold_sites(model: GPModel) -> bool:
    """Whether :class:`HeldSitesMarginal` serves: one data set, and f at the data for latents, whose prior is the kernel's own."""
    return model.has_latents_at_data and not model.targets.one_a_chain and has_the_kernels_prior(model)
