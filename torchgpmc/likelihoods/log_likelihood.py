"""What samplers ask of any log p(y | f), also of one that does not factorise over data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LogLikelihood:
    """Mixin for any log p(y | f), also one that does not factorise over data: ``log_prob`` is all that samplers need.

    ``is_log_concave``: whether log p(y | f) is concave in f for all parameters and targets. p(f | y, theta) then has one mode, and
    a Gaussian density there is all that f is drawn from; else other modes are searched for. Nothing is taken on trust: say so.

    ``levels_off``: whether it is but far from its peak, where few data are, unlike outliers under Student-t noise. Estimates that
    draw f one datum after another then do around one normal density: they are unbiased whatever the modes, and hardly vary.

    ``has_normal_sites``: whether p(y_n | f_n) is a normal density of f_n up to a factor, for all parameters and targets.
    ``is_f_plus_noise``: whether y_n is f_n plus noise, so that f has the unit of the targets.
    ``mixes_variances``: whether that noise is normal given a variance of its own for each datum, as ``noise_variances`` has it.
    ``is_smooth``: whether log p(y | f) is differentiable in f, and its slopes tell where it rises. Methods that follow gradients in
    f refuse one that is not. Its expectations, which the sparse model has in its place, are smooth all the same.

    Example:
        >>> import math, gpytorch, torch, torchgpmc as tg
        >>> class Total(tg.likelihoods.LogLikelihood, gpytorch.likelihoods.Likelihood):  # of f, with noise of deviation 0.1
        ...     def target_shape(self, num_inputs):
        ...         return (1,)
        ...
        ...     def forward(self, f):  # gpytorch wants one, and there is no p(y_n | f_n)
        ...         raise NotImplementedError
        ...
        ...     def log_prob(self, f, targets):
        ...         return -0.5 * ((targets - f.sum(-1, keepdim=True)) / 0.1).square().sum(-1)
        >>> Total().log_prob(torch.ones(1, 4), torch.tensor([3.9]))  # one deviation off
        tensor([-0.5000])
        >>> model = tg.GP(torch.linspace(0, 1, 4), torch.tensor([2.0]), gpytorch.kernels.RBFKernel().requires_grad_(False), Total())
        >>> tg.joint_log_density(model)(torch.zeros(1, 4)) + 2 * math.log(2 * math.pi)  # f = 0: twenty deviations off
        tensor([-200.], dtype=torch.float64)
    """

    num_latents = 1
    is_log_concave = False
    levels_off = False
    has_normal_sites = False
    is_smooth = True
    is_f_plus_noise = False
    mixes_variances = False
    sees_differences = False  # whether p(y | f) stays as it is where all latent functions move by as much
    num_parts = 1  # that p(y | f) is a product over, each with parameters of its own: (num_parts,) each, see log_prob_by_part
    is_classification = False  # whether the mean response is a class probability
    is_ordered = True  # whether responses have quantiles
    has_intensity = False  # whether exp(f) is a rate per unit of exposure
    needs_exposure = False  # whether test points need to be given theirs

    def target_shape(self, num_inputs: int) -> tuple[int, ...]:
        """The shape of the targets that go with N inputs: ``(N,)``, unless the likelihood says otherwise."""
        return (num_inputs,)

    def check_train_inputs(self, x: Tensor) -> None:
        """Raises a ``ValueError`` for inputs ``(N, D)`` that the likelihood cannot be of; most take any."""

    def validate_targets(self, targets: Tensor) -> Tensor:
        """The targets in the form ``log_prob`` takes.

        Raises:
            ValueError: a target is outside the set the likelihood describes.
        """
        return targets

    def noise_variances(self, white: Tensor) -> tuple[Tensor, Tensor]:
        """Variances ``(C, N)`` that noise is a mixture of, where ``mixes_variances``, and the log density ``(C,)`` of ``white``.

        Args:
            white: ``(C, N)``, what variances are functions of; of mean zero and deviation one under that density.
        """
        raise NotImplementedError(f"{type(self).__name__} has mixes_variances, and must define noise_variances(white)")

    def white_given_noise(self, noise: Tensor, generator: torch.Generator) -> Tensor:
        """A draw of what ``noise_variances`` is a function of, ``(C, N)``, given the noise y - f ``(C, N)``, if it is known."""
        raise NotImplementedError(f"{type(self).__name__} has no draw of w given noise; define white_given_noise(noise, generator)")

    def for_data(self, rows: slice | Tensor) -> Any:
        """The likelihood of some data, a slice or indices: itself, unless it holds a number for every datum (exposures, noise).

        Such a likelihood has to override this: the sparse model takes data in chunks, and in minibatches.
        """
        return self

    def at_test_points(self, exposure: Tensor | None = None) -> Any:
        """The likelihood of new observations: itself, unless it holds something for each datum.

        Raises:
            ValueError: an ``exposure`` that the likelihood has no use for, or none where it needs one.
        """
        if exposure is not None:
            raise ValueError(f"{type(self).__name__} has no exposure. Expected none; Poisson and NegativeBinomial take one.")
        return self

    def log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        """log p(y | f): f ``(C, N)`` or ``(C, N, K)``, targets ``(N,)`` or ``(C, N)``, to ``(C,)``."""
        raise NotImplementedError(f"{type(self).__name__} must define log_prob(f, targets)")

    def log_prob_by_part(self, f: Tensor, targets: Tensor) -> Tensor:
        """:meth:`log_prob` of each part ``(C, num_parts)``, for likelihoods of several."""
        raise NotImplementedError(f"{type(self).__name__} must define log_prob_by_part(f, targets) for its {self.num_parts} parts")

    def ridges(self) -> dict[str, Tensor]:
        """Of parameters that others nearly determine, given data: what their theta (the log, above zero) is measured from.

        A function of *other* parameters than those it is of, by name ``(C, *shape)``; any will do. Where posteriors are curved
        ridges, as of sums of positive parameters, gradients move along them in far longer steps.
        """
        return {}

    def levels(self) -> dict[str, float] | None:
        """Of parameters that take back a number added to all of f: how their theta (the log, above zero) goes with it, by name.

        With f + c and each of them at theta + power c every density stays as it was. ``None``: there are none.
        """
        return None

    def at_these_parameters(self) -> Any:
        """What parameters decide of :meth:`log_prob`: a NamedTuple of tensors ``(C, ...)``; ``None`` if that is little.

        Chains keep it for as long as their parameters stay. Of a likelihood of several parts ``(C, num_parts, ...)``, each part's
        from its own parameters. Without a graph to the parameters, which the three methods that take it must not look at.
        """
        return None

    def log_prob_at(self, decided: Any, f: Tensor, targets: Tensor) -> Tensor:
        """:meth:`log_prob` from what :meth:`at_these_parameters` gave; differentiable in f."""
        return self.log_prob_by_part_at(decided, f, targets).sum(-1)

    def log_prob_by_part_at(self, decided: Any, f: Tensor, targets: Tensor) -> Tensor:
        """:meth:`log_prob_by_part` from what :meth:`at_these_parameters` gave."""
        raise NotImplementedError(f"{type(self).__name__} must define log_prob_at(decided, f, targets), or this for its parts")

    def log_prob_and_slope_at(self, decided: Any, f: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`log_prob_at` and its derivative in f, without a graph; by autograd unless a closed form overrides this."""
        with torch.enable_grad():
            leaf = f.detach().requires_grad_(True)
            value = self.log_prob_at(decided, leaf, targets)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), slope

    def log_prob_and_slope(self, f: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        """:meth:`log_prob` and its derivative in f, without a graph; ``None`` where they have no closed form."""
        return None

    def expected_response(self, f: Tensor) -> Tensor:
        """The mean of y given f, noise left out: f ``(C, N)`` or ``(C, N, K)``, to ``(C, *target_shape)``."""
        raise NotImplementedError(f"{type(self).__name__} must define expected_response(f) to show how it fits")


def require_classes(targets: Tensor, num_classes: int, name: str, option: str) -> None:
    """Raises a ``ValueError`` unless all targets are among 0 .. num_classes - 1."""
    ok = (targets >= 0) & (targets < num_classes) & (targets == targets.round())
    require_targets(ok, targets, f"{name} 0 to {num_classes - 1}", f"Encode the {name} from 0, or set {option}.")


def require_targets(ok: Tensor, targets: Tensor, expected: str, remedy: str) -> None:
    """Raises a ``ValueError`` that shows the first few targets outside the set a likelihood describes."""
    if not bool(ok.all()):
        wrong = targets[~ok].unique()[:5].tolist()
        raise ValueError(f"the targets hold {wrong}. Expected {expected}. {remedy}")
