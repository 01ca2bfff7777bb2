r"""Coordinates in which a curved ridge of the posterior is straight: a hyperparameter measured from what the others say of it."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.models.affine import CoordinatesOfAFit
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.models.latents import likelihood_parameters


class Ridges:
    r"""Coordinates z of theta: the parameters that the likelihood's ``ridges`` name have what is predicted of them taken off.

    .. math:: \theta_a = z_a + h(\theta_b), \quad \theta_b = z_b

    As h is of other parameters alone the volume stays, so that [z, v] has exactly the density of [theta, v], whatever h.

    Args:
        model: whose likelihood has ``ridges``; see :func:`ridges_of`.
        names: of the parameters that are measured so, as in ``model.layout.names`` without "likelihood.".
    """

    def __init__(self, model: GPModel, names: list[str]):
        self.model, self.names = model, names
        columns = [column for name in names for column in model.layout.columns(f"likelihood.{name}")]
        self.columns = torch.tensor(columns, device=model.train_x.device)

    def predicted(self, theta: Tensor) -> Tensor:
        """h ``(C, A)`` from theta ``(C, P)``, whose columns ``a`` may be anything; differentiable."""
        values = likelihood_parameters(self.model.layout.raw_values(theta).by_module["likelihood"])
        found: dict[str, Tensor] = self.model.likelihood_function(values, lambda likelihood: likelihood.ridges())
        return torch.cat([found[name] for name in self.names], -1)

    def original(self, z: Tensor) -> Tensor:
        """theta ``(C, P)`` from z."""
        return z.index_add(-1, self.columns, self.predicted(z))

    def straight(self, theta: Tensor) -> Tensor:
        """z from theta."""
        return theta.index_add(-1, self.columns, -self.predicted(theta))

    def slope(self, z: Tensor) -> Tensor:
        """d theta / d z ``(P, P)`` at one z ``(P,)``."""
        found: Tensor = torch.autograd.functional.jacobian(lambda at: self.original(at.unsqueeze(0)).squeeze(0), z)
        return found

    def straight_map(self, coordinates: CoordinatesOfAFit) -> CoordinatesOfAFit:
        """White coordinates that touch the given ones where these are centred, and follow z from there."""
        origin = self.straight(coordinates.origin.unsqueeze(0)).squeeze(0)
        return coordinates.moved(origin, self.slope(origin))


def ridges_of(model: GPModel) -> Ridges | None:
    """Those of the model's likelihood that concern parameters which are sampled; ``None`` where there are none.

    Raises:
        ValueError: what a parameter follows depends on that parameter, or on another with a ridge of its own.
    """
    likelihood = as_likelihood(model.likelihood)
    with torch.no_grad():
        names = [name for name in likelihood.ridges() if f"likelihood.{name}" in model.layout.names]
        if not names:
            return None
        found, theta = Ridges(model, names), model.layout.present(model)
        moved = theta.index_fill(-1, found.columns, 0.7)
        if not torch.equal(found.predicted(theta), found.predicted(moved)):
            raise ValueError(
                f"{type(likelihood).__name__}.ridges() depends on the parameters that it is of, {names}. Expected functions of "
                f"other parameters alone, or the density would be another one."
            )
    return found


class StraightDensity:
    """A log density of [theta, v] as one of [z, v].

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> from torchgpmc.likelihoods import Activation, Transcription
        >>> grid = torch.linspace(0, 4, 5)
        >>> likelihood = Transcription(grid, grid[::2], num_genes=2, num_replicates=1, response=Activation())
        >>> model = tg.GP(grid, torch.ones(1, 2, 3), RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0)), likelihood)
        >>> joint, ridges = tg.joint_log_density(model), ridges_of(model)
        >>> z, v = torch.zeros(1, model.layout.size).double(), torch.ones(1, 5).double()
        >>> torch.equal(StraightDensity(joint, ridges)(torch.cat([z, v], -1)), joint(torch.cat([ridges.original(z), v], -1)))
        True
    """

    def __init__(self, joint: JointLogDensity, ridges: Ridges):
        self.joint, self.ridges, self.model = joint, ridges, joint.model

    def _split(self, position: Tensor) -> tuple[Tensor, ...]:
        return position.tensor_split([self.model.layout.size], -1)

    def original(self, position: Tensor) -> Tensor:
        """[theta, v] ``(C, P + V)``."""
        z, v = self._split(position)
        return torch.cat([self.ridges.original(z), v], -1)

    def whitened(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """v ``(C, V)`` and log |dv / dw| ``(C,)``, as the joint density has them."""
        return self.joint.whitened(self.original(position))

    def __call__(self, position: Tensor) -> Tensor:
        return self.joint(self.original(position))

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        z, v = self._split(position.detach())
        with torch.enable_grad():
            leaf = z.clone().requires_grad_(True)
            theta = self.ridges.original(leaf)
        value, gradient = self.joint.value_and_grad(torch.cat([theta.detach(), v], -1))
        of_theta, of_v = self._split(gradient)
        (of_z,) = torch.autograd.grad(theta, leaf, of_theta)
        return value, torch.cat([of_z, of_v], -1)

    def select(self, rows: Tensor) -> StraightDensity:
        return StraightDensity(self.joint.select(rows), self.ridges)
