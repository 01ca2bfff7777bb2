r"""Sequential importance sampling of f at the data, one datum given those before it, guided by Gaussian sites.

The sites of an approximation, centred at its mean, make of the prior a normal density q,

.. math::
    N(f; m, K) \prod_i s_i(f_i) = Z_q \, q(f), \qquad
    s_i(f_i) = \exp(\alpha_i (f_i - \mu_i) - \tfrac12 W_i (f_i - \mu_i)^2), \qquad
    \mu = m + K \alpha, \quad \log Z_q = -\tfrac12 \alpha' K \alpha - \tfrac12 \log |I + K W|,

whose lower factor C gives :math:`f_i = \mu_i + h_i + C_{ii} e_i`, :math:`h_i = \sum_{j < i} C_{ij} e_j`: under q the e are
independent standard normals, so that :math:`f_i` is normal given those before it, the sites of those after it integrated out. With
its own site divided out (the cavity, always proper) and its likelihood in that place, its density is

.. math:: p_i(e_i \mid h_i) \propto \phi(e_i) \, p(y_i | f_i) / s_i(f_i),

whose normaliser varies little with h, since the sites match moments. e is drawn as :math:`T_{i, h}(z_i)`, z_i standard normal, with
increasing maps T fitted to those densities (:mod:`torchgpmc.numerics.monotone_maps`), and weighed exactly,

.. math::
    w = Z_q \prod_i \frac{p(y_i | f_i)}{s_i(f_i)} \, \frac{\phi(e_i)}{\phi(z_i)} \, T'_{i, h_i}(z_i), \qquad E[w] = p(y | \theta)

whatever the sites and the maps are. Orthant integrals draw truncated normals in the same way, with sites of limits
(:func:`torchgpmc.orthant.matching.guided`; Richard & Zhang 2007).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations import EP, Approximation, GaussianApproximation
from torchgpmc.approximations.gaussian_form import LatentProblem, check_model, problem_of, without_graph, without_it
from torchgpmc.checks import check_count
from torchgpmc.evidence.gaussian_draws import log_likelihoods, or_prior
from torchgpmc.evidence.latent_estimates import LatentEstimate, stacked_latents
from torchgpmc.evidence.net_estimator import NetEstimator, weighed
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import (
    divided_by_root,
    identity_matrix,
    root_under_sites,
    times_vector,
    triangular_log_determinant,
)
from torchgpmc.numerics.monotone_maps import MonotoneMaps, at_place, fitted, places
from torchgpmc.numerics.random import shifted_net, sobol_net

_CHUNK_ELEMENTS = 2**21  # numbers in the largest array of a chunk of thetas
_FIT_ELEMENTS = 200  # a datum, of the maps' fit
_PANEL = 32  # data whose h come from one matrix product; within a panel they come one by one
_REACH = 3.0  # deviations of h under q; beyond them maps stay as they are there
_TINY = 1e-6


@dataclass(frozen=True)
class SequentialImportance:
    """Evidence by sequential importance sampling, for full GPs with one latent and likelihoods that are log-concave, or nearly.

    For many data under wide priors where f is rough, as of many input columns: importance estimates from a normal density of all f
    miss a factor a datum there, and vary by their whole log. What is not normal in each datum's density is fitted here. Where f is
    smooth, a few directions for all data, importance estimates vary no more in the same time. Weights are not bounded.

    Args:
        num_points: points an estimate, each a latent vector.
        approximation: whose sites guide the points, :class:`EP` or :class:`Laplace`.

    Raises:
        ValueError: when an engine prepares a model with several latents, with inducing points, or with a likelihood that does not
            factorise or is neither log-concave nor ``levels_off``; or ``num_points`` below 2.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(link="logit"))
        >>> posterior = tg.sample(model, tg.AMIS(evidence=tg.evidence.SequentialImportance()), num_samples=4000, progress=False)
        >>> posterior.info["log_evidence_error"] < 0.02
        True
    """

    num_points: int = 64
    approximation: Approximation = EP()  # noqa: RUF009  (frozen, so it may be shared)

    def estimator(self, model: GPModel, targets: Targets | None = None) -> SequentialImportanceEstimator:
        """See :class:`torchgpmc.evidence.Evidence`."""
        check_served(model, "SequentialImportance", self.approximation)
        check_count("num_points", self.num_points, 2, ", for instance 64")
        net = sobol_net(self.num_points, model.latent_size, model.train_x)
        return SequentialImportanceEstimator(model, self.approximation, net, model.as_targets(targets))


def check_served(model: GPModel, method: str, approximation: Approximation) -> None:
    """Raises a ``ValueError`` unless the model is a full GP of one latent with a factorised, nearly log-concave likelihood."""
    check_model(model, method, approximation)
    if not model.has_latents_at_data or model.num_latents != 1:
        raise ValueError(
            f"{method} draws one latent function at the data, and {type(model).__name__} has "
            f"{f'{model.num_latents} of them' if model.has_latents_at_data else 'inducing values'}. Expected a model such as "
            f"torchgpmc.GP with a likelihood of one latent; {without_it(model)}."
        )
    likelihood = as_likelihood(model.likelihood)
    if not (likelihood.is_log_concave or likelihood.levels_off):
        raise ValueError(
            f"{method} draws f around one normal density, and {type(model.likelihood).__name__} may give it several modes. "
            f"Expected a log-concave likelihood, such as Bernoulli or Poisson, or Beta; {without_it(model)}."
        )


@dataclass(frozen=True, eq=False)
class SequentialImportanceEstimator(NetEstimator):
    """Unbiased estimates of p(y | theta) from one randomly shifted net a theta, each with latent draws chosen by their weights.

    Made by :class:`SequentialImportance`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> kernel = ScaleKernel(RBFKernel()).requires_grad_(False)
        >>> kernel.outputscale, kernel.base_kernel.lengthscale = 20.0, 0.1  # f is rough
        >>> model = tg.GP(torch.linspace(0, 9, 60), torch.arange(60) % 7 > 3, kernel, tg.likelihoods.Bernoulli(link="logit"))
        >>> theta, generator = torch.zeros(100, 0).double(), torch.Generator().manual_seed(0)
        >>> one_by_one = tg.evidence.SequentialImportance(64).estimator(model).draw(theta, generator).value
        >>> at_once = tg.evidence.importance(model, tg.EP(), num_importance=64).draw(theta, generator).value
        >>> bool(one_by_one.std() < at_once.std() / 4)
        True
    """

    @property
    def auxiliary_size(self) -> int:
        """Standard normals an estimate: a shift of the net, and a number to choose the draw."""
        return self.model.latent_size + 1

    @property
    def _thetas_at_once(self) -> int:
        size = self.model.latent_size
        return _CHUNK_ELEMENTS // (size * max(size, 3 * self.num_points, _FIT_ELEMENTS))

    def _evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None, num_latents: int) -> LatentEstimate:
        model, size = self.model, self.model.latent_size
        prior = model.prior(theta)
        near = or_prior(model, self.approximation.importance_density(model, prior, self.targets, start), prior)
        guide = _guide(prior, near, without_graph(problem_of(model, prior, self.targets)))
        log_weight, e = weighted_points(guide, shifted_net(self.net, auxiliary[:, :size]))
        found = weighed(log_weight, auxiliary[:, size], num_latents)
        kept = e.gather(2, found.chosen.unsqueeze(1).expand(-1, size, -1))
        # v = L^-1 (f - m), by C = L G^-1.
        moved = torch.linalg.solve_triangular(guide.root, kept, upper=False)
        whitened, *others = (guide.whitened_mean.unsqueeze(-1) + moved).unbind(-1)
        log_likelihood = model.log_likelihood(model.at(prior), whitened, self.targets)
        value = torch.where(prior.ok, found.value, -torch.inf)
        more = stacked_latents(others, value, size)
        count = near.num_iterations.to(value) + 1
        return LatentEstimate(value, found.variance, whitened, more, log_likelihood, count, near.converged & prior.ok)


class _Guide(NamedTuple):
    """The density q at C thetas, and what it is beside."""

    problem: LatentProblem
    mean: Tensor  # (C, N), mu
    whitened_mean: Tensor  # (C, N), L^-1 (mu - m)
    slope: Tensor  # (C, N), alpha
    precision: Tensor  # (C, N), W
    root: Tensor  # (C, N, N), G
    factor: Tensor  # (C, N, N), C = L G^-1
    log_normaliser: Tensor  # (C,), log Z_q

    @property
    def diagonal(self) -> Tensor:
        """C_ii ``(C, N)``."""
        return self.factor.diagonal(dim1=-2, dim2=-1)

    def log_site(self, x: Tensor) -> Tensor:
        """log s_i at x = f - mu, data last ``(C, ..., N)``."""
        shape = (len(x),) + (1,) * (x.dim() - 2) + (x.shape[-1],)
        return x * torch.addcmul(self.slope.view(shape), self.precision.view(shape), x, value=-0.5)

    def steepness_of_site(self, x: Tensor) -> Tensor:
        """The slope of that."""
        shape = (len(x),) + (1,) * (x.dim() - 2) + (x.shape[-1],)
        return torch.addcmul(self.slope.view(shape), self.precision.view(shape), x, value=-1)


def _guide(prior: LatentPrior, near: GaussianApproximation, problem: LatentProblem) -> _Guide:
    identity = identity_matrix(prior.factor.shape[-1], prior.factor)
    factor = torch.where(prior.ok.view(-1, 1, 1), prior.factor, identity)  # a harmless stand-in
    root, ok = root_under_sites(factor, near.precision)
    # Where rounding breaks the factorisation, sites without precision still give unbiased weights.
    precision = torch.where(ok.unsqueeze(-1), near.precision, 0.0)
    root = torch.where(ok.view(-1, 1, 1), root, identity)
    whitened_mean = times_vector(factor, near.alpha)
    log_normaliser = -0.5 * whitened_mean.square().sum(-1) - triangular_log_determinant(root)
    mean = prior.mean + (factor @ whitened_mean.unsqueeze(-1)).squeeze(-1)
    return _Guide(problem, mean, whitened_mean, near.alpha, precision, root, divided_by_root(factor, root), log_normaliser)


def _fitted_maps(guide: _Guide, deviation: Tensor) -> MonotoneMaps:
    """Maps to the data's densities, at places where h is so many of its deviations ``(C, N)``."""
    problem, diagonal = guide.problem, guide.diagonal[:, None, None]
    h = _REACH * places(deviation).view(-1, 1, 1) * deviation[:, None, None]
    values = {name: value.unsqueeze(1) for name, value in problem.values.items()}
    y = problem.targets.for_draws()

    def log_densities(e: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.addcmul(h, diagonal, e)
        f = torch.nan_to_num(guide.mean[:, None, None] + x).flatten(1, 2)
        found = problem.model.likelihood_function(values, lambda likelihood: likelihood.derivatives(f, y))
        value, slope = (part.view(x.shape) for part in found[:2])
        return value - guide.log_site(x) - 0.5 * e.square(), diagonal * (slope - guide.steepness_of_site(x)) - e

    return fitted(log_densities, deviation)


def weighted_points(guide: _Guide, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Log weights ``(C, P)``, whose mean weight is the estimate, and points e ``(C, N, P)``, of uniforms ``(C, N, P)``."""
    factor, size = guide.factor, uniforms.shape[1]
    deviation = factor.tril(-1).square().sum(-1).sqrt()
    maps = _fitted_maps(guide, deviation)
    scale = (_REACH * torch.maximum(deviation, _TINY * guide.diagonal)).reciprocal().unsqueeze(-1)
    z = torch.special.ndtri(uniforms)
    values, slopes = maps.parts(z)
    e, h = torch.empty_like(z), torch.empty_like(z)
    for begin in range(0, size, _PANEL):
        end = min(begin + _PANEL, size)
        h[:, begin:end] = factor[:, begin:end, :begin] @ e[:, :begin]
        for i in range(begin, end):
            row = h[:, i : i + 1]
            if i > begin:
                row.baddbmm_(factor[:, i : i + 1, begin:i], e[:, begin:i])
            place = (row[:, 0] * scale[:, i]).clamp_(-1, 1)
            e[:, i] = at_place(values[:, :, i], place)
    slope = at_place(slopes, (h * scale).clamp_(-1, 1))
    x = torch.addcmul(h, guide.diagonal.unsqueeze(-1), e).mT
    problem = guide.problem
    log_likelihood = log_likelihoods(problem.model, problem.values, guide.mean.unsqueeze(1) + x, problem.targets)
    of_maps = (slope.log() + 0.5 * (z.square() - e.square())).sum(1)
    log_weight = guide.log_normaliser.unsqueeze(-1) + log_likelihood - guide.log_site(x).sum(-1) + of_maps
    return torch.nan_to_num(log_weight, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), e
