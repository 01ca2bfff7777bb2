"""The variational bound as a density of hyperparameters, and of inducing points: q(v) is at its best everywhere."""

from __future__ import annotations

import copy
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torchgpmc.approximations.nearest_normal import NearestNormal, nearest_normal
from torchgpmc.approximations.normal_latents import LatentSites, lower_bound, no_sites, under_sites
from torchgpmc.density import AutogradDensity, mask_failures
from torchgpmc.models.gp_model import GPModel, LatentsAt

Model = TypeVar("Model", bound=GPModel)


class Positions(NamedTuple):
    """Positions [theta, zeta]: inducing points are Z + unit * zeta; without a unit they stay where they are."""

    inducing_points: Tensor | None  # (M, D)
    unit: Tensor | None  # (D,)

    @property
    def moving_size(self) -> int:
        """How many numbers of a position move inducing points."""
        return 0 if self.inducing_points is None else self.inducing_points.numel()

    def model_at(self, model: Model, zeta: Tensor, **data: Tensor) -> Model:
        """The model with its inducing points at ``zeta`` ``(M D,)``, differentiable, and with other data if some are given."""
        if self.inducing_points is not None and self.unit is not None:
            data["inducing_points"] = self.inducing_points + self.unit * zeta.view(self.inducing_points.shape)
        return model.with_buffers(**data) if data else model


def inducing_positions(model: GPModel, moves: bool) -> Positions:
    """Positions whose inducing points, if they are to move, do so on the scale of the inputs' columns."""
    if not moves:
        return Positions(None, None)
    spread = model.train_x.std(0, correction=0)
    return Positions(model.latent_inputs, torch.where(spread > 0, spread, 1.0))


class VariationalMarginal(AutogradDensity):
    r"""The density :math:`p(\theta) |dx / d\theta| \exp(\max_q ELBO(q, \theta, Z))` of theta, with Z too if it moves.

    The gradient is that at a fixed q, since the bound is stationary there. A search starts from the sites that the last one ended
    with.

    Args:
        model: with a factorised likelihood and one data set.
        positions: whether, and on which scale, inducing points are part of a position.
        tolerance: of q's squared distance from its optimum, in its deviations; the gradient's error is near its root.
        max_steps: of q.
        roughly: of several latent functions with a smooth likelihood: q is the best one by expectations over few points. The bound
            is that of q all the same, and lower by so much.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> value, gradient = VariationalMarginal(model).value_and_grad(torch.zeros(5, 1).double())
        >>> value.shape, gradient.shape
        (torch.Size([5]), torch.Size([5, 1]))
    """

    def __init__(
        self,
        model: GPModel,
        positions: Positions | None = None,
        tolerance: float = 1e-10,
        max_steps: int = 100,
        *,
        roughly: bool = False,
    ):
        self.model = model
        self.roughly = roughly
        self.tolerance = tolerance
        self.max_steps = max_steps
        self.positions = Positions(None, None) if positions is None else positions
        self.sites: LatentSites | None = None  # of one theta, to start from
        super().__init__(lambda position: self.evaluate(position)[0])

    def split(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Theta and zeta of positions ``(C, D)``."""
        size = position.shape[-1] - self.positions.moving_size
        return position[..., :size], position[..., size:]

    def optimum(self, theta: Tensor) -> NearestNormal:
        """The best q(v) at C thetas ``(C, P)``, Z where it is."""
        with torch.no_grad():
            return self._optimum(self.model, self.model.at_data(self.model.layout.raw_values(theta)))

    def _optimum(self, model: GPModel, at: LatentsAt) -> NearestNormal:
        starts = [no_sites(at, model.num_latents)]
        if self.sites is not None:  # those of elsewhere may be worse than none
            starts.append(LatentSites(*(part.expand(len(at.prior.ok), -1, -1) for part in self.sites)))
        return nearest_normal(model, at, model.targets, starts, self.tolerance, self.max_steps, roughly=self.roughly)

    def evaluate(self, position: Tensor) -> tuple[Tensor, NearestNormal]:
        """Value ``(C,)``, with a graph, and q(v) at C positions."""
        if self.positions.moving_size and len(position) > 1:
            raise ValueError("inducing points move one position at a time")
        theta, zeta = self.split(position)
        model = self.positions.model_at(self.model, zeta)
        hyperparameters, log_prior = model.layout.raw_values_and_log_prior(theta)
        at = model.at_data(hyperparameters)
        found = self._optimum(model, at)
        value = log_prior + lower_bound(model, at, found.latents, model.targets)
        return torch.where(torch.isfinite(found.log_evidence), value, torch.nan), found

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient, found = self.value_grad_and_optimum(position)
        if len(position) == 1 and bool(torch.isfinite(value)):
            self.sites = found.sites
        return value, gradient

    def value_grad_and_optimum(self, position: Tensor) -> tuple[Tensor, Tensor, NearestNormal]:
        """Value ``(C,)``, gradient ``(C, D)``, and the best q(v) at C positions."""
        leaf = position.detach().requires_grad_(True)
        with torch.enable_grad():
            value, found = self.evaluate(leaf)
            (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return *mask_failures(value.detach(), gradient), found

    def select(self, rows: Tensor) -> VariationalMarginal:
        return copy.copy(self)


class HeldSites(VariationalMarginal):
    r"""The bound with q the posterior under sites that stay as they are while theta and Z move.

    A lower bound of :class:`VariationalMarginal`'s density, equal to it and of equal slope where the sites are the best ones. It
    bends with it too, since q moves as the data that the sites stand for would have it.

    Args:
        model: as there.
        positions: as there.
        sites: of one theta, or of each of C positions.

    Source:
        Adam, Chang, Khan & Solin 2021, "Dual parameterization of sparse variational Gaussian processes".
    """

    def __init__(self, model: GPModel, positions: Positions, sites: LatentSites):
        super().__init__(model, positions)
        self.held = sites

    def _optimum(self, model: GPModel, at: LatentsAt) -> NearestNormal:
        sites = LatentSites(*(part.expand(len(at.prior.ok), -1, -1) for part in self.held))
        latents, ok = under_sites(at, sites)
        return NearestNormal(latents, sites, torch.where(ok & at.prior.ok, 0.0, -torch.inf), ok, torch.zeros_like(ok))

    def select(self, rows: Tensor) -> HeldSites:
        """With the sites of some positions, if each has its own."""
        held = self.held if len(self.held.precision) == 1 else LatentSites(*(part[rows] for part in self.held))
        return HeldSites(self.model, self.positions, held)
