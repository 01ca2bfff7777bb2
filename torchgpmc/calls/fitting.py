"""Point estimates of the hyperparameters: type-II maximum likelihood and maximum a posteriori."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor

from torchgpmc.approximations import Approximation, Laplace
from torchgpmc.approximations.gaussian_form import check_model
from torchgpmc.checks import check_count, check_object, warn
from torchgpmc.density import AutogradDensity
from torchgpmc.evidence import Orthant
from torchgpmc.models.gp_model import GPModel
from torchgpmc.numerics.ascent import ascend
from torchgpmc.numerics.linalg import identity_matrix
from torchgpmc.numerics.random import make_generator
from torchgpmc.numerics.threads import one_torch_thread

Model = TypeVar("Model", bound=GPModel)

# Unconstrained values beyond this are scales of e^-12 or e^12: the evidence is flat there, and has no maximum to find.
_BOUND = 12.0
_FAR = 2.0
_FLAT = 0.01


def fit(
    model: Model,
    approximation: Approximation | Orthant | None = None,
    *,
    maximum_a_posteriori: bool = False,
    num_starts: int = 4,
    max_iterations: int = 200,
    seed: int = 0,
) -> Model:
    r"""A copy of the model at the hyperparameters that maximise its approximate evidence.

    .. math:: \max_\theta \log q(y | \theta) \quad [+ \log p(x(\theta))]

    By L-BFGS-B (scipy) from the present values and from draws of the prior; the best counts. The prior enters as a density of
    constrained values x, without Jacobian, as in gpytorch.

    Args:
        model: a :class:`GP` with a factorised likelihood; not changed.
        approximation: :class:`Laplace` (default), or :class:`EP` for one latent function.
        maximum_a_posteriori: whether the priors count; type-II maximum likelihood otherwise.
        num_starts: runs of the optimiser; the first starts from the model's present values.
        max_iterations: of each run.
        seed: of the starts drawn from the prior.

    Returns:
        The fitted copy. Predict with ``torchgpmc.approximations.predict(fitted, fitted.layout.present(fitted), approximation, x)``.

    Raises:
        ValueError: a number out of range, a model that cannot be approximated so, or an approximation that fails at every start.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x = torch.linspace(0, 1, 20)
        >>> model = tg.GP(x, (x > 0.5).int(), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), tg.likelihoods.Bernoulli())
        >>> fitted = tg.fit(model, maximum_a_posteriori=True)
        >>> bool(fitted.kernel.lengthscale != model.kernel.lengthscale)
        True
    """
    approximation = Laplace() if approximation is None else approximation
    known = "torchgpmc.Laplace(), torchgpmc.EP() or torchgpmc.evidence.Orthant(), with their brackets"
    check_object("approximation", approximation, "evidence", f"one of the evidence: {known}")
    for name, value in (("num_starts", num_starts), ("max_iterations", max_iterations)):
        check_count(name, value)
    known_to_serve = approximation if isinstance(approximation, Approximation) else None
    check_model(model, f"fit with {type(approximation).__name__}", known_to_serve)
    with one_torch_thread(), torch.inference_mode(False):
        model.refresh()
        if not model.layout.size:
            return copy.deepcopy(model)
        generator = make_generator(seed, model.train_x.device)
        starts = torch.cat([model.layout.present(model), model.layout.starting_points(num_starts - 1, generator)])
        density = _log_evidence(model, approximation, maximum_a_posteriori)
        found = [ascend(density, start, bound=_BOUND, max_iterations=max_iterations) for start in starts]
    best = max((ascent for ascent in found if ascent is not None), key=lambda ascent: ascent.log_density, default=None)
    if best is None:
        raise ValueError(
            f"{type(approximation).__name__} failed at all of {num_starts} starts. Expected it to converge somewhere; try the "
            f"other of Laplace() and EP(), or raise the model's jitter (now {model.jitter:g})."
        )
    _warn(best.position, best.converged, max_iterations, model, approximation, not maximum_a_posteriori)
    return model.with_theta(best.position)


def _warn(
    theta: Tensor, success: bool, max_iterations: int, model: GPModel, approximation: Approximation | Orthant, flat: bool
) -> None:
    if not success:
        warn(f"fit stopped after {max_iterations} iterations before it converged: raise max_iterations.")
    names = _undetermined(theta, model, approximation) if flat else []
    if names:
        warn(
            f"the evidence hardly changes with {', '.join(names)} where fit ended: there may be no maximum, and its values say "
            f"little. Use maximum_a_posteriori=True, or sample."
        )


def _undetermined(theta: Tensor, model: GPModel, approximation: Approximation | Orthant) -> list[str]:
    """Names of parameters that could be e^2 times larger, or smaller, at next to no loss of evidence."""
    size = model.layout.size
    step = _FAR * identity_matrix(size, theta)
    with torch.no_grad():
        found = approximation.evidence(model, model.prior(torch.cat([theta[None], theta + step, theta - step]))).log_evidence
    loss = (found[0] - found[1:]).view(2, size)
    flat = (loss < _FLAT).any(0)
    names = [entry.name for entry in model.layout.entries for _ in range(entry.size)]
    return list(dict.fromkeys(name for name, undetermined in zip(names, flat.tolist(), strict=True) if undetermined))


def _log_evidence(model: GPModel, approximation: Approximation | Orthant, maximum_a_posteriori: bool) -> AutogradDensity:
    """What is maximised, as a function of theta; NaN where the approximation fails."""

    def evaluate(theta: Tensor) -> Tensor:
        prior = model.prior(theta)
        found = approximation.evidence(model, prior)
        value = found.log_evidence
        if maximum_a_posteriori:
            value = value + model.layout.log_prior_of_values(theta)
        return torch.where(prior.ok & found.converged, value, torch.nan)

    return AutogradDensity(evaluate)
