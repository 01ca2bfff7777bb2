r"""Inducing points moved by the gradient of the free-form bound, averaged over posterior draws.

The density that a :class:`SparseGP` samples is normalised by C(Z), a lower bound of p(y), which is what Z is for (Hensman et al.
2015, section 3, "Derivatives for Z"). In whitened latents Z is in the expected log likelihood alone, and by Jensen's inequality

.. math:: \log C(Z') - \log C(Z) \ge E_{q_Z(v, \theta)} [\ell(Z', v, \theta) - \ell(Z, v, \theta)], \quad
    \ell = E_{p(f | u = Lv, \theta)} \log p(y | f),

with equal slopes at Z' = Z: those of the paper. Whatever raises the right-hand side raises the bound, as in an EM algorithm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.checks import check_count
from torchgpmc.models.sparse import SparseGP
from torchgpmc.numerics.ascent import ascend
from torchgpmc.posterior import Posterior
from torchgpmc.variational.bound import Positions, inducing_positions

_BOUND = 12.0  # of inducing points, in deviations of the inputs
_SLOPE = 0.01  # nats for a deviation of the inputs: where it is smaller all over, a search ends
_CHUNK_ELEMENTS = 4_000_000  # of projections


def refine_inducing_points(posterior: Posterior, *, num_draws: int = 64, max_iterations: int = 50) -> SparseGP:
    r"""The model of ``posterior`` with inducing points that serve its draws better, to be started and sampled again.

    .. math:: \max_Z \frac{1}{S} \sum_s E_{p(f | u = L_Z v_s, \theta_s)} \log p(y | f)

    over draws (v, theta), by L-BFGS; every rise is one of the free-form bound of log p(y), but for the Monte Carlo error. Draws
    of the new model let the points move further: where they began far off, sample and refine a few times. Where a Gaussian fit is
    good, ``tg.initialize(model, optimize_inducing_points=True)`` is the quicker way.

    Args:
        posterior: draws of a :class:`SparseGP`, made or loaded.
        num_draws: S, evenly spaced among the draws; more than the numbers in Z guard against fitting the draws' own noise.
        max_iterations: of L-BFGS.

    Returns:
        A copy of the model with the new inducing points ``(M, D)``, whose present hyperparameters are the draws' mean on the
        unconstrained scale.

    Raises:
        TypeError: not a posterior.
        ValueError: draws of another model; a number out of range; a bound that is not finite at the draws.

    Source: Hensman, Matthews, Filippone & Ghahramani 2015, section 3.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 20), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.SparseGP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[:2])
        >>> model.kernel.requires_grad_(False).lengthscale = 0.3  # sampled or not
        >>> method = tg.AuxiliaryGradient()
        >>> posterior = tg.sample(model, method, num_samples=500, warmup_steps=100, num_chains=8, progress=False)
        >>> refined = tg.refine_inducing_points(posterior)
        >>> bool(refined.inducing_points.max() > 0.1), refined.inducing_points.shape
        (True, torch.Size([2, 1]))
    """
    if not isinstance(posterior, Posterior):
        raise TypeError(f"posterior is {type(posterior).__name__}. Expected what torchgpmc.sample(model) returns.")
    model = posterior.model
    if not isinstance(model, SparseGP):
        raise ValueError(
            f"these are draws of a {type(model).__name__}, and inducing points that a bound is raised by are those of a SparseGP. "
            f"Expected its draws."
        )
    check_count("num_draws", num_draws)
    check_count("max_iterations", max_iterations)
    with torch.inference_mode(False):  # else autograd could follow no copy made here
        chains, draws = posterior.num_chains, posterior.num_draws
        rows = torch.linspace(0, chains * draws - 1, min(num_draws, chains * draws)).round().long()
        theta, v = (part.flatten(0, 1)[rows].to(model.train_x) for part in (posterior.theta, posterior.whitened))
        density = AveragedBound(model, inducing_positions(model, True), theta, v)
        start = model.train_x.new_zeros(density.positions.moving_size)
        found = ascend(density, start, bound=_BOUND, max_iterations=max_iterations, slope=_SLOPE)
    if found is None:
        raise ValueError(
            f"the expected log likelihood is not finite at some of the draws. Expected it to be; raise jitter (now "
            f"{model.jitter:g}) and sample again."
        )
    with torch.inference_mode(False), torch.no_grad():
        return density.positions.model_at(model, found.position).with_theta(theta.mean(0))


class AveragedBound:
    """The expected log likelihood, averaged over S draws of (theta, v), as a function of where the inducing points are.

    Args:
        model: a sparse model.
        positions: of its inducing points.
        theta: ``(S, P)``.
        v: ``(S, V)``.
    """

    def __init__(self, model: SparseGP, positions: Positions, theta: Tensor, v: Tensor):
        self.model, self.positions, self.theta, self.v = model, positions, theta, v
        at_once = max(1, _CHUNK_ELEMENTS // (model.latent_size * len(model.train_x)))
        self.draws = torch.arange(len(theta), device=theta.device).split(at_once)
        data = max(1, _CHUNK_ELEMENTS // (at_once * model.latent_size))
        self.rows = torch.arange(len(model.train_x), device=theta.device).split(data)

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """At one position ``(1, M D)``: ``(1,)``, NaN where the algebra failed at some draw, and the gradient ``(1, M D)``."""
        value, gradient = position.new_zeros(1), torch.zeros_like(position)
        for draws in self.draws:
            for rows in self.rows:
                zeta = position.detach().clone().requires_grad_(True)
                with torch.enable_grad():
                    model = self.positions.model_at(self.model, zeta[0]).on_rows(rows)
                    at = model.at_data(model.layout.raw_values(self.theta[draws]))
                    found = torch.where(at.prior.ok, model.log_likelihood(at, self.v[draws]), torch.nan).sum() / len(self.theta)
                    (slope,) = torch.autograd.grad(found, zeta)
                value, gradient = value + found.detach(), gradient + slope
        return value, gradient

    def __call__(self, position: Tensor) -> Tensor:
        return self.value_and_grad(position)[0]

    def select(self, rows: Tensor) -> AveragedBound:
        return self
