"""Our GP inside a Pyro model: its density, its conditional, MCMC, guides and ``Predictive``."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from pyro.infer.autoguide import AutoNormal

import torchgpmc as tg
from tests.integrations.pyro_models import (
    F64,
    binary_data,
    constant,
    gp_model,
    gp_of,
    numbers,
    scaled_rbf,
    sum_of_kernels,
)
from torchgpmc.integrations.pyro import GP, MCMC, NUTS
from torchgpmc.integrations.pyro.log_joint import unconstrained_model

quiet = pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
OPTIONS = {"num_samples": 12, "warmup_steps": 12, "num_chains": 3, "disable_progbar": True, "seed": 1}


@pytest.fixture(autouse=True)
def unchecked():
    """As MCMC runs them; and Pyro's numbers repeat."""
    pyro.set_rng_seed(0)
    with pyro.validation_enabled(False):
        yield


@pytest.mark.parametrize("kernel", [scaled_rbf, sum_of_kernels])
def test_the_sites_density_is_that_of_our_own_model(kernel):
    x, y = binary_data(9)
    ours = tg.GP(x, y, kernel(), tg.likelihoods.Bernoulli(link="logit"), mean=constant())
    problem = unconstrained_model(gp_model(gp_of(x, kernel(), constant())), (y,), {}, 4)
    theta, v = ours.layout.starting_points(4, torch.Generator().manual_seed(0)), numbers(4, 9)
    inverse = {f"f.{name}": value for name, value in ours.layout.constrain(theta).items()}
    values = {name: problem.transforms[name](value) for name, value in inverse.items()} | {"f.v": v}
    torch.testing.assert_close(
        problem.density(problem.sites.position(values)), tg.joint_log_density(ours)(torch.cat([theta, v], -1))
    )


def test_f_elsewhere_given_f_here():
    x, x_new = numbers(6, 2), numbers(4, 2, seed=1)
    site = gp_of(x, mean=constant())
    trace = pyro.poutine.trace(gp_model(site)).get_trace(None, x_new)
    values = {name.removeprefix("f."): node["value"][None] for name, node in trace.nodes.items() if name.startswith("f.")}
    ours = tg.GP(x, torch.ones(6), scaled_rbf(), tg.likelihoods.Bernoulli(), mean=constant())
    theta = ours.layout.unconstrain({name: value for name, value in values.items() if name != "v"})
    prior = ours.prior(theta)
    torch.testing.assert_close(trace.nodes["f"]["value"], ours.latents(prior, values["v"])[0].detach())
    expected, found = ours.predict_jointly(prior, values["v"], x_new), trace.nodes["f_new"]["fn"]
    torch.testing.assert_close(found.mean, expected.mean[0, 0].detach())
    torch.testing.assert_close(found.covariance_matrix, expected.covariance[0].detach())


@pytest.mark.slow
@quiet
def test_mcmc_predictive_and_a_kernel_made_in_the_model():
    x, y = binary_data(8)

    def model(x, y=None):
        f = GP("f", x, scaled_rbf())()
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    options = {**OPTIONS, "num_samples": 4, "warmup_steps": 4}
    found = []
    for this, args in ((model, (x, y)), (gp_model(gp_of(x)), (y,))):
        mcmc = MCMC(NUTS(this, max_tree_depth=2), **options)
        mcmc.run(*args)
        assert mcmc.draws.info["evaluated"] == "all chains at once"
        found.append(mcmc.get_samples())
    torch.testing.assert_close(found[0], found[1])
    assert found[0]["f.kernel.base_kernel.lengthscale"].shape == (12, 1, 2) and found[0]["f.v"].shape == (12, 8)
    assert pyro.infer.Predictive(model, found[0])(x)["y"].shape == (12, 8)
    drawn = pyro.infer.Predictive(gp_model(gp_of(x)), found[0], return_sites=("f", "f_new"))(None, x[:3] + 1e-9)
    assert bool(((drawn["f_new"] - drawn["f"][..., :3]).abs() < 0.02).all())  # jitter 1e-6 is sd 1e-3


@pytest.mark.slow
def test_a_guide_learns():
    x, y = binary_data(12)
    model = gp_model(gp_of(x))
    pyro.clear_param_store()
    guide = AutoNormal(model)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), pyro.infer.Trace_ELBO())
    losses = torch.tensor([svi.step(y) for _ in range(30)])
    assert losses[-10:].mean() < losses[:10].mean() - 5
    assert guide.median()["f.kernel.base_kernel.lengthscale"].shape == (1, 2)
    pyro.clear_param_store()


@pytest.mark.slow
def test_prior_draws_keep_to_priors_and_constraints():
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0)), outputscale_prior=GammaPrior(2.0, 1.0))
    site = GP("f", numbers(3, 1), kernel)
    drawn = torch.stack([pyro.poutine.trace(site).get_trace().nodes["f.kernel.outputscale"]["value"] for _ in range(200)])
    assert bool((drawn > 0).all()) and abs(float(drawn.mean()) - 2.0) < 0.6


def in_a_plate():
    with pyro.plate("many", 3):
        gp_of(numbers(4, 2))()


def without_sites():
    kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0)).requires_grad_(False)
    with pyro.plate("many", 3):
        GP("f", numbers(4, 2), kernel)()


def conditioned_on_a_number():
    pyro.condition(gp_of(numbers(4, 2)), data={"f.kernel.base_kernel.lengthscale": torch.tensor(0.3, dtype=F64)})()


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (in_a_plate, ValueError, "outside of plates"),
        (
            conditioned_on_a_number,
            ValueError,
            r"shape \(\), not \(1, 2\)\. Expected .* that shape, .* value\.expand\(1, 2\)",
        ),
        (without_sites, ValueError, r"site 'f.v' has shape \(3, 4\), not \(4,\).*outside of plates"),
        (lambda: GP("f", numbers(4, 2), "rbf"), TypeError, "Expected a gpytorch kernel"),
        (lambda: GP("f", numbers(4, 2), scaled_rbf(), mean=0.0), TypeError, "Expected a gpytorch mean"),
        (lambda: GP("f", numbers(4, 2), scaled_rbf(), jitter=-1.0), ValueError, "jitter is -1.0"),
        (lambda: GP("f", numbers(4, 2), RBFKernel()), ValueError, "prior"),
        (lambda: GP("f", numbers(4, 2).requires_grad_(True), scaled_rbf()), ValueError, "Expected constant inputs"),
        (lambda: gp_of(numbers(4, 2))(numbers(3, 2)), ValueError, "has drawn nothing yet"),
    ],
)
def test_what_a_site_cannot_be_is_said(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_sites_of_single_precision_are_worked_out_in_double():
    """Twenty points under a long lengthscale: in single precision nothing factorises."""
    x = torch.linspace(0, 1, 20)
    values = {"f.kernel.lengthscale": torch.full((1, 1), 2.0), "f.v": numbers(20).float().requires_grad_(True)}
    found = {}
    for dtype in (torch.float32, F64):
        site = GP("f", x.to(dtype), RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0)))
        given = {name: value.to(dtype) for name, value in values.items()}
        f = pyro.poutine.condition(site, data=given)()
        (slope,) = torch.autograd.grad(f.sum(), values["f.v"])
        elsewhere = site(x[:3].to(dtype) + 0.01)
        assert f.dtype == elsewhere.scale_tril.dtype == dtype
        found[dtype] = [part.detach().double() for part in (f, slope, elsewhere.mean, elsewhere.scale_tril)]
    torch.testing.assert_close(found[torch.float32], found[F64], rtol=1e-4, atol=1e-5)


def test_predictive_in_parallel_is_refused():
    x, _ = binary_data(5)
    model = gp_model(gp_of(x))
    draws = {"f.kernel.base_kernel.lengthscale": torch.ones(3, 1, 2, dtype=F64), "f.kernel.outputscale": torch.ones(3, dtype=F64)}
    with pytest.raises(ValueError, match="parallel=False"):
        pyro.infer.Predictive(model, {**draws, "f.v": numbers(3, 5)}, parallel=True)()
