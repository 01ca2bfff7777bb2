r"""Sequential importance sampling of several latent functions at the data, one datum given those before it, from candidates.

Of K functions of which data see differences alone, x are the K - 1 coordinates of these at each datum
(:func:`torchgpmc.approximations.class_sites.differences`). Sites make of the prior a normal density q, as in
:mod:`torchgpmc.evidence.sequential_importance`, but that :math:`\alpha_i` and :math:`W_i` are a vector and a matrix here; its lower
factor C gives :math:`x_i = \mu_i + h_i + C_{ii} e_i`, the e standard normal vectors under q. With its own site divided out and
its likelihood in that place, e has the density

.. math:: p_i(e \mid h_i) \propto \phi(e) \, p(y_i | x_i) / s_i(x_i).

J candidates for e are points of a net, shifted at random, each with the density g(e), and one of them is chosen by its weight,

.. math::
    w_{ij} = \frac{\phi(e_{ij})}{g(e_{ij})} \frac{p(y_i | x_{ij})}{s_i(x_{ij})}, \qquad
    w = Z_q \prod_i \frac1J \sum_j w_{ij}, \qquad E[w] = p(y | \theta)

whatever the sites are: the choice and the mean make one proper weight (Naesseth, Lindsten & Schon 2015, nested sequential Monte
Carlo). So a density of K - 1 dimensions needs neither a normaliser nor a fit. Candidates have longer tails than the normal density,
:math:`e = z + c z^3`, since a site matches two moments of what is a soft corner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import ClassApproximation, ClassEP
from torchgpmc.approximations.class_sites import differences
from torchgpmc.approximations.gaussian_form import LatentProblem, check_model, problem_of, without_graph
from torchgpmc.checks import check_count
from torchgpmc.evidence.gaussian_draws import or_prior
from torchgpmc.evidence.latent_estimates import LatentEstimate, stacked_latents
from torchgpmc.evidence.net_estimator import NetEstimator, weighed
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import cholesky, identity_matrix, inverse_lower, times_blocks, triangular_log_determinant
from torchgpmc.numerics.random import shifted_net, sobol_net

_CHUNK_ELEMENTS, _CHUNK_CANDIDATES = 2**21, 2**16  # of a chunk of thetas: in the largest matrix, and of a datum
_PANEL = 16  # data whose h come from one matrix product; within a panel they come one by one
_TAIL = 0.05  # c
_OUTERMOST = 1e-7  # of the uniforms -1 to 1 behind candidates, in single precision


@dataclass(frozen=True)
class SequentialCandidates:
    """Evidence of several classes, one datum after another, each chosen among candidates: ``Softmax``, full GPs.

    For rough f, of many columns or large outputscales, where importance estimates from a normal density of all f vary by their
    whole log. Where f is smooth, a few directions for all data, importance estimates vary no more in the same time.

    Args:
        num_points: points an estimate, each a latent vector.
        num_candidates: for each datum of each point.
        approximation: whose sites guide the points.

    Raises:
        ValueError: when an engine prepares a model that :class:`torchgpmc.approximations.ClassEP` does not serve; or
            ``num_points`` or ``num_candidates`` below 2.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 9), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> likelihood = tg.likelihoods.Softmax(num_classes=3, mixing_weights=False)
        >>> model = tg.GP(x, torch.arange(9) // 3, kernel, likelihood)
        >>> method = tg.AMIS(evidence=tg.evidence.SequentialCandidates(), begin=tg.AtPrior())
        >>> posterior = tg.sample(model, method, num_samples=2000, progress=False)
        >>> posterior.info["log_evidence_error"] < 0.02
        True
    """

    num_points: int = 64
    num_candidates: int = 32
    approximation: ClassEP = ClassEP()  # noqa: RUF009  (frozen, so it may be shared)

    def estimator(self, model: GPModel, targets: Targets | None = None) -> SequentialCandidatesEstimator:
        """See :class:`torchgpmc.evidence.Evidence`."""
        check_model(model, "SequentialCandidates", self.approximation)
        ClassEP().check(model)
        check_count("num_points", self.num_points, 2, ", for instance 64")
        check_count("num_candidates", self.num_candidates, 2, ", for instance 32")
        net = sobol_net(self.num_points, model.latent_size, model.train_x)
        candidates = sobol_net(self.num_candidates, model.num_latents - 1, model.train_x)
        return SequentialCandidatesEstimator(model, self.approximation, net, model.as_targets(targets), candidates)


@dataclass(frozen=True, eq=False)
class SequentialCandidatesEstimator(NetEstimator):
    """Unbiased estimates of p(y | theta) of several classes, each with latent draws chosen by their weights.

    Made by :class:`SequentialCandidates`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> kernel, likelihood = ScaleKernel(RBFKernel()).requires_grad_(False), tg.likelihoods.Softmax(num_classes=3)
        >>> kernel.outputscale, kernel.base_kernel.lengthscale = 30.0, 0.1  # f is rough
        >>> model = tg.GP(torch.linspace(0, 9, 40), torch.arange(40) % 3, kernel, likelihood)
        >>> theta, generator = torch.zeros(20, 0).double(), torch.Generator().manual_seed(0)
        >>> one_by_one = tg.evidence.SequentialCandidates().estimator(model).draw(theta, generator).value
        >>> at_once = tg.evidence.importance(model, tg.approximations.ClassEP(), num_importance=64).draw(theta, generator).value
        >>> bool(one_by_one.std() < at_once.std() / 4)
        True
    """

    candidates: Tensor  # (K - 1, J); the net has K - 1 shifts of these a datum, and where to choose

    @property
    def auxiliary_size(self) -> int:
        """Standard normals an estimate: a shift of the net, what functions share at the data, and a number to choose the draw."""
        return len(self.net) + len(self.model.train_x) + 1

    @property
    def _thetas_at_once(self) -> int:
        size = len(self.model.train_x) * len(self.candidates)
        by_candidates = _CHUNK_CANDIDATES // (self.num_points * self.candidates.shape[-1])
        return min(_CHUNK_ELEMENTS // size**2, by_candidates)

    def _evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None, num_latents: int) -> LatentEstimate:
        model = self.model
        shift, shared, last = auxiliary.split([len(self.net), len(model.train_x), 1], -1)
        prior = model.prior(theta)
        near = or_prior(model, self.approximation.importance_density(model, prior, self.targets, start), prior)
        guide = _guide(prior, near, without_graph(problem_of(model, prior, self.targets)))
        log_weight, e = weighted_points(guide, shifted_net(self.net, shift), self.candidates)
        found = weighed(log_weight, last.squeeze(-1), num_latents)
        kept = e.gather(2, found.chosen.unsqueeze(1).expand(-1, e.shape[1], -1))
        whitened, *others = guide.whitened(kept, shared).unbind(1)
        log_likelihood = model.log_likelihood(model.at(prior), whitened, self.targets)
        value = torch.where(prior.ok, found.value, -torch.inf)
        more = stacked_latents(others, value, model.latent_size)
        count = near.num_iterations.to(value) + 1
        return LatentEstimate(value, found.variance, whitened, more, log_likelihood, count, near.converged & prior.ok)


class _Guide(NamedTuple):
    """The density q at C thetas, and what it is beside. Data come before coordinates where vectors are stacked."""

    problem: LatentProblem
    basis: Tensor  # (K - 1, K)
    mean: Tensor  # (C, N, K), mu, of f
    whitened_mean: Tensor  # (C, K - 1, N), L^-1 of mu's coordinates
    slope: Tensor  # (C, N, K - 1), alpha
    precision: Tensor  # (C, N, K - 1, K - 1), W
    inverse: Tensor  # (C, N (K - 1), N (K - 1)), G^-1
    factor: Tensor  # (C, N (K - 1), N (K - 1)), C = L G^-1
    log_normaliser: Tensor  # (C,), log Z_q

    def whitened(self, e: Tensor, shared: Tensor) -> Tensor:
        """v ``(C, J, V)`` of J draws e ``(C, N (K - 1), J)`` and of what functions share ``(C, N)``, of which data say nothing."""
        count, size, latents = self.mean.shape
        moved = (self.inverse @ e).view(count, size, latents - 1, -1)
        x = self.whitened_mean.unsqueeze(1) + moved.permute(0, 3, 2, 1)
        v = self.basis.mT @ x + shared.view(count, 1, 1, size) / latents**0.5
        return v.flatten(2)


def _guide(prior: LatentPrior, near: ClassApproximation, problem: LatentProblem) -> _Guide:
    latents = problem.model.num_latents
    basis = differences(latents, prior.mean)
    count, size = prior.mean.shape
    factor = torch.where(prior.ok.view(-1, 1, 1), prior.factor, identity_matrix(size, prior.factor))  # a harmless stand-in
    precision = basis @ near.precision @ basis.mT
    root, ok = _root(factor, precision)
    # Where rounding breaks the factorisation, sites without precision still give unbiased weights.
    precision = torch.where(ok.view(-1, 1, 1, 1), precision, 0.0)
    root = torch.where(ok.view(-1, 1, 1), root, identity_matrix(root.shape[-1], root))
    slope = basis @ near.alpha.view(count, latents, size)
    whitened_mean = times_blocks(slope.flatten(1), factor).view_as(slope)
    log_normaliser = -0.5 * whitened_mean.square().sum((1, 2)) - triangular_log_determinant(root)
    centred = times_blocks(whitened_mean.flatten(1), factor.mT).view_as(slope)
    mean = prior.mean.unsqueeze(-1) + (basis.mT @ centred).mT
    inverse = inverse_lower(root).contiguous()
    moved = (factor @ inverse.view(count, size, -1)).view_as(inverse)
    return _Guide(problem, basis, mean, whitened_mean, slope.mT, precision, inverse, moved, log_normaliser)


def _root(factor: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`torchgpmc.numerics.linalg.root_under_sites`, of sites with a matrix a datum ``(C, N, K - 1, K - 1)``."""
    count, size, dimension, _ = precision.shape
    inner = factor.new_empty(count, size, dimension, size, dimension)
    for a in range(dimension):
        for b in range(a + 1):
            inner[:, :, a, :, b] = inner[:, :, b, :, a] = factor.mT @ (precision[:, :, a, b].unsqueeze(-1) * factor)
    inner = inner.view(count, size * dimension, -1)
    inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
    flipped, ok = cholesky(inner.flip(-2, -1))
    return flipped.flip(-2, -1).mT, ok


def weighted_points(guide: _Guide, uniforms: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Log weights ``(C, P)``, whose mean weight is the estimate, and points e ``(C, N (K - 1), P)``.

    Args:
        guide: at C thetas.
        uniforms: ``(C, N K, P)``.
        candidates: a net ``(K - 1, J)``, of which each datum and point has a shifted one.
    """
    count, size, dimension = guide.slope.shape
    num_points = uniforms.shape[-1]
    uniforms = uniforms.view(count, size, dimension + 1, num_points)
    e = uniforms.new_empty(count, size * dimension, num_points)
    log_weight = guide.log_normaliser.unsqueeze(-1).repeat(1, num_points)
    for begin in range(0, size * dimension, _PANEL * dimension):
        end = min(begin + _PANEL * dimension, size * dimension)
        before = guide.factor[:, begin:end, :begin] @ e[:, :begin]
        for at in range(begin, end, dimension):
            rows, datum = slice(at, at + dimension), at // dimension
            h = before[:, at - begin : at - begin + dimension]
            if at > begin:
                h = torch.baddbmm(h, guide.factor[:, rows, begin:at], e[:, begin:at])
            e[:, rows], mean_weight = _one_of(guide, datum, h, uniforms[:, datum], candidates)
            log_weight += mean_weight
    return torch.nan_to_num(log_weight, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), e


def _one_of(guide: _Guide, datum: int, h: Tensor, uniforms: Tensor, net: Tensor) -> tuple[Tensor, Tensor]:
    """A datum's e ``(C, K - 1, P)``, chosen from candidates given h ``(C, K - 1, P)``, and the log of their mean weight ``(C, P)``.

    Candidates are many, and what rounding does to their weights is far below these' noise: they are in single precision.
    """
    count, dimension, _ = h.shape
    rows = slice(datum * dimension, (datum + 1) * dimension)
    scale, precision = guide.factor[:, rows, rows], guide.precision[:, datum]
    steepness = guide.slope[:, datum].unsqueeze(-1) - precision @ h
    of_site = (0.5 * (guide.slope[:, datum].unsqueeze(-1) + steepness) * h).sum(1)  # log s at h
    e, log_ratio = _spread_candidates(((uniforms[:, :dimension].unsqueeze(-1) + net.unsqueeze(1)) % 1.0).float())
    flat = e.flatten(2)
    curved = ((-0.5 * scale.mT @ precision @ scale).float() @ flat).view_as(e)
    log_site = curved.add_((scale.mT @ steepness).float().unsqueeze(-1)).mul_(e).sum(1)
    centre = guide.mean[:, datum].unsqueeze(-1) + guide.basis.mT @ h
    f = ((guide.basis.mT @ scale).float() @ flat).view(count, -1, *e.shape[2:]) + centre.float().unsqueeze(-1)
    log_candidate = log_ratio + _log_likelihood(guide.problem, datum, f) - log_site
    greatest = log_candidate.amax(-1, keepdim=True)
    cumulative = (log_candidate - greatest).exp_().cumsum(-1)
    total = cumulative[..., -1:]
    level = uniforms[:, dimension].unsqueeze(-1).float() * total
    chosen = torch.searchsorted(cumulative, level).clamp_max_(net.shape[-1] - 1)
    log_mean = (total.squeeze(-1).to(h) / net.shape[-1]).log() + greatest.squeeze(-1) - of_site
    return e.gather(3, chosen.unsqueeze(1).expand(-1, dimension, -1, -1)).squeeze(-1).to(h), log_mean


def _spread_candidates(uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """e = z + c z^3 ``(C, K - 1, P, J)``, z standard normal, and log of phi(e) / g(e) ``(C, P, J)``."""
    z = torch.erfinv((2 * uniforms - 1).clamp_(_OUTERMOST - 1, 1 - _OUTERMOST)).mul_(math.sqrt(2))
    square = _TAIL * z.square()
    # phi(e) / g(e) = phi(e) / phi(z) de / dz
    lower = square * z.square() * (1 + 0.5 * square)
    return torch.addcmul(z, square, z), (1 + 3 * square).prod(1).log_() - lower.sum(1)


def _log_likelihood(problem: LatentProblem, datum: int, f: Tensor) -> Tensor:
    """log p(y_i | f_i) of one datum at f ``(C, K, P, J)``: ``(C, P, J)``."""
    y = problem.targets.values[..., datum : datum + 1]
    y = y.unsqueeze(1) if problem.targets.one_a_chain else y
    values = {name: value.unsqueeze(1) for name, value in problem.values.items()}
    rows = f.flatten(2).mT.unsqueeze(2)  # (C, P J, 1, K)
    found = problem.model.likelihood_function(values, lambda likelihood: likelihood.pointwise_log_prob(rows, y))
    return found.view(len(f), *f.shape[2:])
