"""Data of several classes in turn: unbiased beside lattices and importance sampling; its draws are the posterior's."""

import functools

import pytest
import torch

import torchgpmc as tg
from tests.calibration import worst_excess
from tests.problems import fixed_kernel, generator, gp, inputs, kernel, sparse_gp
from torchgpmc.approximations import ClassEP
from torchgpmc.approximations.class_sites import differences
from torchgpmc.evidence import SequentialCandidates
from torchgpmc.evidence import sequential_candidates as module

REPEATS = 10_000
NODES = {1: 401, 2: 41}
# Sites, precisions and then shifts of each function, that a search ends at which asks for nothing.
FAR = torch.tensor([[[0.4, 0.1], [0.3, 0.5], [0.6, 0.2], [0.5, -0.2], [-0.8, 0.3], [0.3, -0.1]]], dtype=torch.float64)
ANY = ClassEP(tolerance=1e9)
BASIS = differences(3, torch.zeros((), dtype=torch.float64))


def small(num_data):
    """Few data under a wide prior, so that p(f | y) is far from normal."""
    likelihood = tg.likelihoods.Softmax(num_classes=3)
    return tg.GP(inputs(3, 1)[:num_data], torch.tensor([1, 0, 2])[:num_data], fixed_kernel(outputscale=6.0), likelihood)


def no_theta(count):
    return torch.zeros(count, 0, dtype=torch.float64)


def moments(v):
    return torch.cat([v, v.square(), v[:, :1] * v[:, -1:]], -1)


@functools.cache
def on_a_lattice(num_data):
    """p(y) and the integral of p(y | v) p(v) moments(v) by the trapezoidal rule in what differences tell of; the rest is normal."""
    model = small(num_data)
    axis = torch.linspace(-8, 8, NODES[num_data], dtype=torch.float64)
    x = torch.cartesian_prod(*[axis] * (2 * num_data)).view(-1, 2, num_data)
    mass = torch.softmax(-0.5 * x.square().sum((1, 2)), 0)
    v = BASIS.T @ x
    f = v @ model.prior(no_theta(1)).factor[0].T
    mass = mass * model.likelihood.pointwise_log_prob(f.mT, model.train_y).sum(-1).exp()
    of_shared = torch.zeros(6 * num_data + 1, dtype=torch.float64)
    of_shared[3 * num_data : 6 * num_data] = 1 / 3
    of_shared[-1] = 1 / 3 if num_data == 1 else 0.0
    return mass.sum(), (mass.unsqueeze(-1) * moments(v.flatten(1))).sum(0) + of_shared * mass.sum()


def excess(num_data, start=None, num_latents=1, **options):
    """E[estimate] = p(y) and E[estimate g(kept draw)] = the integral of p(y | v) p(v) g(v)."""
    evidence, expected = on_a_lattice(num_data)
    estimator = SequentialCandidates(2, 3, **options).estimator(small(num_data))
    begun = None if start is None else start.expand(REPEATS, -1, -1)
    found = estimator.draw(no_theta(REPEATS), generator(), begun, num_latents)
    v = found.whitened if num_latents == 1 else found.further_whitened[:, -1]
    values = torch.cat([torch.ones(REPEATS, 1), moments(v)], -1) * found.value.exp().unsqueeze(-1)
    return worst_excess(values / evidence, torch.cat([torch.ones(1), expected / evidence]))


@pytest.mark.statistical
@pytest.mark.parametrize(("num_data", "num_latents"), [(1, 1), (2, 3)])
def test_estimates_are_unbiased_and_their_draws_the_posteriors(num_data, num_latents):
    assert excess(num_data, num_latents=num_latents) < 1


@pytest.mark.statistical
def test_sites_that_are_far_from_matched_leave_estimates_unbiased():
    assert excess(2, FAR, approximation=ANY) < 1


def without_slopes(monkeypatch):
    spread = module._spread_candidates

    def planted(uniforms):
        e, z = spread(uniforms)[0], torch.special.ndtri(uniforms)
        return e, 0.5 * (z.square() - e.square()).sum(1)

    monkeypatch.setattr(module, "_spread_candidates", planted)


def without_normaliser(monkeypatch):
    guide = module._guide
    monkeypatch.setattr(module, "_guide", lambda *parts: guide(*parts)._replace(log_normaliser=torch.zeros(len(parts[0].mean))))


def without_sites(monkeypatch):
    guide = module._guide
    monkeypatch.setattr(module, "_guide", lambda *parts: (lambda g: g._replace(slope=0 * g.slope))(guide(*parts)))


def without_what_functions_share(monkeypatch):
    whitened = module._Guide.whitened
    monkeypatch.setattr(module._Guide, "whitened", lambda guide, e, shared: whitened(guide, e, 0 * shared))


@pytest.mark.parametrize("plant", [without_slopes, without_normaliser, without_sites, without_what_functions_share])
def test_what_is_left_out_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    # Under sites that say little, so that wrong weights are bounded.
    assert excess(1, 0.2 * FAR[..., :1], approximation=ANY) > 1


def apart(first, second, theta, repeats=1000):
    """Whether two estimators have one expectation, at one theta."""
    batch = theta.expand(repeats, -1)
    ours, others = (estimator.draw(batch, generator(seed)).value for seed, estimator in enumerate((first, second)))
    return worst_excess(((ours - others.mean()).exp() - (others - others.mean()).exp()).unsqueeze(-1))


def of_classes(num_data, num_classes, **options):
    likelihood = tg.likelihoods.Softmax(num_classes=num_classes)
    return tg.GP(inputs(num_data), torch.arange(num_data) % num_classes, kernel(), likelihood, **options)


@pytest.mark.statistical
def test_evidence_is_that_of_long_importance_sampling():
    model = of_classes(12, 5)
    theta = torch.tensor([[1.0, -1.0, -0.5]], dtype=torch.float64)
    others = tg.evidence.importance(model, ClassEP(), num_importance=64)
    assert apart(SequentialCandidates(16, 8).estimator(model), others, theta) < 1


def test_of_two_classes_it_is_that_of_a_logit_of_their_difference():
    """Of twice the variance."""
    y = (torch.arange(18) % 3 > 0).double()
    classes = tg.GP(inputs(18), y, fixed_kernel(outputscale=4.0), tg.likelihoods.Softmax(num_classes=2))
    labels = tg.GP(inputs(18), y, fixed_kernel(outputscale=8.0), tg.likelihoods.Bernoulli(link="logit"))
    ours = SequentialCandidates(64).estimator(classes).draw(no_theta(100), generator()).value
    others = tg.evidence.SequentialImportance(64).estimator(labels).draw(no_theta(100), generator()).value
    assert worst_excess((ours.exp() / others.exp().mean() - 1).unsqueeze(-1)) < 1


def test_chunks_and_panels_change_nothing(monkeypatch):
    model = of_classes(20, 3)
    estimator = SequentialCandidates(8, 4).estimator(model)
    theta = model.layout.sample_prior(3, generator())
    auxiliary = torch.randn(3, estimator.auxiliary_size, generator=generator(), dtype=torch.float64)
    whole = estimator.evaluate(theta, auxiliary, num_latents=2)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(module, "_PANEL", 3)
    for ours, others in zip(estimator.evaluate(theta, auxiliary, num_latents=2), whole, strict=True):
        assert torch.allclose(ours.double(), others.double(), rtol=1e-4, atol=1e-5)


def test_data_sets_of_chains_are_their_own():
    model = of_classes(9, 3)
    y = torch.stack([model.train_y, 2 - model.train_y])
    own = SequentialCandidates(8, 4).estimator(model, model.as_targets(y))
    theta = torch.zeros(2, model.layout.size, dtype=torch.float64)
    auxiliary = torch.randn(2, own.auxiliary_size, generator=generator(), dtype=torch.float64)
    found = own.evaluate(theta, auxiliary).value
    alone = [SequentialCandidates(8, 4).estimator(model, model.as_targets(y[row])) for row in (0, 1)]
    for row in (0, 1):
        assert torch.allclose(found[row : row + 1], alone[row].evaluate(theta[row : row + 1], auxiliary[row : row + 1]).value)


def test_single_precision():
    model = of_classes(12, 3)
    theta = torch.zeros(1, model.layout.size)
    auxiliary = torch.randn(1, SequentialCandidates(8, 4).estimator(model).auxiliary_size, generator=generator())
    double = SequentialCandidates(8, 4).estimator(model).evaluate(theta.double(), auxiliary.double()).value
    single = SequentialCandidates(8, 4).estimator(of_classes(12, 3).float()).evaluate(theta, auxiliary).value
    assert single.dtype == torch.float32 and abs(float(single - double)) < 0.02


def test_a_covariance_that_cannot_be_factorised_is_a_value():
    model = of_classes(9, 3, jitter=0.0)
    theta = torch.tensor([[0.0, 12.0, 12.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert torch.isinf(SequentialCandidates(4, 4).estimator(model).draw(theta, generator()).value).tolist() == [True, False]


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
@pytest.mark.parametrize("method", [tg.AMIS, tg.PseudoMarginal])
def test_engines_take_it(method):
    options = {} if method is tg.AMIS else {"num_chains": 2, "warmup_steps": 5}
    posterior = tg.sample(of_classes(9, 3), method(evidence=SequentialCandidates(4, 4)), num_samples=20, progress=False, **options)
    assert torch.isfinite(posterior.predict(inputs(2)).mean).all()


@pytest.mark.parametrize("model", [lambda: gp("logit"), lambda: sparse_gp("softmax"), lambda: gp("heteroskedastic")])
def test_models_it_does_not_serve_are_named(model):
    with pytest.raises(ValueError, match=r"SequentialCandidates|ClassEP"):
        SequentialCandidates().estimator(model())


def test_options_are_checked():
    with pytest.raises(ValueError, match="num_points"):
        SequentialCandidates(1).estimator(of_classes(6, 3))
    with pytest.raises(ValueError, match="num_candidates"):
        SequentialCandidates(2, 1).estimator(of_classes(6, 3))
    with pytest.raises(TypeError, match="approximation"):
        SequentialCandidates(approximation="ClassEP").estimator(of_classes(6, 3))
    with pytest.raises(ValueError, match="latent_steps"):
        tg.sample(of_classes(6, 3), tg.PseudoMarginal(evidence=SequentialCandidates(), latent_steps=1), num_samples=10)
