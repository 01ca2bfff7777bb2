"""Several observations of each function value, as data have that share their inputs."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from torchgpmc.likelihoods.likelihood import Derivatives, Factorised
from torchgpmc.numerics.groups import sums_of_groups


class Replicated(Factorised, Likelihood):
    r"""Of f ``(C, U)``, each value of which some data share.

    .. math:: \log p(y | f) = \sum_u \sum_k n_{uk} \log p(y_{uk} | f_u), \quad y_{uk} \text{ seen } n_{uk} \text{ times at } u

    Made by :func:`replicated`. It has the parameters, priors and names of the likelihood of one datum, and targets of its own:
    those that its methods are given are not looked at.

    Source: Binois, Gramacy & Ludkovski 2018, "Practical heteroscedastic Gaussian process modeling for large simulation
    experiments", where they are called replicates.
    """

    observed: Tensor  # (E,), entries: observations of a value that differ
    times: Tensor  # (E,), how often each was seen
    place: Tensor  # (E,), whose they are, in ascending order
    begins: Tensor  # (U + 1,), the first entry of each
    kind: type

    @property
    def of_one(self) -> Any:
        """The likelihood of one datum, with this one's parameters as they are."""
        found: Any = object.__new__(self.kind)
        object.__setattr__(found, "__dict__", self.__dict__)
        return found

    def __getattr__(self, name: str) -> Any:
        # Where parameters are read, as priors do: likelihood.dispersion.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.of_one, name)

    @property
    def is_log_concave(self) -> bool:  # type: ignore[override]  # these are those of the likelihood of one
        """A sum of concave functions is concave."""
        return bool(self.of_one.is_log_concave)

    @property
    def levels_off(self) -> bool:  # type: ignore[override]
        """Whether log p(y | f) is concave but where it levels off: so is a sum, nearly."""
        return bool(self.of_one.levels_off)

    @property
    def is_analytic(self) -> bool:  # type: ignore[override]
        """Whether log p(y | f) has no kinks."""
        return bool(self.of_one.is_analytic)

    @property
    def is_smooth(self) -> bool:  # type: ignore[override]
        """Whether log p(y | f) can be climbed."""
        return bool(self.of_one.is_smooth)

    def levels(self) -> dict[str, float] | None:
        found: dict[str, float] | None = self.of_one.levels()
        return found

    def ridges(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.of_one.ridges()
        return found

    def for_data(self, rows: slice | Tensor) -> Replicated:
        """Of some of the values, with all that was observed of them."""
        begins, ends = self.begins[:-1][rows], self.begins[1:][rows]
        counts = ends - begins
        place = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        first = counts.cumsum(0) - counts
        entries = torch.arange(len(place), device=counts.device) + (begins - first)[place]
        return replicated(self.of_one.for_data(entries), self.observed[entries], self.times[entries], place, len(counts))

    def _added_up(self, of_entries: Tensor) -> Tensor:
        """(..., E) to ``(..., U)``."""
        return sums_of_groups(of_entries * self.times, self.place, len(self.begins) - 1)

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        return self._added_up(self.of_one.pointwise_log_prob(f[..., self.place], self.observed))

    def derivatives(self, f: Tensor, targets: Tensor) -> Derivatives:
        found = self.of_one.derivatives(f[..., self.place], self.observed)
        return Derivatives(*(self._added_up(part) for part in found))

    def log_prob_and_slope(self, f: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Value and derivative; by autograd where the likelihood of one has no closed form."""
        found = self.derivatives(f, targets)
        return found.value.sum(-1), found.first

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        of_entries = self.of_one.expected_log_likelihood(mean[..., self.place], variance[..., self.place], self.observed)
        return self._added_up(of_entries)


def replicated(likelihood: Any, observed: Tensor, times: Tensor, place: Tensor, size: int) -> Replicated:
    """The likelihood of ``size`` function values; parameters are shared with ``likelihood``, nothing is copied.

    Args:
        likelihood: of one datum: a :class:`Factorised` one of one latent; of the E entries, if it holds a number for every datum.
        observed: targets ``(E,)``.
        times: how often each was seen ``(E,)``, of the targets' dtype.
        place: of which value, ``(E,)``, ascending, each of them at least once.
        size: U.

    Example:
        >>> import torch
        >>> from torchgpmc.likelihoods import Bernoulli
        >>> labels, place = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0, 0, 1])
        >>> two = replicated(Bernoulli("logit"), labels, torch.tensor([1.0, 3.0, 1.0]), place, 2)  # 0, 1, 1, 1 of the first
        >>> two.log_prob(torch.tensor([[1.0, 0.0]]), labels)
        tensor([-2.9462])
        >>> Bernoulli("logit").log_prob(torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]]), torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0]))
        tensor([-2.9462])
    """
    made = object.__new__(Replicated)
    state = {**likelihood.__dict__, "kind": type(likelihood)}
    begins = torch.searchsorted(place, torch.arange(size + 1, device=place.device))
    state["_buffers"] = {**likelihood._buffers, "observed": observed, "times": times, "place": place, "begins": begins}
    object.__setattr__(made, "__dict__", state)
    return made
