"""The gradient of an approximate evidence part by part: what a graph of small tensor operations costs is mostly the graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchgpmc.approximations.gaussian_form import EvidenceSlopes, GaussianApproximation, LatentProblem, problem_of
from torchgpmc.models.gp_model import GPModel, LatentPrior, likelihood_parameters
from torchgpmc.models.reverse import by_autograd, covariance_part, mean_part
from torchgpmc.models.targets import Targets

Evidence = Callable[[LatentProblem, LatentPrior], tuple[GaussianApproximation, EvidenceSlopes]]


def value_and_grad_by_parts(model: GPModel, theta: Tensor, targets: Targets, evidence: Evidence) -> tuple[Tensor, Tensor] | None:
    """log p(theta) q(y | theta) and its gradient; ``None`` for a model with another prior on f.

    Args:
        model: with latents at the data.
        theta: ``(C, P)``.
        targets: of one data set, or one a chain.
        evidence: an approximation at C thetas with its slopes, from the problem and the prior, both without graph.

    Returns:
        Log densities of theta ``(C,)``, NaN where K does not factorise or the approximation failed, and gradients ``(C, P)``.
    """
    if type(model).prior_at is not GPModel.prior_at:
        return None
    layout, count = model.layout, len(theta)
    covariance_at, jitter, *_ = model._bound
    with torch.no_grad():
        at = layout.evaluate(theta)
        values = at.hyperparameters.by_module
        kernel = covariance_part(covariance_at, values["kernel"], layout.sampled_names("kernel"))
        mean = mean_part(model.mean_function, values["mean"], layout.sampled_names("mean"), model.train_x, count)
        prior = model._factorised(values, mean.value.expand(count, -1), (kernel.value + jitter).expand(count, -1, -1))
        problem = problem_of(model, prior, targets)
        found, slopes = evidence(problem, prior)
        likelihood = by_autograd(
            lambda parameters: slopes.likelihood(problem._replace(values=likelihood_parameters(dict(parameters)))),
            values["likelihood"],
            layout.sampled_names("likelihood"),
        )
        by_module = {
            "mean": mean.slopes(slopes.mean),
            "likelihood": likelihood.slopes(torch.ones_like(at.log_prior)),
            "kernel": kernel.slopes(slopes.covariance),  # last, as it takes over the memory
        }
        gradient = torch.addcmul(at.log_prior_slope, at.derivative, layout.gather(by_module, theta))
    return torch.where(prior.ok & found.converged, at.log_prior + found.log_evidence, torch.nan), gradient
