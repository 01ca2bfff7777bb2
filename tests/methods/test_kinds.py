"""Options of the wrong kind: a sentence with what was expected, before any sampling."""

import dataclasses
import inspect

import pytest
import torch

import torchgpmc as tg
from tests.problems import gp
from torchgpmc.evidence import Orthant, SmoothProbit

APPROXIMATION = r"Expected an approximation of p\(f \| y, theta\): torchgpmc.Laplace\(\) or torchgpmc.EP\(\)"
EVIDENCE = r"Expected options such as torchgpmc\.evidence\.Orthant\(\)"
CASES = [
    *(
        (kind(**{option: value}), option, APPROXIMATION)
        for kind, option in (
            (tg.NUTS, "whitening"),
            (tg.HMC, "whitening"),
            (tg.ChEES, "whitening"),
            (tg.NUTS, "marginal"),
            (tg.HMC, "marginal"),
            (tg.AdaptiveMH, "marginal"),
            (tg.Slice, "marginal"),
            (tg.AMIS, "approximation"),
            (tg.MAMIS, "approximation"),
            (tg.PseudoMarginal, "approximation"),
            (tg.PseudoMarginalSlice, "approximation"),
        )
        for value in (Orthant(), "laplace", tg.Laplace)
    ),
    *(
        (kind(evidence=value), "evidence", EVIDENCE)
        for kind in (tg.AMIS, tg.MAMIS, tg.PseudoMarginal, tg.PseudoMarginalSlice)
        for value in (tg.Laplace(), "orthant", Orthant, SmoothProbit)
    ),
    *(
        (kind(mass_matrix=value), "mass_matrix", r"Expected one of torchgpmc\.samplers\.MassMatrix")
        for kind in (tg.NUTS, tg.HMC, tg.AdaptiveMH, tg.PseudoMarginal)
        for value in ("dense", None)
    ),
    *((tg.OrthantGPC(proposals=value), "proposals", r"Expected torchgpmc\.AMIS\(\)") for value in (tg.NUTS(), tg.AMIS, "amis")),
    *((kind, "method", "Expected") for kind in (tg.NUTS, tg.AMIS, "nuts", tg.Laplace())),
]


@pytest.mark.parametrize(("method", "option", "expected"), CASES)
def test_methods_options_of_the_wrong_kind_are_named(method, option, expected):
    with pytest.raises(TypeError, match=f"(?s)^{option} is .*{expected}"):
        tg.sample(gp("probit", num_data=4), method, num_samples=5, progress=False)


@pytest.mark.parametrize("value", ["laplace", tg.Laplace, SmoothProbit()])
def test_fits_by_the_wrong_kind_are_named(value):
    with pytest.raises(TypeError, match=r"^approximation is .*Expected one of the evidence: torchgpmc\.Laplace\(\)"):
        tg.fit(gp("probit", num_data=4), value)


@dataclasses.dataclass(frozen=True)
class PriorItself(tg.approximations.Approximation):
    """An approximation from scratch, with what every one must have and no more."""

    def importance_density(self, model, prior, targets=None, start=None):
        found = tg.Laplace().importance_density(model, prior, targets)
        return found.or_prior(torch.zeros_like(found.converged), prior.mean)


def test_an_approximation_of_ones_own_has_what_it_does_not_say():
    model, theta = gp("probit", num_data=4), torch.zeros(1, 1, dtype=torch.float64)
    theta = theta.expand(1, model.layout.size)
    known, own = (tg.evidence.importance(model, kind, num_importance=20_000) for kind in (tg.Laplace(), PriorItself()))
    values = [estimator(theta, torch.Generator().manual_seed(0)).value for estimator in (known, own)]
    torch.testing.assert_close(*values, atol=0.05, rtol=0)
    with pytest.raises(ValueError, match="Softmax has 3"):  # several latents are none of its business unless it says so
        tg.evidence.importance(gp("softmax"), PriorItself())
    with pytest.raises(NotImplementedError, match=r"PriorItself must define evidence"):
        tg.sample(model, tg.NUTS(marginal=PriorItself()), num_samples=5, progress=False)


@pytest.mark.parametrize("value", ["laplace", tg.Laplace, Orthant()])
@pytest.mark.parametrize("estimator", [tg.evidence.importance, tg.evidence.annealed])
def test_estimates_around_the_wrong_kind_are_named(estimator, value):
    with pytest.raises(TypeError, match=f"^approximation is .*{APPROXIMATION}"):
        estimator(gp("probit", num_data=4), value)


@pytest.mark.parametrize("method", [tg.NUTS, tg.HMC, tg.ChEES])
def test_options_that_methods_share_are_described_in_each_once(method):
    description = inspect.getdoc(method)
    for option in dataclasses.fields(method):
        assert description.count(f"\n    {option.name}:") == 1, option.name
