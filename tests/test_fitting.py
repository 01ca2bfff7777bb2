"""Type-II maximum likelihood and MAP against a grid, and what fit promises."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.problems import fixed_kernel, gp, inputs, sparse_gp, targets


def toy():
    x = torch.linspace(0, 1, 30, dtype=torch.float64)
    y = (torch.sin(9 * x) + 0.4 * torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64) > 0).int()
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), outputscale_prior=GammaPrior(2.0, 1.0))
    return tg.GP(x, y, kernel, tg.likelihoods.Bernoulli())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("approximation", [tg.Laplace(), tg.EP()])
@pytest.mark.parametrize("maximum_a_posteriori", [False, True])
def test_fit_finds_the_best_of_a_fine_grid(approximation, maximum_a_posteriori):
    model = toy()
    fitted = tg.fit(model, approximation, maximum_a_posteriori=maximum_a_posteriori)
    axis = torch.linspace(-5, 5, 41, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)

    def objective(theta):
        value = approximation.evidence(model, model.prior(theta)).log_evidence.detach()
        if maximum_a_posteriori:
            for name, prior in (
                ("kernel.outputscale", GammaPrior(2.0, 1.0)),
                ("kernel.base_kernel.lengthscale", GammaPrior(2.0, 4.0)),
            ):
                value = value + prior.log_prob(model.layout.constrain(theta)[name].float()).double().flatten()
        return value

    best = grid[objective(grid).argmax()]
    found = fitted.layout.present(fitted)
    assert float(objective(found)) >= float(objective(best[None])) - 1e-3
    if maximum_a_posteriori:
        assert bool(((found[0] - best).abs() < 0.26).all())


def test_the_model_itself_is_not_changed():
    model = toy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fitted = tg.fit(model, maximum_a_posteriori=True, num_starts=1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not torch.equal(fitted.kernel.raw_outputscale, model.kernel.raw_outputscale)
    assert type(fitted) is type(model)


def test_fixed_parameters_stay_and_a_model_without_any_is_returned():
    model = tg.GP(inputs(6), targets("probit", 6), fixed_kernel(), tg.likelihoods.Bernoulli())
    assert torch.equal(tg.fit(model).kernel.raw_outputscale, model.kernel.raw_outputscale)


@pytest.mark.slow
def test_an_evidence_without_maximum_is_said():
    """One class alone: the longer the lengthscale and the larger the scale, the better."""
    x = torch.linspace(0, 1, 10)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0)), outputscale_prior=GammaPrior(2.0, 1.0))
    model = tg.GP(x, torch.ones(10), kernel, tg.likelihoods.Bernoulli())
    with pytest.warns(tg.SamplingWarning, match="hardly changes with kernel"):
        tg.fit(model)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="num_starts"):
        tg.fit(gp("probit"), num_starts=0)
    with pytest.raises(ValueError, match="SparseGP"):
        tg.fit(sparse_gp("probit"))
