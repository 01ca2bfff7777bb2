"""A normal mean integrated out, and drawn given the functions."""

import math

import pytest
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior

import torchgpmc as tg
from tests.problems import inputs
from torchgpmc.calls.candidate import Limits
from torchgpmc.calls.default_call import Rule
from torchgpmc.calls.stand_ins import in_terms_of_model, sampled_in_place_of, stand_ins
from torchgpmc.models.mean_in_kernel import with_mean, without_mean
from torchgpmc.posterior import Posterior
from torchgpmc.storage.draws import Draws

LENGTHSCALE, OUTPUTSCALE, CENTRE, DEVIATION = GammaPrior(3.0, 3.0), GammaPrior(2.0, 2.0), 0.75, 1.5

KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel(lengthscale_prior=LENGTHSCALE), outputscale_prior=OUTPUTSCALE),
    "plain": lambda: RBFKernel(lengthscale_prior=LENGTHSCALE),
    "matern, ard": lambda: ScaleKernel(
        MaternKernel(nu=1.5, ard_num_dims=2, lengthscale_prior=LENGTHSCALE), outputscale_prior=OUTPUTSCALE
    ),
    "sum": lambda: RBFKernel(lengthscale_prior=LENGTHSCALE) + LinearKernel(variance_prior=OUTPUTSCALE),
}


def counts(name="rbf", number=12, likelihood=None, **options):
    mean = options.pop("mean", None) or ConstantMean(constant_prior=NormalPrior(CENTRE, DEVIATION))
    y = torch.poisson(torch.full((number,), 3.0), generator=torch.Generator().manual_seed(0))
    return tg.GP(inputs(number), y, KERNELS[name](), likelihood or tg.likelihoods.Poisson(), mean=mean, **options)


def thetas(model, number=3):
    """Of the model with its mean, and of the one without."""
    theta = model.layout.starting_points(number, torch.Generator().manual_seed(1))
    (place,) = model.layout.columns("mean")
    return theta, torch.cat([theta[:, :place], theta[:, place + 1 :]], 1)


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_has_the_means_variance_everywhere_and_the_same_slopes(name):
    model = counts(name)
    other = without_mean(model)
    theta, rest = thetas(model)
    torch.testing.assert_close(other.prior(rest).covariance, model.prior(theta).covariance + DEVIATION**2)
    torch.testing.assert_close(other.prior(rest).mean, torch.full((3, 12), CENTRE).double())
    new = inputs(4, 2, seed=3)
    torch.testing.assert_close(
        other.cross(other.prior(rest), new).covariance, model.cross(model.prior(theta), new).covariance + DEVIATION**2
    )
    torch.testing.assert_close(
        other.cross(other.prior(rest), new).variance, model.cross(model.prior(theta), new).variance + DEVIATION**2
    )
    position = rest.clone().requires_grad_(True)
    v = torch.randn(3, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    at = other.at_data(other.layout.raw_values(position))
    value = other.log_likelihood(at, v) + other.layout.log_prior(position)
    (slope,) = torch.autograd.grad(value.sum(), position)
    found = other.value_and_grad(rest, v, other.targets)
    torch.testing.assert_close(found[1][:, : rest.shape[1]], slope, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", KERNELS)
def test_mean_and_functions_are_drawn_from_their_prior_where_what_they_are_made_of_is(name):
    """Given theta, [v of the model without a mean, noise] and [(c - m) / s, v] are both standard normal: the map is a rotation."""
    model, number = counts(name), 12
    other = without_mean(model)
    rest = thetas(model)[1][:1]
    (place,) = model.layout.columns("mean")

    columns = []
    for direction in torch.eye(number + 1).double():
        v, noise = direction[None, :number], direction[number:]
        found = drawn_with(noise, model, other, rest, v)
        columns.append(torch.cat([(found.theta[0, place : place + 1] - CENTRE) / DEVIATION, found.v[0]]))
        f = model.latents(model.prior(found.theta), found.v)
        torch.testing.assert_close(f, other.latents(other.prior(rest), v), rtol=1e-8, atol=1e-8)
    rotation = torch.stack(columns, 1)
    torch.testing.assert_close(rotation.mT @ rotation, torch.eye(number + 1).double(), rtol=0.0, atol=1e-8)


def drawn_with(noise, model, other, rest, v):
    """With the noise that is to be added to the mean."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchgpmc.models.mean_in_kernel.normal_like", lambda like, generator: noise)
        return with_mean(model, other, rest, v, torch.Generator())


@pytest.mark.parametrize("name", KERNELS)
def test_the_log_density_is_the_models(name):
    model = counts(name)
    other = without_mean(model)
    _, rest = thetas(model)
    v = torch.randn(3, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = with_mean(model, other, rest, v, torch.Generator().manual_seed(3))
    after = tg.joint_log_density(model)(torch.cat([found.theta, found.v], 1))
    before = tg.joint_log_density(other)(torch.cat([rest, v], 1))
    torch.testing.assert_close(after, before + found.change, rtol=1e-9, atol=1e-7)


def test_draws_without_a_covariance_have_some_mean():
    model = counts()
    other = without_mean(model)
    _, rest = thetas(model)
    rest[1] = torch.nan
    v = torch.randn(3, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = with_mean(model, other, rest, v, torch.Generator().manual_seed(3))
    (place,) = model.layout.columns("mean")
    assert torch.isfinite(found.theta[:, place]).all() and torch.isfinite(found.v).all() and torch.isfinite(found.change).all()


class OfMyOwn(tg.GP):
    pass


def test_other_models_keep_their_mean():
    x, y = inputs(12), torch.arange(12) % 4
    normal, kernel = NormalPrior(0.0, 1.0), KERNELS["rbf"]
    fixed = ConstantMean(constant_prior=normal).requires_grad_(False)
    within = ConstantMean(constant_prior=NormalPrior(0.5, 1.0), constant_constraint=Interval(0.0, 1.0))
    linear = LinearMean(2, bias=False)
    linear.register_prior("weights_prior", NormalPrior(torch.zeros(2, 1), torch.ones(2, 1)), "weights")
    vague = ConstantMean(constant_prior=NormalPrior(0.0, 1000.0))
    others = [fixed, within, vague, ConstantMean(constant_prior=LogNormalPrior(0.0, 1.0)), linear]
    models = [tg.GP(x, y, kernel(), tg.likelihoods.Poisson(), mean=mean) for mean in others]
    own = ConstantMean(constant_prior=normal)
    models += [
        tg.GP(x, y, kernel(), tg.likelihoods.Poisson()),
        OfMyOwn(x, y, kernel(), tg.likelihoods.Poisson(), mean=own),
        tg.GP(x, y, kernel().requires_grad_(False), tg.likelihoods.Poisson(), mean=own),  # with it, no hyperparameter were left
        tg.GP(x, y.double(), kernel(), tg.likelihoods.StudentT(noise_prior=OUTPUTSCALE, deg_free_prior=OUTPUTSCALE), mean=own),
        tg.GPRegression(x, y.double(), kernel(), GaussianLikelihood(noise_prior=OUTPUTSCALE), mean=own),
        tg.SparseGP(x, y, kernel(), tg.likelihoods.Poisson(), mean=own, inducing_points=x[:4]),
    ]
    for model in models:
        assert sampled_in_place_of(model) is model


def test_the_default_call_has_the_mean_that_weighted_draws_of_it_have():
    model = counts(number=30)
    posterior = tg.sample(model, seed=0, num_samples=1500, progress=False)
    assert posterior.info["mean.constant"].startswith("integrated out") and posterior.complaints() == []
    assert type(posterior.model) is tg.GP
    expected = tg.sample(model, tg.AMIS(tg.EP(), num_importance=64), num_samples=6000, seed=1, progress=False)
    found, known = posterior.summary(), expected.summary()
    for name in (*model.layout.names, "lp"):
        error = known[name].sd * (1 / found[name].ess_bulk + 1 / known[name].ess_bulk) ** 0.5
        assert abs(found[name].mean - known[name].mean) < 4 * error  # false alarms: 4 in 16,000
    new = inputs(3, 2, seed=3)
    torch.testing.assert_close(posterior.predict(new).mean, expected.predict(new).mean, rtol=0.05, atol=0.0)


def test_a_finished_call_is_returned_from_its_file_with_the_same_means(tmp_path):
    model, file = counts(), tmp_path / "run.pt"
    first, again = (tg.sample(model, seed=0, progress=False, checkpoint=file) for _ in range(2))
    assert torch.equal(first.samples["mean.constant"], again.samples["mean.constant"])
    assert torch.equal(first.whitened, again.whitened)
    # What goes on from its draws has the mean among theta.
    further = tg.sample(model, seed=1, progress=False, start=first)
    assert further.theta.shape[-1] == first.theta.shape[-1] and "mean.constant" not in further.info


def test_posteriors_of_other_models_stay_as_they_are():
    model = counts(mean=ConstantMean().requires_grad_(False))
    posterior = tg.sample(model, tg.AMIS(tg.EP()), num_samples=1000, seed=0, progress=False)
    assert in_terms_of_model(stand_ins(model), posterior, 0) is posterior


def test_chains_go_on_while_what_is_returned_is_not_good():
    """Of 500 x 9 counts chains without a mean had R-hats of 1.01, and the log density with one 1.011: returned, and not trusted."""
    model, generator = without_mean(counts()), torch.Generator().manual_seed(0)
    theta, v, lp = (torch.randn(4, 500, *rest, generator=generator, dtype=torch.float64) for rest in ((2,), (12,), ()))

    def posterior(shift):
        stats = {"lp": lp + shift * torch.arange(4.0).unsqueeze(-1)}
        return Posterior(model, Draws(theta, v, None), stats, {"method": "NUTS()"})

    rule, good = Rule(400, Limits(1, 1000, math.inf)), posterior(0.0)
    assert good.complaints() == [] and posterior(1.0).complaints() != []
    assert rule(500, 0.0, lambda: good)
    assert rule._replace(as_returned=lambda unchanged: unchanged)(500, 0.0, lambda: good)
    assert not rule._replace(as_returned=lambda _: posterior(1.0))(500, 0.0, lambda: good)
