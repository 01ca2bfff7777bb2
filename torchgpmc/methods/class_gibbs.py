"""Gibbs sampling for several classes, in coordinates that are white at every theta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgpmc.approximations.class_ep import sees_differences
from torchgpmc.checks import check_count, check_positive
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.models.remedies import what_samples
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import EXACT, ChainTarget, check_has_hyperparameters
from torchgpmc.runs.class_chains import ClassChains, ClassTuning, ClassWarmUp
from torchgpmc.runs.run import MethodOptions, Settings, chain_settings
from torchgpmc.storage.draws import Draw


@dataclass(frozen=True)
class ClassGibbs(MethodOptions):
    """Theta and the latents of several classes, in coordinates in which they are nearly independent of one another.

    The latents move by Hamiltonian trajectories in coordinates that are white under Gaussian sites at every theta, the sites
    following theta too (:mod:`torchgpmc.models.class_coordinates`, :mod:`torchgpmc.runs.class_chains`). Given these, theta of up to
    P = 3 hyperparameters is proposed from a quadratic fitted to the density at 1 + 2 P^2 thetas that stay, whose matrices are kept:
    of N data and any number of functions 28 (1 + 2 P^2) N^2 bytes; on the other side of it from the present theta, so that theta
    and the latents wander less; and in a basis, the covariance's axes at one theta, in which the latents hold theta least. A sweep
    takes three factorisations of N x N matrices, and two trajectories: both latent vectors are draws given its theta, and
    predictions average over them. Gradients are in single precision, what draws are accepted by in double: the posterior is the
    exact one.

    Of more hyperparameters, and of a model whose prior and likelihood no subclass has redefined, theta and the latents move by one
    trajectory together, whose steps are longer for theta than for the latents; each of theta's, some ten to twenty a sweep, takes
    some twelve N^3 operations a chain. Its masses are the mean curvature of the density, from the products of its slopes in
    warm-up.

    Sites after Opper & Archambeau (2009), overrelaxed proposals after Adler (1981), steps of two lengths after Tuckerman, Berne &
    Martyna (1992), the adjoint of a Cholesky factor after Murray (2016).

    For :class:`Softmax` without mixing weights, and other log-concave likelihoods of differences between functions.

    Args:
        num_steps: leapfrog steps a trajectory, at most: it takes as many as make a quarter of the period in those coordinates (of
            theta: in the direction that latents hold most), give or take a third.
        target_accept_prob: acceptance of trajectories that warm-up steers the step size to.
        thinning: keep one draw in this many.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 9), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> likelihood = tg.likelihoods.Softmax(num_classes=3, mixing_weights=False)
        >>> model = tg.GP(x, torch.arange(9) // 3, kernel, likelihood)
        >>> posterior = tg.sample(model, tg.ClassGibbs(), num_samples=600, warmup_steps=60, num_chains=8, progress=False)
        >>> posterior.latents.shape
        torch.Size([8, 600, 9, 3])
    """

    num_steps: int = 32
    target_accept_prob: float = 0.8
    thinning: int = 1

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on [theta, v].

        Raises:
            ValueError: options out of range, or a model of another kind.
        """
        check_count("num_steps", self.num_steps)
        check_count("thinning", self.thinning)
        check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)
        _check(model)
        warmup, num_chains = chain_settings(settings)
        chains = ClassChains(JointLogDensity(model), self.num_steps, settings.chain_chunk)
        found: list[ClassTuning] = []

        def first() -> ClassTuning:
            if not found:
                found.append(chains.first_tuning())
            return found[0]

        size = model.layout.size

        def start(generator: torch.Generator) -> tuple[Tensor, None]:
            return chains.starts(first(), num_chains, generator), None

        def read(state: Any, generator: torch.Generator) -> tuple[Draw, dict[str, Tensor]]:
            theta, v = state.position.tensor_split([size], -1)
            return Draw(theta[:, None], v[:, None], None, state.further[:, None]), {"lp": state.log_density}

        target = ChainTarget(chains.joint, size, size + model.latent_size, start, read, EXACT)
        warm_up = ClassWarmUp(warmup, self.target_accept_prob, chains, first)
        return ChainRun(target, chains.kernel, warm_up, warmup, settings.num_samples, self.thinning)


def _check(model: GPModel) -> None:
    check_has_hyperparameters(model, "ClassGibbs")
    name = type(model.likelihood).__name__
    if not model.factorises:
        raise ValueError(
            f"ClassGibbs() needs a likelihood that factorises over data, and {name} has only log_prob. Expected Softmax without "
            f"mixing weights; sample this model with {what_samples(model)}."
        )
    if not (sees_differences(model) and model.has_latents_at_data):
        raise ValueError(
            f"ClassGibbs() is for log-concave likelihoods of differences between functions at the data, and has a "
            f"{type(model).__name__} with {name}. Expected a GP with Softmax without mixing weights; sample this model with "
            f"{what_samples(model)}."
        )
    if model.targets.one_a_chain:
        raise ValueError(
            f"ClassGibbs() finds sites of one data set, and the model has one a chain. Expected train_y of shape (N,); sample this "
            f"model with {what_samples(model)}."
        )
