r"""The sparse model's joint density and its gradient, written out and streamed over the data.

All that a datum needs of its covariances k with u is a = L^-1 k: f has mean m + a'v and variance k(x, x) - a'a. With g and h, the
slopes of E log p(y | f) in these two,

.. math:: \bar a = g v - 2 h a, \quad \bar k = L^{-T} \bar a, \quad
    \bar K = -L^{-T} \Phi\Big(\sum_n \bar a_n a_n^T\Big) L^{-1}

(Phi: the lower triangle with half its diagonal; Murray 2016, eq. 10). What is kept are sums over data: chunks of them come and
go, and the (C, N, M) covariances are never held at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchgpmc.adapter.closed_form import ClosedForm
from torchgpmc.adapter.covariance import Covariance, CovarianceFunction
from torchgpmc.density import WORTH_A_THREAD
from torchgpmc.likelihoods.slopes import ExpectedSlopes, slopes_function
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import likelihood_parameters
from torchgpmc.models.reverse import Part, by_autograd, covariance_part, mean_part
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import cholesky_in_place, factor_adjoint, inverse_lower
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.numerics.threads import num_cores, side_by_side, slices

Result = TypeVar("Result")


class DataBindings(NamedTuple):
    """Covariances at the model's own inputs, ready for theta."""

    inner: Covariance  # K(Z, Z)
    jitter: Tensor  # (M, M)
    joint: Covariance  # K([Z; X], Z), in the precision of products with the data where the kernel has a closed form
    dtype: torch.dtype  # that precision
    precise: Covariance | None  # K([Z; X], Z) in the model's precision, where that is another
    refines: bool = True  # whether what u all but determines is worked out in that

    def parameters(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The kernel's, as ``joint`` takes them."""
        if self.precise is None or self.joint is self.precise:
            return values
        return {name: value.to(self.dtype) for name, value in values.items()}


class _Chunk(NamedTuple):
    """Some of the data, given u."""

    rows: slice
    covariance: Part  # with u, (C, n, M)
    prior_variance: Part  # (C, n), or (C, 1)
    prior_mean: Part | None  # (C, n); None for zero
    projection: Tensor  # (C, n, M), the rows a
    variance: Tensor  # (C, n)
    is_floored: Tensor  # (C, n), where the variance would be less than its rounding error


class _Sums(NamedTuple):
    """What a gradient needs of the data, summed over some of them."""

    value: Tensor  # (C,), E log p(y | f)
    v: Tensor  # (C, K, M), its slope
    slopes: dict[str, dict[str, Tensor]]  # its slopes in hyperparameters by module
    adjoint: Tensor  # sum_n a-bar_n a_n', (C, M, M)
    outer: Tensor | None  # the slope in K([Z; X], Z), (C, M + N, M), where that is one evaluation; its first M rows to be filled


class _Expected(NamedTuple):
    """E log p(y | f) of a chunk, and its slopes."""

    value: Tensor  # (C,)
    mean: Tensor  # (C, n, K)
    variance: Tensor  # (C, n)
    v: Tensor  # (C, K, M)
    parameters: dict[str, Tensor]


# Elements of a (C, n, M) tensor: what stays in a core's cache from one operation to the next, and what keeps a GPU busy.
_CPU_ELEMENTS, _GPU_ELEMENTS = 2**18, 2**25
_DETERMINED = 0.01  # of the prior variance, up to which what u leaves of it is worked out in the model's precision
_LEAST_CHUNK = 256  # below which products slow down and calls cost more than the cache saves


def automatic_chunk(elements_a_datum: int, device: torch.device) -> int:
    """How many data to take at once; a power of two, so that it seldom changes with the number of chains."""
    budget = _CPU_ELEMENTS if device.type == "cpu" else _GPU_ELEMENTS
    return max(_LEAST_CHUNK, 2 ** (budget // elements_a_datum).bit_length())


def _variance_part(function: CovarianceFunction, values: dict[str, Tensor], sampled: list[str], x: Tensor, rows: slice) -> Part:
    """The prior variance of f at some inputs: ``(C, n)``, or ``(C, 1)`` where it is the same everywhere."""
    if not isinstance(function, ClosedForm):
        return by_autograd(lambda parameters: function.diagonal(parameters, x[rows]), values, sampled)
    name = function.scale
    if name is None or name not in sampled:
        return Part(function.diagonal(values, x[:1]), lambda gradient: {})
    shape = values[name].shape
    return Part(values[name].view(-1, 1), lambda gradient: {name: gradient.sum(-1).view(shape)})


def add_slopes(total: dict[str, Tensor], part: dict[str, Tensor]) -> None:
    """Adds those of a part of the data, in place."""
    for name, slope in part.items():
        total[name] = total[name] + slope if name in total else slope


def _added(total: _Sums, part: _Sums) -> _Sums:
    for module, slopes in part.slopes.items():
        add_slopes(total.slopes[module], slopes)
    return _Sums(total.value + part.value, total.v + part.v, total.slopes, total.adjoint + part.adjoint, None)


class InducingSums:
    """K(Z, Z) factorised at C settings, and covariances with the data, one chunk after another; everything without a graph.

    Args:
        model: a sparse GP.
        bound: its covariances.
        chunk: data at once.
        theta: ``(C, P)``.
        targets: of one data set, or one a chain.
        with_slopes: whether the gradient will be asked for.
    """

    def __init__(self, model: GPModel, bound: DataBindings, chunk: int, theta: Tensor, targets: Targets, *, with_slopes: bool):
        layout = model.layout
        self.model = model
        self.bound = bound
        self.theta = theta
        self.x = model.train_x
        self.targets = targets
        # Sizes are asked for once: for small models a call costs as much as the arithmetic.
        self.count = theta.shape[0]
        self.num_latents, self.num_inducing = model.latent_shape
        self.sampled = {module: layout.sampled_names(module) if with_slopes else [] for module in layout.prefixes}
        self.all_rows = slices(len(self.x), chunk)
        self.evaluated = layout.evaluate(theta)
        self.values: dict[str, Any] = self.evaluated.hyperparameters.by_module
        # With all the data in one chunk one evaluation gives K(Z, Z) too.
        self.as_one = len(self.all_rows) == 1 and bound.dtype == theta.dtype
        self.covariance = covariance_part(
            bound.joint if self.as_one else bound.inner, self.values["kernel"], self.sampled["kernel"]
        )
        inner = self.covariance.value[:, : self.num_inducing].expand(self.count, -1, -1)
        self.factor, self.ok = cholesky_in_place(inner + bound.jitter)
        # In single precision solves take two to four times as long as products with an inverse, which is had in the model's.
        self.data_inverse = None if bound.dtype == theta.dtype else inverse_lower(self.factor).to(bound.dtype)

    def over_data(self, function: Callable[[slice], Result]) -> Iterator[Result]:
        """Of each chunk in turn; as many side by side as there are cores, where a chunk is worth a thread."""
        longest = self.all_rows[0].stop
        work = 4.0 * self.count * longest * self.num_inducing * (self.num_inducing + self.x.shape[-1])
        at_once = num_cores() if work > WORTH_A_THREAD else 1
        for start in range(0, len(self.all_rows), at_once):
            yield from side_by_side(function, self.all_rows[start : start + at_once], self.x.device)

    def covariance_of(self, rows: slice) -> Part:
        """Of some of the data with u, ``(C, n, M)``."""
        first = self.num_inducing
        if self.as_one:
            return self.covariance._replace(value=self.covariance.value[:, first:])
        joint = self.bound.joint.rows(slice(first + rows.start, first + rows.stop))
        found = covariance_part(joint, self.bound.parameters(self.values["kernel"]), self.sampled["kernel"])
        if found.value.dtype == self.bound.dtype:
            return found
        return Part(found.value.to(self.bound.dtype), lambda gradient: found.slopes(gradient.to(found.value.dtype)))

    def projection(self, covariance: Part) -> Tensor:
        """The rows a, ``(C, n, M)``."""
        rows = covariance.value.expand(self.count, -1, -1)
        if self.data_inverse is not None:
            return torch.bmm(rows, self.data_inverse.mT)
        return torch.linalg.solve_triangular(self.factor, rows.mT, upper=False).mT

    def prior_mean(self, rows: slice) -> Part | None:
        """Of f at some of the data ``(C, n)``; ``None`` for zero."""
        model = self.model
        if model.mean_function.is_zero:
            return None
        return mean_part(model.mean_function, self.values["mean"], self.sampled["mean"], self.x[rows], self.count)

    def prior_variance(self, rows: slice) -> Part:
        """Of f at some of the data: ``(C, n)``, or ``(C, 1)`` where it is the same everywhere."""
        return _variance_part(self.model.covariance, self.values["kernel"], self.sampled["kernel"], self.x, rows)

    def targets_of(self, rows: slice) -> Tensor:
        """Some of the targets."""
        values = self.targets.values
        return values[:, rows] if self.targets.one_a_chain else values[rows]

    def kernel_slopes(self, adjoint: Tensor, outer: Tensor | None) -> dict[str, Tensor]:
        """By way of K(Z, Z), and of K(X, Z) where the two are one evaluation.

        Args:
            adjoint: sum_n a-bar_n a_n' ``(C, M, M)``; overwritten.
            outer: slope in K([Z; X], Z) ``(C, M + N, M)``, where it was not added chunk by chunk; its first M rows are filled here.
        """
        slope = factor_adjoint(self.factor, adjoint.neg_())
        if outer is None:
            return self.covariance.slopes(slope)
        outer[:, : self.num_inducing] = slope
        return self.covariance.slopes(outer)

    def room_for_slopes(self, projection: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for the slope in K(X, Z) of a chunk, or in K([Z; X], Z), and that part of it which is the data's ``(C, n, M)``."""
        first = self.num_inducing if self.as_one else 0
        room = projection.new_empty(self.count, first + projection.shape[1], self.num_inducing)
        return room, room[:, first:]

    def unproject_(self, a_slope: Tensor) -> None:
        """The slope in K(X, Z) ``(C, n, M)`` in place of that in the rows a."""
        if self.data_inverse is not None:
            a_slope.copy_(torch.bmm(a_slope, self.data_inverse))
        else:
            torch.linalg.solve_triangular(self.factor.mT, a_slope.mT, upper=True, out=a_slope.mT)


class SparseDensity(InducingSums):
    """The joint log density of [theta, v] at C positions, one chunk of data after another; everything without a graph.

    Args:
        model: a sparse GP.
        bound: its covariances.
        chunk: data at once.
        theta: ``(C, P)``.
        v: ``(C, V)``.
        targets: of one data set, or one a chain.
        with_slopes: whether the gradient will be asked for.
        with_prior: whether the densities of theta and v count, or the data alone.
    """

    def __init__(
        self,
        model: GPModel,
        bound: DataBindings,
        chunk: int,
        theta: Tensor,
        v: Tensor,
        targets: Targets,
        *,
        with_slopes: bool,
        with_prior: bool = True,
    ):
        super().__init__(model, bound, chunk, theta, targets, with_slopes=with_slopes)
        self.with_prior = with_prior
        self.white = v
        self.v = v.view(self.count, self.num_latents, self.num_inducing)
        self.data_v = self.v.to(bound.dtype)

    def value(self) -> Tensor:
        """``(C,)``, NaN where K(Z, Z) does not factorise."""
        value = self._log_prior()
        for part in self.over_data(lambda rows: self._expectation(self._chunk(rows))):
            value = value + part
        return self._masked(value)

    def value_and_grad(self) -> tuple[Tensor, Tensor]:
        """:meth:`value`, and the gradient ``(C, P + V)``."""
        sums = functools.reduce(_added, self.over_data(self._sums))
        value = self._log_prior() + sums.value
        if self.sampled["kernel"]:
            add_slopes(sums.slopes["kernel"], self.kernel_slopes(sums.adjoint, sums.outer))
        by_columns = self.model.layout.gather(sums.slopes, self.theta)
        if not self.with_prior:
            return self._masked(value), torch.cat([self.evaluated.derivative * by_columns, sums.v.flatten(1)], -1)
        theta_slope = torch.addcmul(self.evaluated.log_prior_slope, self.evaluated.derivative, by_columns)
        return self._masked(value), torch.cat([theta_slope, sums.v.flatten(1) - self.white], -1)

    def _masked(self, value: Tensor) -> Tensor:
        return torch.where(self.ok, value, torch.nan)

    def _sums(self, rows: slice) -> _Sums:
        chunk = self._chunk(rows)
        part = self._expected(chunk)
        slopes: dict[str, dict[str, Tensor]] = {"likelihood": part.parameters, "mean": {}, "kernel": {}}
        if chunk.prior_mean is not None and self.sampled["mean"]:
            slopes["mean"] = chunk.prior_mean.slopes(part.mean.sum(-1))
        if not self.sampled["kernel"]:
            return _Sums(part.value, part.v, slopes, torch.zeros_like(self.factor), None)
        add_slopes(slopes["kernel"], chunk.prior_variance.slopes(part.variance))
        outer, a_slope = self.room_for_slopes(chunk.projection)
        self._a_slope(chunk, part, a_slope)
        adjoint = torch.bmm(a_slope.mT, chunk.projection).to(self.factor.dtype)
        self.unproject_(a_slope)
        if not self.as_one:
            add_slopes(slopes["kernel"], chunk.covariance.slopes(outer))
        return _Sums(part.value, part.v, slopes, adjoint, outer if self.as_one else None)

    def _log_prior(self) -> Tensor:
        return self.evaluated.log_prior + log_standard_normal(self.white) if self.with_prior else self.theta.new_zeros(self.count)

    def _chunk(self, rows: slice) -> _Chunk:
        covariance, variance = self.covariance_of(rows), self.prior_variance(rows)
        projection = self.projection(covariance)
        residual = variance.value - torch.linalg.vector_norm(projection, dim=-1).square()
        if self.bound.precise is not None and self.bound.refines:
            self._refine_(rows, variance.value, projection, residual)
        floor = torch.finfo(residual.dtype).eps * variance.value
        moments = torch.maximum(residual, floor), residual < floor
        return _Chunk(rows, covariance, variance, self.prior_mean(rows), projection, *moments)

    def _refine_(self, rows: slice, variance: Tensor, projection: Tensor, residual: Tensor) -> None:
        """In the model's precision, in place, what is worked out of data that u all but determines.

        Rounding of a covariance and of its solution is to the prior variance as 1e-6, and more where K(Z, Z) is nearly singular. To
        the little variance that is left there, which the slopes of a likelihood with steps are divided by, that is much.
        """
        is_determined = residual < _DETERMINED * variance
        # On a GPU which they are would have to be looked at from the host.
        where = torch.arange(residual.shape[1], device=residual.device)
        if residual.device.type == "cpu":
            where = where[is_determined.any(0)]
        if not len(where):
            return
        assert self.bound.precise is not None
        covariance = self.bound.precise.rows(where + (self.num_inducing + rows.start))(self.values["kernel"])
        precise = torch.linalg.solve_triangular(self.factor, covariance.expand(self.count, -1, -1).mT, upper=False).mT
        inside, left = is_determined[:, where], variance.expand_as(residual)[:, where] - precise.square().sum(-1)
        residual[:, where] = torch.where(inside, left, residual[:, where])
        projection[:, where] = torch.where(inside.unsqueeze(-1), precise.to(projection.dtype), projection[:, where])

    def _moments(self, chunk: _Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance of f as likelihoods have them, and the targets."""
        mean = torch.bmm(self.data_v, chunk.projection.mT).to(self.v.dtype)
        if chunk.prior_mean is not None:
            mean = mean + chunk.prior_mean.value.unsqueeze(1)
        y = self.targets_of(chunk.rows)
        if self.num_latents == 1:
            return mean.squeeze(1), chunk.variance, y
        return mean.mT, chunk.variance.unsqueeze(-1).expand(-1, -1, self.num_latents), y

    def _expectation(self, chunk: _Chunk) -> Tensor:
        parameters = likelihood_parameters(self.values["likelihood"])
        value: Tensor = self.model.likelihood_function(
            parameters, lambda likelihood: likelihood.for_data(chunk.rows).expected_log_likelihood(*self._moments(chunk)).sum(-1)
        )
        return value

    def _expected(self, chunk: _Chunk) -> _Expected:
        values = self.values["likelihood"]
        leaves = {name: values[name].detach().requires_grad_(True) for name in self.sampled["likelihood"]}
        moments = self._moments(chunk)
        with torch.set_grad_enabled(bool(leaves)):
            parameters = likelihood_parameters({**values, **leaves})
            found: ExpectedSlopes = self.model.likelihood_function(
                parameters, lambda likelihood: slopes_function(likelihood.for_data(chunk.rows))(*moments, list(leaves.values()))
            )
        several = self.num_latents > 1
        mean = found.mean if several else found.mean.unsqueeze(-1)
        variance = (found.variance.sum(-1) if several else found.variance).masked_fill(chunk.is_floored, 0.0)
        v = torch.bmm(mean.mT.to(chunk.projection.dtype), chunk.projection).to(mean.dtype)
        return _Expected(found.value, mean, variance, v, dict(zip(leaves, found.parameters, strict=False)))

    def _a_slope(self, chunk: _Chunk, part: _Expected, out: Tensor) -> Tensor:
        """The slope in the rows a, ``(C, n, M)``."""
        dtype = chunk.projection.dtype
        torch.bmm(part.mean.to(dtype), self.data_v, out=out)
        return out.addcmul_(chunk.projection, part.variance.to(dtype).unsqueeze(-1), value=-2)
