r"""Gene expression driven by a transcription factor of unknown concentration: the likelihood of an ordinary differential equation.

Each replica r of the experiment has a log concentration :math:`f_r` on a grid of times; kinetics are shared by the replicas.
After "Markov chain Monte Carlo algorithms for Gaussian processes" (Titsias, Lawrence & Rattray 2011), section 1.7.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, NamedTuple

import gpytorch
import torch
from gpytorch.constraints import Positive
from gpytorch.priors import GammaPrior, LogNormalPrior, Prior
from numpy.typing import ArrayLike
from torch import Tensor

from torchgpmc.arrays import as_tensor
from torchgpmc.checks import check_count, warn
from torchgpmc.likelihoods.decaying_integral import DecayingIntegral, decayed
from torchgpmc.likelihoods.log_likelihood import LogLikelihood
from torchgpmc.likelihoods.responses import Response
from torchgpmc.numerics.random import draw, normal_like
from torchgpmc.numerics.special import LOG_SQRT_2PI
from torchgpmc.overriding import is_newest

# Shares of the grid's spacing that are taken for rounding, as of a grid in single precision.
_SLACK = 1e-3


class _Linear(NamedTuple):
    """Expression is linear in the integrals of g: offset + sensitivity * integral."""

    offset: Tensor  # (C, G, 1, 1), or (C, G, 1, T) where the start is free
    sensitivity: Tensor  # (C, G, 1, 1)
    log_michaelis: Tensor  # (C, G, 1, 1), or ones all round


class _Noise(NamedTuple):
    """What the noise makes of residuals; where variances are integrated out, 1 / rate of their prior stands for precisions."""

    constant: Tensor  # each gene's (C, G), or (G,)
    precision: Tensor  # (C, G, R, T), or what broadcasts to it


class _Decided(NamedTuple):
    """What kinetics and noise decide of each gene's density: all but the response to f."""

    offset: Tensor  # (C, G, 1, 1), or (C, G, 1, T)
    weights: Tensor  # the integrals', times the sensitivity (C, G, T, P)
    log_michaelis: Tensor  # (C, G, 1, 1)
    constant: Tensor  # (C, G)
    precision: Tensor  # (C, G, R, T), or (C, G, 1, 1)


class _Positive:
    """The constrained value of the parameter ``raw_`` and this attribute's name, as gpytorch's properties give and take it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type) -> Tensor:
        return getattr(module, f"raw_{self._name}_constraint").transform(getattr(module, f"raw_{self._name}"))

    def __set__(self, module: Any, value: Tensor | float) -> None:
        raw = getattr(module, f"raw_{self._name}")
        value = torch.as_tensor(value).to(raw).expand_as(raw)
        module.initialize(**{f"raw_{self._name}": getattr(module, f"raw_{self._name}_constraint").inverse_transform(value)})


class Transcription(LogLikelihood, gpytorch.likelihoods.Likelihood):
    r"""Expression y of G genes in R replicates at T times, given log concentrations f of their transcription factor.

    .. math:: \frac{dy_j}{dt} = B_j + S_j \, g(e^{f_r(t)}; \gamma_j) - D_j y_j, \quad y_j(u_1) = A_j

    with the solution (paper C, eqs 1.18-1.23)

    .. math:: y_{rj}(t) = \frac{B_j}{D_j} + \Bigl(A_j - \frac{B_j}{D_j}\Bigr) e^{-D_j (t - u_1)}
        + S_j \int_{u_1}^{t} e^{-D_j (t - s)} g(e^{f_r(s)}; \gamma_j) \, ds

    on a grid :math:`u_1, ..., u_P`, and normal noise. In the integral g is a parabola over each pair of the grid's intervals, and
    the exponential is exact: Simpson's rule, as the paper has it, but for large decay rates, where that rule's own error grows as
    :math:`(D h)^4`, h being the grid's spacing (0.5 % at constant g for D h = 1, 6 % for 2, and it oscillates beyond). What error
    is left is that of a grid too coarse for g.

    Each replicate has a latent function, its log concentration on the grid; the genes' kinetics are shared. The model's inputs are
    the grid, in the same order (in other units if you like: only their distances matter to the kernel), and its targets are
    ``(R, G, T)``. As the scale of the concentration is that of S and gamma, give f a prior of fixed variance: ``RBFKernel`` without
    ``ScaleKernel``. A log concentration known at some time is a matter of the prior: :class:`ConditionedGP`.

    Sampled, each ``(G,)`` and above zero: ``basal`` B, ``decay`` D, ``sensitivity`` S, ``michaelis_constant`` gamma where the
    response has one, ``initial`` A if free, ``noise_precision`` where variances are not known.

    Args:
        grid: times of the latent functions ``(P,)``, increasing and equally spaced; the first is where A holds.
        times: of the measurements ``(T,)``, each a point of the grid.
        num_genes: G.
        num_replicates: R, the number of latent functions.
        response: g: :class:`Activation`, :class:`Repression`, :class:`Linear`, or a :class:`Response` of your own.
        variances: noise variances ``(R, G, T)``, as measured; ``None`` for one unknown variance a gene.
        integrate_variances: whether unknown variances are integrated out, given their gamma prior: each gene's residuals then have
            a multivariate t density. Else their precisions are sampled.
        free_initial: whether A is sampled; else :math:`A = B / D`, the equilibrium without the factor.
        kinetics_prior: of each of A, B, D and S; log-normal with log variance 2 by default, as in paper C's experiments.
        michaelis_prior: of gamma; log-normal with log variance 1.5 by default.
        precision_prior: of unknown precisions 1 / variance, a ``GammaPrior`` to integrate them out; of shape 1 and rate 0.1 by
            default.

    Raises:
        ValueError: a grid that is empty or not equally spaced, times off it, variances of a wrong shape or not positive.
        TypeError: a thing of the wrong kind.

    Example:
        >>> import torch
        >>> from torchgpmc.likelihoods import Activation
        >>> grid, times = torch.linspace(0, 12, 41), torch.tensor([0.0, 6.0, 12.0])
        >>> likelihood = Transcription(grid, times, num_genes=2, num_replicates=3, response=Activation())
        >>> likelihood.expected_response(torch.zeros(1, 41, 3)).shape  # one setting of the hyperparameters
        torch.Size([1, 3, 2, 3])
    """

    elapsed: Tensor
    variances: Tensor | None
    integrated_prior: Any  # a GammaPrior, or None

    basal, decay, sensitivity, initial = _Positive(), _Positive(), _Positive(), _Positive()
    michaelis_constant, noise_precision = _Positive(), _Positive()

    def __init__(
        self,
        grid: Tensor | ArrayLike,
        times: Tensor | ArrayLike,
        *,
        num_genes: int,
        num_replicates: int,
        response: Response,
        variances: Tensor | ArrayLike | None = None,
        integrate_variances: bool = False,
        free_initial: bool = False,
        kinetics_prior: Prior | None = None,
        michaelis_prior: Prior | None = None,
        precision_prior: Prior | None = None,
    ):
        super().__init__()
        check_count("num_genes", num_genes)
        check_count("num_replicates", num_replicates)
        if not isinstance(response, Response):
            raise TypeError(f"response is {response!r}. Expected a Response, for instance torchgpmc.likelihoods.Activation().")
        if integrate_variances and variances is not None:
            raise ValueError("integrate_variances is of unknown variances. Expected variances=None with it; leave one of them out.")
        grid, spacing = _checked_grid(grid)
        times, rows = _checked_times(times, grid, spacing)
        self.num_genes, self.num_latents = num_genes, num_replicates
        self.response = response
        self.free_initial = free_initial
        self.integral = DecayingIntegral(spacing, len(grid), rows)
        self.register_buffer("elapsed", times - grid[0])
        shape = self.target_shape(len(grid))
        self.register_buffer("variances", None if variances is None else _checked_variances(variances, shape))
        precision = GammaPrior(1.0, 0.1) if precision_prior is None else precision_prior
        if integrate_variances and type(precision) is not GammaPrior:
            raise TypeError(f"precision_prior is {precision!r}. Expected a GammaPrior to integrate variances out, or None.")
        self.integrated_prior = copy.deepcopy(precision) if integrate_variances else None
        kinetics = LogNormalPrior(0.0, math.sqrt(2.0)) if kinetics_prior is None else kinetics_prior
        michaelis = LogNormalPrior(0.0, math.sqrt(1.5)) if michaelis_prior is None else michaelis_prior
        sampled = {"basal": kinetics, "decay": kinetics, "sensitivity": kinetics}
        sampled |= {"michaelis_constant": michaelis} if response.has_michaelis_constant else {}
        sampled |= {"initial": kinetics} if free_initial else {}
        sampled |= {"noise_precision": precision} if variances is None and not integrate_variances else {}
        for name, prior in sampled.items():
            self.register_parameter(f"raw_{name}", torch.nn.Parameter(torch.zeros(num_genes, dtype=torch.float64)))
            self.register_constraint(f"raw_{name}", Positive())
            self.register_prior(f"{name}_prior", copy.deepcopy(prior), partial(_value_of, name), partial(_set_value_of, name))

    def target_shape(self, num_inputs: int) -> tuple[int, ...]:
        """(R, G, T).

        Raises:
            ValueError: the inputs are not as many as the points of the grid.
        """
        num_times, num_points = len(self.elapsed), self.integral.num_points
        if num_inputs != num_points:
            raise ValueError(
                f"train_x has {num_inputs} rows but the likelihood's grid has {num_points} points. Expected the grid as train_x: "
                f"GP(grid, expression, kernel, Transcription(grid, times, ...))."
            )
        return self.num_latents, self.num_genes, num_times

    def check_train_inputs(self, x: Tensor) -> None:
        """Raises a ``ValueError`` unless inputs ``(P, D)`` are the grid, in whatever units of time."""
        gaps = x.diff(dim=0)
        if x.shape[1] != 1 or not bool((gaps > 0).all()) or float(gaps.max() - gaps.min()) > _SLACK * float(gaps.mean()):
            raise ValueError(
                f"train_x has shape {tuple(x.shape)} and is not the likelihood's grid: it does not go up in equal steps. Expected "
                f"the grid as train_x, in its order: GP(grid, expression, kernel, Transcription(grid, times, ...))."
            )

    def validate_targets(self, targets: Tensor) -> Tensor:
        """The targets as they are; warns where a gene's measurements are negative on average, as logs and standardised ones are."""
        lowest = targets.mean(-1).flatten(0, -2).amin(0)
        if bool((lowest < 0).any()):
            gene = int(lowest.argmin())
            warn(
                f"the expression of gene {gene} is negative on average in some replicate ({float(lowest[gene]):.3g}). Expected the "
                f"natural scale, on which only noise goes below zero; undo logarithms and standardisation.",
                UserWarning,
            )
        return targets

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Not for a likelihood that does not factorise; gpytorch's base class wants the name."""
        raise NotImplementedError("Transcription does not factorise over the grid: it has log_prob(f, targets) alone.")

    def expected_response(self, f: Tensor) -> Tensor:
        """Expression without noise: log concentrations ``(C, P)``, or ``(C, P, R)`` for R > 1, to ``(C, R, G, T)``."""
        linear = self._linear()
        rate = self.response(self._log_concentration(f), linear.log_michaelis)  # (C, G or 1, R, P)
        return torch.addcmul(linear.offset, linear.sensitivity, self.integral(rate, self.decay)).transpose(-3, -2)

    def _linear(self) -> _Linear:
        steady = (self.basal / self.decay).unsqueeze(-1)
        offset = steady
        if self.free_initial:
            offset = steady + (self.initial.unsqueeze(-1) - steady) * decayed(self.decay.unsqueeze(-1) * self.elapsed)
        log_michaelis = self.michaelis_constant.log() if self.response.has_michaelis_constant else steady.new_zeros(1)
        return _Linear(offset.unsqueeze(-2), self.sensitivity[..., None, None], log_michaelis[..., None, None])

    def _log_concentration(self, f: Tensor) -> Tensor:
        """``(C, 1, R, P)``."""
        return (f.unsqueeze(-1) if self.num_latents == 1 else f).mT.unsqueeze(-3)

    def log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        r"""log p(y | f): f as in :meth:`expected_response`, targets ``(R, G, T)`` or ``(C, R, G, T)``, to ``(C,)``.

        With variances integrated out the density of each gene's n = R T residuals e, shape a and rate b being the precision's, is

        .. math:: \frac{\Gamma(a + n / 2)}{\Gamma(a)} \, (2 \pi b)^{-n / 2} \Bigl(1 + \frac{e^T e}{2 b}\Bigr)^{-(a + n / 2)}
        """
        return self.log_prob_by_part(f, targets).sum(-1)

    @property
    def num_parts(self) -> int:  # type: ignore[override]  # as many as there are genes
        """The genes: given f, each has kinetics and measurements of its own."""
        return self.num_genes

    def log_prob_by_part(self, f: Tensor, targets: Tensor) -> Tensor:
        """:meth:`log_prob` of each gene, ``(C, G)``."""
        residuals = (targets - self.expected_response(f)).transpose(-3, -2)
        noise = self._noise()
        return self._of_misfit(noise.constant, (residuals.square() * noise.precision).sum((-2, -1)))

    def ridges(self) -> dict[str, Tensor]:
        r"""Decay rates follow production at a concentration of one, :math:`\log(B_j + S_j g(1; \gamma_j))`.

        What data know best is this over D, the level that expression tends to.
        """
        log_michaelis = self.michaelis_constant.log() if self.response.has_michaelis_constant else self.basal.new_zeros(1)
        rate = self.response(torch.zeros_like(log_michaelis), log_michaelis)
        return {"decay": (self.basal + self.sensitivity * rate).log()}

    def levels(self) -> dict[str, float] | None:
        """gamma goes with the concentration, and S takes back what that makes of the response, if that is known to be a power."""
        kind: Any = type(self.response)
        power = self.response.homogeneity
        if power is None or not is_newest(kind, "homogeneity", ("__call__",)):
            return None
        of_michaelis = {"michaelis_constant": 1.0} if self.response.has_michaelis_constant else {}
        return of_michaelis | {"sensitivity": -power}

    def at_these_parameters(self) -> _Decided:
        """The integrals' weights are most of the work."""
        with torch.no_grad():
            linear, noise, genes = self._linear(), self._noise(), self.decay.shape
            log_michaelis, precision = (part.expand(*genes, *part.shape[-2:]) for part in (linear.log_michaelis, noise.precision))
            weights = linear.sensitivity * self.integral.matrix(self.decay)
            return _Decided(linear.offset, weights, log_michaelis, noise.constant.expand(genes), precision)

    def log_prob_by_part_at(self, decided: _Decided, f: Tensor, targets: Tensor) -> Tensor:
        residuals, _ = self._residuals_and_rate(decided, self._log_concentration(f), targets)
        return self._of_misfit(decided.constant, (residuals.square() * decided.precision).sum((-2, -1)))

    def log_prob_and_slope_at(self, decided: _Decided, f: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """By the chain rule, if the response knows its slope."""
        kind: Any = type(self.response)
        if not is_newest(kind, "slope", ("__call__",)):
            return super().log_prob_and_slope_at(decided, f, targets)
        log_concentration = self._log_concentration(f)
        residuals, rate = self._residuals_and_rate(decided, log_concentration, targets)
        of_rate = self.response.slope(rate, log_concentration, decided.log_michaelis)
        if of_rate is None:
            return super().log_prob_and_slope_at(decided, f, targets)
        pull = residuals * decided.precision
        misfit = (pull * residuals).sum((-2, -1))
        if self.integrated_prior is not None:
            pull = pull * (self._power / (1 + 0.5 * misfit))[..., None, None]
        slope = ((pull @ decided.weights) * of_rate).sum(-3)  # (C, R, P)
        return self._of_misfit(decided.constant, misfit).sum(-1), slope.squeeze(-2) if self.num_latents == 1 else slope.mT

    def _residuals_and_rate(self, decided: _Decided, log_concentration: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """``(C, G, R, T)``, and the response ``(C, G or 1, R, P)``."""
        rate = self.response(log_concentration, decided.log_michaelis)
        return targets.transpose(-3, -2) - decided.offset - rate @ decided.weights.mT, rate

    def _noise(self) -> _Noise:
        num_replicates, num_genes, num_times = self.target_shape(self.integral.num_points)
        count = num_replicates * num_times
        if self.variances is not None:
            precision = 1 / self.variances.transpose(-3, -2)
            return _Noise(0.5 * precision.log().sum((-2, -1)) - count * LOG_SQRT_2PI, precision)
        if self.integrated_prior is not None:
            shape, rate = self.integrated_prior.concentration, self.integrated_prior.rate
            constant = torch.lgamma(self._power) - torch.lgamma(shape) - 0.5 * count * torch.log(2 * torch.pi * rate)
            return _Noise(constant.expand(num_genes), (1 / rate).expand(num_genes, 1, 1))
        precision = self.noise_precision
        return _Noise(0.5 * count * precision.log() - count * LOG_SQRT_2PI, precision[..., None, None])

    @property
    def _power(self) -> Tensor:
        """Of the t density, where variances are integrated out."""
        return self.integrated_prior.concentration + 0.5 * self.num_latents * len(self.elapsed)

    def _of_misfit(self, constant: Tensor, misfit: Tensor) -> Tensor:
        """log p of each gene ``(C, G)``, from its residuals' weighted squares."""
        if self.integrated_prior is not None:
            return constant - self._power * torch.log1p(0.5 * misfit)
        return constant - 0.5 * misfit

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        """A draw of the expression, noise included ``(C, R, G, T)``, of f as in :meth:`expected_response`."""
        expected = self.expected_response(f)
        return expected + self._noise_variances(expected, generator).sqrt() * normal_like(expected, generator)

    def _noise_variances(self, expected: Tensor, generator: torch.Generator) -> Tensor:
        if self.variances is not None:
            return self.variances
        if self.integrated_prior is not None:
            precision = draw(self.integrated_prior.expand(expected.shape[:-3] + expected.shape[-2:-1]), generator)
        else:
            precision = self.noise_precision
        return 1 / precision[..., None, :, None]


def _value_of(name: str, module: Any) -> Tensor:
    return getattr(module, name)


def _set_value_of(name: str, module: Any, value: Tensor) -> None:
    setattr(module, name, value)


def _checked_vector(name: str, values: Any, example: str) -> Tensor:
    values = as_tensor(name, values)
    if values.dim() != 1 or not len(values) or not bool(torch.isfinite(values).all()):
        raise ValueError(f"{name} has shape {tuple(values.shape)}. Expected one dimension of finite numbers, say {example}.")
    return values.detach().double()


def _checked_grid(grid: Any) -> tuple[Tensor, float]:
    """The grid in double precision and its spacing."""
    grid = _checked_vector("grid", grid, "torch.linspace(0, 12, 121)")
    gaps = grid.diff()
    if len(grid) < 3 or not bool((gaps > 0).all()) or float(gaps.max() - gaps.min()) > _SLACK * float(gaps.mean()):
        raise ValueError(
            f"grid has {len(grid)} points whose distances are not equal and positive, or too few. Expected at least three points, "
            f"increasing and equally spaced; for instance torch.linspace(0, 12, 121)."
        )
    spacing = float(grid[-1] - grid[0]) / (len(grid) - 1)
    return grid[0] + spacing * torch.arange(len(grid)).to(grid), spacing


def _checked_times(times: Any, grid: Tensor, spacing: float) -> tuple[Tensor, list[int]]:
    """The grid's points that are meant, and their rows."""
    times = _checked_vector("times", times, "torch.tensor([0.0, 6.0, 12.0])").to(grid.device)
    rows = ((times - grid[0]) / spacing).round().long().clamp(0, len(grid) - 1)
    off = (times - grid[rows]).abs() > _SLACK * spacing
    if bool(off.any()):
        raise ValueError(
            f"times {times[off].tolist()} are not on the grid, which has {len(grid)} points from {float(grid[0]):g} to "
            f"{float(grid[-1]):g}, {spacing:g} apart. Expected points of the grid; take another grid, or round the times."
        )
    return grid[rows], rows.tolist()


def _checked_variances(variances: Any, shape: tuple[int, ...]) -> Tensor:
    variances = as_tensor("variances", variances)
    if tuple(variances.shape) != shape:
        raise ValueError(f"variances has shape {tuple(variances.shape)}. Expected (replicates, genes, times) = {shape}.")
    positive = (variances > 0) & torch.isfinite(variances)
    if not bool(positive.all()):
        first = tuple((~positive).nonzero()[0].tolist())
        raise ValueError(
            f"variances has {int((~positive).sum())} values that are not positive and finite, the first at {first}: "
            f"{float(variances[first]):g}. Expected variances above zero; replace those, or let variances=None sample them."
        )
    return variances.detach().double()
