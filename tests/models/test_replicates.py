"""Data that share their inputs as observations of one function value, and each datum's own value drawn given it."""

import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, NormalPrior

import torchgpmc as tg
from tests.problems import inputs
from torchgpmc.approximations.held_sites import HeldSitesMarginal
from torchgpmc.approximations.marginal import ApproximateMarginal
from torchgpmc.calls.stand_ins import in_terms_of_model, sampled_in_place_of, stand_ins
from torchgpmc.models.mean_in_kernel import MeanInKernel
from torchgpmc.models.replicates import AtUniqueInputs, with_replicates, without_replicates
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.posterior import Posterior
from torchgpmc.storage.draws import Draws

LENGTHSCALE, OUTPUTSCALE = GammaPrior(3.0, 3.0), GammaPrior(2.0, 2.0)
PLACE = torch.tensor([3, 0, 3, 1, 3, 0, 2, 2, 3, 4, 4, 3])  # of twelve data among five inputs
JITTER = 1e-6

LIKELIHOODS = {
    "logit": lambda: tg.likelihoods.Bernoulli("logit"),
    "probit": tg.likelihoods.Bernoulli,
    "poisson": tg.likelihoods.Poisson,
    "exposures": lambda: tg.likelihoods.Poisson(exposure=torch.linspace(0.5, 2.0, 12)),
    "negative binomial": lambda: tg.likelihoods.NegativeBinomial(dispersion_prior=GammaPrior(2.0, 2.0)),
    "student t": lambda: tg.likelihoods.StudentT(noise_prior=GammaPrior(2.0, 2.0), deg_free_prior=GammaPrior(2.0, 0.2)),
}
KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel(lengthscale_prior=LENGTHSCALE), outputscale_prior=OUTPUTSCALE),
    "matern, ard": lambda: MaternKernel(nu=1.5, ard_num_dims=2, lengthscale_prior=LENGTHSCALE),
}


class Unseen(tg.likelihoods.Factorised, Likelihood):
    """p(y | f) that does not depend on f."""

    is_log_concave = True

    def pointwise_log_prob(self, f, targets):
        return 0.0 * f


def model_of(likelihood="logit", kernel="rbf", place=PLACE, **options):
    likelihood = LIKELIHOODS[likelihood]() if isinstance(likelihood, str) else likelihood
    top = 2 if isinstance(likelihood, tg.likelihoods.Bernoulli) else 5
    y = torch.randint(0, top, (len(place),), generator=torch.Generator().manual_seed(0))
    return tg.GP(inputs(5)[place], y, KERNELS[kernel](), likelihood, **options)


def thetas(model, number=3):
    return model.layout.starting_points(number, torch.Generator().manual_seed(1))


def whitened(number, size, seed=2):
    return torch.randn(number, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def any_jitter(monkeypatch):
    """Such that it shows where it goes."""
    monkeypatch.setattr("torchgpmc.models.replicates._SMALL_JITTER", 10.0)
    return 0.5


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_prior_is_that_of_the_datas_mean_at_each_input(kernel, any_jitter):
    model = model_of(kernel=kernel, jitter=any_jitter)
    other = without_replicates(model)
    theta = thetas(model)
    counts = other.replicates
    average = torch.zeros(5, 12).double().index_put((other.place, torch.arange(12)), torch.ones(12).double()) / counts[:, None]
    expected = average @ model.prior(theta).covariance @ average.mT
    torch.testing.assert_close(other.prior(theta).covariance, expected, rtol=1e-10, atol=1e-13)
    some = torch.tensor([3, 0])
    torch.testing.assert_close(other.on_rows(some).prior(theta).covariance, expected[:, some][:, :, some], rtol=1e-10, atol=1e-13)
    assert other.layout.names == model.layout.names
    # What chains climb has the same jitter as what estimates factorise.
    v = whitened(3, 5)
    position = theta.clone().requires_grad_(True)
    value = other.log_likelihood(other.at_data(other.layout.raw_values(position)), v) + other.layout.log_prior(position)
    (slope,) = torch.autograd.grad(value.sum(), position)
    found, gradient = other.value_and_grad(theta, v, other.targets)
    torch.testing.assert_close(gradient[:, : theta.shape[1]], slope, rtol=1e-7, atol=1e-8)
    given = other.log_likelihood(other.at(other.prior(theta)), v)
    torch.testing.assert_close(found, other.layout.log_prior(theta) + given + log_standard_normal(v))


def test_searches_for_modes_have_the_same_jitter(any_jitter):
    other = without_replicates(model_of(jitter=any_jitter))
    theta = thetas(other, 2)
    found = HeldSitesMarginal.at(other, tg.EP(), theta[:1])(theta)
    torch.testing.assert_close(found, ApproximateMarginal(other, tg.EP())(theta), rtol=0.0, atol=0.02)


def test_weights_and_the_evidence_of_draws_go_with_them(any_jitter):
    model = model_of("poisson", place=torch.arange(60) % 5, jitter=any_jitter)
    others = stand_ins(model)
    weights, evidence = torch.randn(2, 1, 200, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    draws = Draws(thetas(model, 200)[None], whitened(200, 5)[None], weights)
    posterior = Posterior(others[-1].model, draws, {"lp": 0 * evidence, "log_evidence": evidence}, {})
    found = in_terms_of_model(others, posterior, 0)
    assert float((found.log_weights - weights).std()) > 0.1  # as of so large a jitter
    assert torch.equal(found.stats["log_evidence"], evidence)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("at_once", [5, 12])
def test_values_are_drawn_from_their_prior_where_what_they_are_made_of_is(kernel, at_once, monkeypatch):
    """Given theta v of all data is a linear map of [v of the inputs, noise]; its rows are orthonormal."""
    monkeypatch.setattr("torchgpmc.models.replicates._LEAST", at_once)  # data in blocks, and all together
    model = model_of(Unseen(), kernel)
    other = without_replicates(model)
    theta = thetas(model)[:1]
    columns = []
    for direction in torch.eye(5 + 12).double():
        monkeypatch.setattr("torchgpmc.models.replicates.normal_like", lambda like, generator, d=direction: d[None, 5:])
        found = with_replicates(model, other, theta, direction[None, :5], torch.Generator())
        columns.append(found.v[0])
        assert float(found.log_weight) == pytest.approx(0.0, abs=1e-12)
        f = model.latents(model.prior(theta), found.v)
        mean = torch.stack([f[:, other.place == u].mean(-1) for u in range(5)], -1)
        torch.testing.assert_close(mean, other.latents(other.prior(theta), direction[None, :5]), rtol=1e-8, atol=1e-8)
    map_ = torch.stack(columns, 1)
    torch.testing.assert_close(map_ @ map_.mT, torch.eye(12).double(), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("jitter", [JITTER, 0.5])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_log_density_is_the_models_and_weights_are_what_is_left_of_it(likelihood, jitter, monkeypatch):
    r"""w = p(theta, v, y) / [p(theta, v of inputs, y) q(d)], v and [v of inputs, d] being a rotation of each other given theta."""
    monkeypatch.setattr("torchgpmc.models.replicates._SMALL_JITTER", 1.0)
    model = model_of(likelihood, jitter=jitter)
    other = without_replicates(model)
    theta, v = thetas(model), whitened(3, 5)
    found = with_replicates(model, other, theta, v, torch.Generator().manual_seed(3))
    before = tg.joint_log_density(other)(torch.cat([theta, v], 1))
    after = tg.joint_log_density(model)(torch.cat([theta, found.v], 1))
    torch.testing.assert_close(after, before + found.change, rtol=1e-9, atol=1e-6)

    mean = other.latents(other.prior(theta), v)[:, other.place]
    deviation = model.latents(model.prior(theta), found.v) - mean
    leaf = mean.clone().requires_grad_(True)
    values = {name: value for name, value in model.layout.raw_values(theta).by_module["likelihood"].items()}
    log_prob = model.likelihood_function(
        {name: value.reshape(3, 1) for name, value in values.items()}, lambda part: part.pointwise_log_prob(leaf, model.train_y)
    )
    (slope,) = torch.autograd.grad(log_prob.sum(), leaf)
    centred = slope - torch.stack([slope[:, other.place == u].mean(-1) for u in range(5)], -1)[:, other.place]
    log_q = -0.5 * (deviation - jitter * centred).square().sum(-1) / jitter
    constant = after - before - log_q - found.log_weight
    # Each is half the log of 2 pi for what d has more dimensions than none: seven.
    torch.testing.assert_close(
        constant, torch.full((3,), -3.5 * torch.log(torch.tensor(2 * torch.pi))).double(), atol=1e-5, rtol=0.0
    )
    assert (found.log_weight.abs().max() < 1e-4) == (jitter == JITTER)


def test_weights_make_up_for_a_large_jitter(monkeypatch):
    """An evidence of all data, by weights of draws at their inputs alone, beside draws of all values from their prior."""
    monkeypatch.setattr("torchgpmc.models.replicates._SMALL_JITTER", 10.0)
    model = model_of("logit", jitter=2.0)
    other = without_replicates(model)
    theta, number = thetas(model)[:1], 100_000
    v = whitened(number, 5)
    prior = other.prior(theta)
    at = prior._replace(**{name: getattr(prior, name).expand(number, *getattr(prior, name).shape[1:]) for name in ("mean", "ok")})
    f = at.mean + v @ prior.factor[0].mT
    shared = other.likelihood_function({}, lambda part: part.log_prob(f, other.train_y))
    found = with_replicates(model, other, theta.expand(number, -1), v, torch.Generator().manual_seed(3))
    own = whitened(number, 12, seed=4) @ model.prior(theta).factor[0].mT
    expected = model.likelihood_function({}, lambda part: part.log_prob(own, model.train_y)).exp()
    weighted = (shared + found.log_weight).exp()
    error = ((expected.var() + weighted.var()) / number).sqrt()
    assert abs(expected.mean() - weighted.mean()) < 4 * error  # false alarms: 1 in 16,000
    assert abs(expected.mean() - shared.exp().mean()) > 5 * error  # which those without weights are not


def test_draws_without_a_covariance_have_some_values():
    model = model_of()
    other = without_replicates(model)
    theta = thetas(model)
    theta[1] = torch.nan
    found = with_replicates(model, other, theta, whitened(3, 5), torch.Generator().manual_seed(3))
    assert all(torch.isfinite(part).all() for part in (found.v, found.change, found.log_weight))


class OfMyOwn(tg.GP):
    pass


def test_other_models_are_sampled_as_they_are():
    x, y, kernel = inputs(5)[PLACE], torch.arange(12) % 2, KERNELS["rbf"]
    labels = LIKELIHOODS["logit"]
    models = [
        tg.GP(inputs(12), y, kernel(), labels()),
        tg.GP(inputs(5)[[0, 1, 2, 3, 4, 4]], y[:6], kernel(), labels()),  # few are alike
        tg.GP(inputs(8)[[0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 0, 6]], y, kernel(), tg.likelihoods.Bernoulli()),  # closed forms
        tg.GP(
            inputs(7)[[0, 1, 2, 3, 4, 5, 6, 6, 5, 6, 0, 6]], y.double(), kernel(), LIKELIHOODS["student t"]()
        ),  # has its own chains
        tg.GP(x, y, kernel(), labels(), jitter=1e-3),
        tg.GP(x, y, RBFKernel(lengthscale_prior=LENGTHSCALE) + LinearKernel(variance_prior=OUTPUTSCALE), labels()),
        tg.GP(x, y, kernel(), tg.likelihoods.Softmax(num_classes=2)),
        tg.GP(x, y.double(), kernel(), GaussianLikelihood(noise_prior=OUTPUTSCALE)),
        OfMyOwn(x, y, kernel(), labels()),
        tg.GPRegression(x, y.double(), kernel(), GaussianLikelihood(noise_prior=OUTPUTSCALE)),
        tg.SparseGP(x, y, kernel(), labels(), inducing_points=inputs(4)),
    ]
    for model in models:
        assert sampled_in_place_of(model) is model
    assert isinstance(sampled_in_place_of(tg.GP(x, y, kernel(), labels())), AtUniqueInputs)


def test_posteriors_of_other_models_stay_as_they_are():
    model = model_of(place=torch.arange(5))
    posterior = tg.sample(model, tg.AMIS(), num_samples=1000, seed=0, progress=False)
    assert in_terms_of_model(stand_ins(model), posterior, 0) is posterior


def agree(found, expected, names):
    for name in names:
        one, other = found.summary()[name], expected.summary()[name]
        error = other.sd * (1 / one.ess_bulk + 1 / other.ess_bulk) ** 0.5
        assert abs(one.mean - other.mean) < 4.5 * error  # false alarms: 7 in a million


@pytest.mark.parametrize("likelihood", ["logit", "poisson", "student t"])
def test_the_default_call_has_the_posterior_that_weighted_draws_of_all_data_have(likelihood):
    place = torch.arange(60) % 5
    model = model_of(likelihood, place=place)
    posterior = tg.sample(model, seed=0, num_samples=1500, progress=False)
    assert posterior.info["replicates"].startswith("60 data at 5 inputs") and posterior.complaints() == []
    assert type(posterior.model) is tg.GP and posterior.latents.shape[-1] == 60
    expected = tg.sample(model, tg.AMIS(num_importance=64), num_samples=6000, seed=1, progress=False)
    agree(posterior, expected, (*model.layout.names, "lp"))
    new = inputs(3, 2, seed=3)
    torch.testing.assert_close(posterior.predict(new).mean, expected.predict(new).mean, rtol=0.05, atol=0.0)
    torch.testing.assert_close(posterior.fitted().mean, expected.fitted().mean, rtol=0.05, atol=0.0)


def test_a_mean_is_integrated_out_beside_it(tmp_path):
    place = torch.arange(60) % 5
    model = model_of("poisson", place=place, mean=ConstantMean(constant_prior=NormalPrior(0.75, 1.5)))
    assert isinstance(sampled_in_place_of(model), MeanInKernel) and sampled_in_place_of(model).latent_size == 5
    file = tmp_path / "run.pt"
    posterior, again = (tg.sample(model, seed=0, num_samples=1500, progress=False, checkpoint=file) for _ in range(2))
    assert torch.equal(posterior.whitened, again.whitened) and torch.equal(posterior.theta, again.theta)
    assert {"replicates", "mean.constant"} <= set(posterior.info) and posterior.complaints() == []
    assert "log_evidence" not in posterior.stats  # of theta without the mean
    expected = tg.sample(model, tg.AMIS(tg.EP(), num_importance=64), num_samples=6000, seed=1, progress=False)
    agree(posterior, expected, (*model.layout.names, "lp"))
    # What goes on from its draws has all data's values, and the mean among theta.
    further = tg.sample(model, seed=1, progress=False, start=posterior)
    assert further.theta.shape[-1] == posterior.theta.shape[-1] and "replicates" not in further.info


def test_chains_whose_jitter_matters_are_not_returned_in_silence(any_jitter):
    model = model_of("poisson", place=torch.arange(60) % 5, jitter=any_jitter)
    others = stand_ins(model)
    draws = Draws(thetas(model, 200).view(4, 50, -1), whitened(200, 5).view(4, 50, -1), None)
    posterior = Posterior(others[-1].model, draws, {"lp": torch.zeros(4, 50).double()}, {})
    with pytest.warns(tg.SamplingWarning, match="the jitter matters"):
        in_terms_of_model(others, posterior, 0)
