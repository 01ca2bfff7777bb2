"""Options of the wrong kind: a sentence with what was expected, before any sampling."""

import dataclasses
import inspect

import pytest

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


@pytest.mark.parametrize("method", [tg.NUTS, tg.HMC, tg.ChEES])
def test_options_that_methods_share_are_described_in_each_once(method):
    description = inspect.getdoc(method)
    for option in dataclasses.fields(method):
        assert description.count(f"\n    {option.name}:") == 1, option.name
