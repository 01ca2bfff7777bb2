"""Sequential importance sampling: unbiased beside lattices, orthants and importance sampling; its draws are the posterior's."""

import math

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

import torchgpmc as tg
from tests.calibration import worst_excess
from tests.problems import fixed_kernel, generator, gp, inputs, kernel, make, sparse_gp, targets
from tests.speed import quick
from torchgpmc.evidence import SequentialImportance
from torchgpmc.evidence import sequential_importance as module
from torchgpmc.models.latents import likelihood_values

REPEATS = 20_000
NODES = {1: 2001, 2: 301, 3: 81}


def small(likelihood, num_data):
    """Few data under a wide prior, so that p(f | y) is far from normal."""
    y = torch.tensor([1.0, 0.0, 1.0]) if likelihood in ("logit", "probit") else torch.tensor([4.0, 0.0, 1.0])
    if likelihood == "beta":
        y = torch.tensor([0.97, 0.02, 0.6])
    made = make(likelihood).requires_grad_(False)
    if likelihood == "beta":
        made.scale = 8.0
    return tg.GP(inputs(3, 1)[:num_data], y[:num_data], fixed_kernel(outputscale=6.0), made)


def no_theta(count):
    return torch.zeros(count, 0, dtype=torch.float64)


def moments(v):
    return torch.cat([v, v.square(), (v[:, :1] * v[:, -1:])], -1)


def on_a_lattice(model):
    """p(y) and the integral of p(y | v) p(v) moments(v), by the trapezoidal rule."""
    size = model.latent_size
    axis = torch.linspace(-9, 9, NODES[size], dtype=torch.float64)
    v = torch.cartesian_prod(*[axis] * size).view(-1, size)
    mass = torch.softmax(-0.5 * v.square().sum(-1), 0)
    prior = model.prior(no_theta(1))
    f = prior.mean + v @ prior.factor[0].T
    values = likelihood_values(prior)
    logs = model.likelihood_function(values, lambda likelihood: likelihood.pointwise_log_prob(f, model.train_y)).sum(-1)
    mass = mass * logs.exp()
    return mass.sum(), (mass.unsqueeze(-1) * moments(v)).sum(0)


def excess(model, start=None, num_points=2, **options):
    """E[estimate] = p(y) and E[estimate g(kept draw)] = the integral of p(y | v) p(v) g(v)."""
    evidence, expected = on_a_lattice(model)
    estimator = SequentialImportance(num_points, **options).estimator(model)
    begun = None if start is None else start.expand(REPEATS, -1)
    found = estimator.draw(no_theta(REPEATS), generator(), begun)
    values = torch.cat([torch.ones(REPEATS, 1), moments(found.whitened)], -1) * found.value.exp().unsqueeze(-1)
    return worst_excess(values / evidence, torch.cat([torch.ones(1), expected / evidence]))


CASES = [("logit", 1), ("logit", 2), ("logit", 3), ("laplace", 2), ("poisson", 2), ("poisson", 3), ("probit", 3), ("beta", 2)]


@pytest.mark.statistical
@pytest.mark.parametrize(("likelihood", "num_data"), quick([("logit", 3), ("poisson", 2), ("beta", 2)], CASES))
def test_estimates_are_unbiased_and_their_draws_the_posteriors(likelihood, num_data):
    assert excess(small(likelihood, num_data)) < 1


@pytest.mark.slow
@pytest.mark.statistical
def test_sites_that_are_far_from_matched_leave_estimates_unbiased():
    model = small("poisson", 3)
    assert excess(model, approximation=tg.Laplace(max_iterations=1)) < 1
    other = torch.tensor([[0.4, 0.1, 0.3, -0.5, 0.6, 0.2]], dtype=torch.float64)
    assert excess(model, other, approximation=tg.EP(tolerance=1e9)) < 1


def without_slopes(monkeypatch):
    parts = module.MonotoneMaps.parts

    def planted(maps, z):
        value, slope = parts(maps, z)
        return value, torch.nn.functional.pad(torch.ones_like(slope[:1]), (0,) * 7 + (len(slope) - 1,))

    monkeypatch.setattr(module.MonotoneMaps, "parts", planted)


def without_sites(monkeypatch):
    monkeypatch.setattr(module._Guide, "log_site", lambda guide, x: torch.zeros_like(x))


def without_normaliser(monkeypatch):
    guide = module._guide
    monkeypatch.setattr(module, "_guide", lambda *parts: guide(*parts)._replace(log_normaliser=torch.zeros(())))


@pytest.mark.parametrize("plant", [without_slopes, without_sites, without_normaliser])
def test_weights_that_leave_something_out_are_caught(plant, monkeypatch):
    plant(monkeypatch)
    assert excess(small("logit", 3)) > 1


def apart(first, second, theta, repeats=2000):
    """Whether two estimators have one expectation, at one theta."""
    batch = theta.expand(repeats, -1)
    ours, others = (estimator.draw(batch, generator(seed)).value for seed, estimator in enumerate((first, second)))
    return worst_excess(((ours - others.mean()).exp() - (others - others.mean()).exp()).unsqueeze(-1))


def twenty(likelihood):
    model = tg.GP(inputs(20), targets(likelihood, 20), kernel(), make(likelihood))
    theta = torch.zeros(1, model.layout.size, dtype=torch.float64)
    theta[:, :3] = torch.tensor([1.5, -1.0, -0.5])
    return model, theta


@pytest.mark.statistical
def test_probit_evidence_is_that_of_orthants():
    model, theta = twenty("probit")
    assert apart(SequentialImportance(16).estimator(model), tg.evidence.Orthant(16).estimator(model), theta) < 1


@pytest.mark.statistical
@pytest.mark.parametrize("likelihood", quick(["logit", "beta"], ["logit", "poisson", "negative_binomial", "ordinal", "beta"]))
def test_evidence_is_that_of_long_importance_sampling(likelihood):
    model, theta = twenty(likelihood)
    others = tg.evidence.importance(model, tg.EP(), num_importance=512)
    assert apart(SequentialImportance(16).estimator(model), others, theta) < 1


def wide(num_data=100):
    """Labels in five columns under an outputscale of 20: f is rough, and no normal density of all of it is near."""
    base = ScaleKernel(RBFKernel()).requires_grad_(False)
    base.outputscale, base.base_kernel.lengthscale = 20.0, 0.2
    x = inputs(num_data, 5)
    return tg.GP(x, (torch.sin(5 * x[:, 0]) + x[:, 1] > 0.9) ^ (torch.arange(num_data) % 9 == 0), base, make("logit"))


def test_estimates_vary_much_less_than_those_from_one_normal_density():
    model = wide()
    ours = SequentialImportance(64).estimator(model).draw(no_theta(30), generator())
    others = tg.evidence.importance(model, tg.EP(), num_importance=256).draw(no_theta(30), generator())
    assert float(ours.value.std()) < 0.2 * float(others.value.std())
    assert float(ours.value.var()) < 4 * float(ours.variance.mean())


def test_estimates_go_on_from_sites_at_nearby_thetas():
    model = tg.GP(inputs(30), targets("logit", 30), kernel(), make("logit"))
    theta = model.layout.starting_points(5, generator()) + 3.0
    estimator = SequentialImportance().estimator(model)
    anew, nearby = estimator.draw(theta, generator()), estimator.draw(theta, generator(), estimator.start_at(theta))
    assert float(nearby.num_factorizations.sum()) < float(anew.num_factorizations.sum())
    assert float((nearby.value - anew.value).abs().max()) < 0.1


def test_a_theta_does_not_see_its_neighbours():
    model = gp("logit", num_data=40)
    theta = model.layout.sample_prior(7, generator())
    estimator = SequentialImportance(8, tg.EP(tolerance=1e-6)).estimator(model)  # in double precision
    auxiliary = torch.randn(7, estimator.auxiliary_size, dtype=torch.float64, generator=generator(1))
    together = estimator.evaluate(theta, auxiliary, None, 3)
    assert together.further_whitened.shape == (7, 2, 40)
    for row in range(7):
        alone = estimator.evaluate(theta[row : row + 1], auxiliary[row : row + 1], None, 3)
        for ours, others in zip(alone, together, strict=True):
            torch.testing.assert_close(ours[0], others[row], atol=1e-7, rtol=1e-7)


def test_every_chain_may_have_targets_of_its_own():
    model = gp("logit", num_data=5)
    theta = model.layout.sample_prior(2, generator())
    y = torch.stack([model.train_y, 1 - model.train_y])
    own = SequentialImportance(8).estimator(model, model.as_targets(y))
    auxiliary = torch.randn(2, own.auxiliary_size, dtype=torch.float64, generator=generator(1))
    flipped = SequentialImportance(8).estimator(tg.GP(model.train_x, y[1], model.kernel, model.likelihood))
    assert float(own.evaluate(theta, auxiliary).value[1]) == pytest.approx(
        float(flipped.evaluate(theta, auxiliary).value[1]), abs=1e-9
    )


def test_a_covariance_that_cannot_be_factorised_is_minus_infinity_and_its_neighbours_go_on():
    model = gp("logit", num_data=6, jitter=0.0)
    theta = torch.tensor([[0.0, 0.0, 0.0], [0.0, 40.0, 40.0]], dtype=torch.float64)
    found = SequentialImportance().estimator(model).draw(theta, generator())
    assert bool(torch.isfinite(found.value[0])) and float(found.value[1]) == -torch.inf
    assert found.converged.tolist() == [True, False]


@pytest.mark.parametrize("count", [0, 1000, 10**6])
def test_counts_of_any_size_have_finite_estimates(count):
    y = torch.tensor([0.0, float(count), 1.0, 3.0])
    model = tg.GP(inputs(4, 1), y, fixed_kernel(outputscale=9.0), make("poisson"))
    found = SequentialImportance().estimator(model).draw(no_theta(20), generator())
    assert bool(torch.isfinite(found.value).all()) and bool(torch.isfinite(found.whitened).all())
    assert float(found.value.std()) < 0.1


def test_single_precision_is_near_double():
    model = wide(40)
    estimator = SequentialImportance().estimator(model)
    auxiliary = torch.randn(1, estimator.auxiliary_size, dtype=torch.float64, generator=generator(1))
    double = estimator.evaluate(no_theta(1), auxiliary).value
    single = SequentialImportance().estimator(wide(40).float()).evaluate(no_theta(1).float(), auxiliary.float()).value
    assert single.dtype == torch.float32 and float((single - double).abs()) < 0.05


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")  # of so short runs
@pytest.mark.parametrize("method", [tg.AMIS, tg.PseudoMarginal])
def test_runs_take_it(method):
    model = gp("logit", num_data=8)
    options = {"warmup_steps": 5} if method is tg.PseudoMarginal else {}
    posterior = tg.sample(model, method(evidence=SequentialImportance(8)), num_samples=20, progress=False, **options)
    assert bool(torch.isfinite(posterior.latents).all())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: gp("student_t"), "Expected a log-concave likelihood"),
        (lambda: gp("softmax"), "Expected num_latents=1"),
        (lambda: sparse_gp("logit"), "Expected a model of f at the data"),
    ],
)
def test_models_that_are_not_served_are_refused(model, words):
    with pytest.raises(ValueError, match=f"SequentialImportance .*{words}"):
        SequentialImportance().estimator(model())


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="num_points is 1"):
        SequentialImportance(1).estimator(gp("logit"))
    with pytest.raises(TypeError, match="Expected an approximation"):
        SequentialImportance(approximation="EP").estimator(gp("logit"))
    with pytest.raises(ValueError, match="draws one latent function at the data"):
        SequentialImportance(approximation=tg.Laplace()).estimator(gp("softmax"))
    with pytest.raises(ValueError, match="cannot be combined with latent_steps"):
        tg.sample(gp("logit"), tg.PseudoMarginal(evidence=SequentialImportance(), latent_steps=1), num_samples=10, progress=False)
    assert math.isfinite(float(SequentialImportance(2).estimator(gp("logit")).draw(torch.zeros(1, 3).double(), generator()).value))
