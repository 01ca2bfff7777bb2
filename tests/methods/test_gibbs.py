"""Gibbs sampling and moves of latents: formulas as the papers have them, resumed and chunked runs, and what is refused."""

import sys

import pytest
import torch

import torchgpmc as tg
from tests.problems import LIKELIHOODS, fixed_kernel, gp, inputs, sparse_gp, targets
from tests.speed import quick
from tests.test_loop import Stop, same
from torchgpmc.models import JointLogDensity
from torchgpmc.models.latents import likelihood_values
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.parameterizations import ThetaGiven, _single_site_precision
from torchgpmc.samplers import auxiliary_gradient
from torchgpmc.samplers.auxiliary_gradient import axes_of
from torchgpmc.samplers.metropolis import accept

pytestmark = pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
OPTIONS = {"num_samples": 6, "warmup_steps": 12, "num_chains": 3, "seed": 4, "progress": False}
# Sites of one data set are those at the mode of theta, of several at the prior's median: other coordinates, other draws.
UNDER_SITES = tg.Gibbs(parameterization=tg.Interwoven(second=tg.Surrogate(whitening=tg.Laplace())))
SWEEPS = [
    tg.Gibbs(parameterization=tg.Surrogate(), latent_steps=2, thinning=2),
    tg.Gibbs(hyper=tg.HMC(num_steps=2), latent=tg.EllipticalSlice(), latent_steps=2, hyper_steps=2),
    tg.Gibbs(hyper=tg.NUTS(max_tree_depth=2), latent=tg.PCN(), parameterization=tg.Sufficient()),
    UNDER_SITES,
    tg.Gibbs(hyper=tg.PseudoMarginal(num_importance=2, independent_share=0.5), hyper_steps=2, latent_steps=2),
    tg.Gibbs(hyper=tg.AdaptiveMH(), latent=tg.HMC(num_steps=3), parameterization=tg.Ancillary(), latent_steps=1),
]
MOVES = [tg.AuxiliaryGradient(thinning=2), tg.PCN(), tg.EllipticalSlice()]


def latents_alone(likelihood="probit"):
    return tg.GP(inputs(6), targets(likelihood, 6), fixed_kernel(), LIKELIHOODS[likelihood]())


def model_for(method):
    return gp("probit") if isinstance(method, tg.Gibbs) else latents_alone()


def name_of(method):
    return type(method).__name__


@pytest.mark.parametrize("method", quick(MOVES, SWEEPS + MOVES), ids=name_of)
@pytest.mark.parametrize("advances", [5, 15])
def test_a_run_that_died_resumes_to_the_same_bits(method, advances, tmp_path, monkeypatch):
    model, checkpoint = model_for(method), tg.Checkpoint(tmp_path / "run.ckpt", every=1)
    plain = tg.sample(model, method, **OPTIONS)
    advance = ChainRun.advance

    def dying(self, state, generator):
        if state.iteration == advances:
            raise Stop
        return advance(self, state, generator)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(ChainRun, "advance", dying)
        tg.sample(model, method, **OPTIONS, checkpoint=checkpoint)
    assert same(plain, tg.sample(model, method, **OPTIONS, checkpoint=checkpoint))


@pytest.mark.parametrize("method", quick(MOVES, SWEEPS + MOVES), ids=name_of)
def test_chunks_and_data_sets_of_their_own_change_no_chain(method):
    options = {**OPTIONS, "num_samples": 2, "warmup_steps": 3}
    model = model_for(method)
    own = model.with_targets(model.train_y.expand(3, -1))
    whole, apart = (tg.sample(each, method, **options) for each in (model, own))
    pairs = [(whole, tg.sample(model, method, **options, chain_chunk=2)), (apart, tg.sample(own, method, **options, chain_chunk=2))]
    for one, other in pairs if method is UNDER_SITES else [*pairs, (whole, apart)]:
        torch.testing.assert_close(other.theta, one.theta, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(other.whitened, one.whitened, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_draws_of_several_latents_and_of_inducing_values():
    for model in (gp("softmax"), sparse_gp("poisson")):
        posterior = tg.sample(model, tg.Gibbs(latent_steps=2), **OPTIONS)
        position = torch.cat([posterior.theta, posterior.whitened], -1)[:, -1]
        torch.testing.assert_close(tg.joint_log_density(model)(position), posterior.stats["lp"][:, -1])


def test_the_ratio_of_auxiliary_gradients_is_that_of_the_proposals_densities_of_f(generator, monkeypatch):
    """Titsias & Papaspiliopoulos 2018: q(y | x) = N((2 / delta) A (x + (delta / 2) g), (2 / delta) A A + A)."""
    model, delta = latents_alone("poisson"), 0.7
    joint = JointLogDensity(model)
    prior, at = joint.fixed.prior, joint.fixed
    factor, unit = prior.factor[0], torch.eye(6, dtype=torch.float64)

    class Likelihood:
        def value_and_grad(self, v):
            v = v.detach().requires_grad_(True)
            value = model.log_likelihood(at, v)
            return value.detach(), torch.autograd.grad(value.sum(), v)[0]

    seen = []
    module = sys.modules["torchgpmc.samplers.auxiliary_gradient"]
    monkeypatch.setattr(module, "accept", lambda *ends: seen.append(ends) or accept(*ends))
    sampler = auxiliary_gradient(Likelihood(), step_size=torch.tensor(delta), axes=lambda: axes_of((factor.T @ factor)[None]))
    sampler.step(sampler.init(torch.randn(4, 6, generator=generator, dtype=torch.float64), generator), generator)
    ((move, proposed, state),) = seen
    covariance = factor @ factor.T
    a = torch.linalg.inv(torch.linalg.inv(covariance) + 2 / delta * unit)

    def log_q(end, start):
        f = (start.position @ factor.T).requires_grad_(True)
        log_likelihood = model.likelihood.log_prob(f, model.train_y)
        slope = torch.autograd.grad(log_likelihood.sum(), f)[0]
        mean = 2 / delta * (f.detach() + delta / 2 * slope) @ a
        return torch.distributions.MultivariateNormal(mean, 2 / delta * a @ a + a).log_prob(end.position @ factor.T)

    def log_prior(place):
        return -0.5 * place.position.square().sum(-1)

    expected = log_q(state, proposed) - log_q(proposed, state) + log_prior(proposed) - log_prior(state)
    torch.testing.assert_close(move.correction, expected, rtol=1e-6, atol=1e-8)


def test_the_surrogate_density_is_that_of_the_paper(generator):
    """Murray & Adams 2010, eq. 12: p(theta) N(g | m, K + S) p(y | f), with f a draw of p(f | g, theta) made from eta."""
    model, parameterization = gp("poisson"), tg.Surrogate()
    joint = JointLogDensity(model)
    theta = 0.5 * torch.randn(4, model.layout.size, generator=generator, dtype=torch.float64)
    v = torch.randn(4, model.latent_size, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        at = model.at_data(model.layout.raw_values(theta[:1].expand(4, -1)))
        held, _ = parameterization.hold(model, at, v, model.targets, generator)
    value, (kept, moved, _) = ThetaGiven(joint, parameterization, held).draw(theta, generator)
    noise = torch.diag_embed(1 / _single_site_precision(model, kept.at, model.targets))
    covariance, f = kept.at.prior.covariance, model.latents(kept.at.prior, moved)
    spread = torch.distributions.MultivariateNormal(torch.zeros(6, dtype=torch.float64), covariance + noise)
    log_likelihood = model.likelihood_function(likelihood_values(kept.at.prior), lambda part: part.log_prob(f, model.train_y))
    expected = model.layout.log_prior(theta) + spread.log_prob(held.noisy) + log_likelihood
    expected = expected - 0.5 * held.white.square().sum(-1)
    torch.testing.assert_close(value - value[:1], expected - expected[:1], rtol=1e-7, atol=1e-7)
    # f = D eta + m, D D' = R = S - S (S + K)^-1 S: so f - m has the length of eta in the metric of R.
    gain = torch.linalg.solve(covariance + noise, covariance)
    centre = (held.noisy.unsqueeze(-2) @ gain).squeeze(-2)
    inner = torch.linalg.inv(covariance) + torch.linalg.inv(noise)
    length = torch.einsum("cn,cnm,cm->c", f - centre, inner, f - centre)
    torch.testing.assert_close(length, held.white.square().sum(-1), rtol=1e-5, atol=1e-5)


WHITE = tg.Surrogate(whitening=tg.Laplace())


@pytest.mark.parametrize("make", [gp, sparse_gp])
def test_the_white_surrogate_density_is_that_of_theta_and_white_latents(make, generator):
    """As :class:`JointLogDensity` has it, which NUTS samples in these coordinates."""
    model = make("poisson")
    (parameterization,) = WHITE.parts(model)
    theta = 0.5 * torch.randn(4, model.layout.size, generator=generator, dtype=torch.float64)
    v = torch.randn(4, model.latent_size, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        at = model.at_data(model.layout.raw_values(theta[:1].expand(4, -1)))
        held, _ = parameterization.hold(model, at, v, model.targets, generator)
    value, moved = ThetaGiven(JointLogDensity(model), parameterization, held).draw(theta, generator)
    white = JointLogDensity(model, sites=parameterization.sites)
    position = torch.cat([theta, held.white], -1)
    torch.testing.assert_close(value, white(position), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(moved.v, white.whitened(position)[0], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("parameterization", [tg.Sufficient(), tg.Surrogate(), WHITE])
def test_coordinates_lead_back_to_where_the_chains_are(parameterization, generator):
    model = gp("student_t")
    (parameterization,) = parameterization.parts(model)
    joint = JointLogDensity(model)
    position = torch.randn(3, model.layout.size + model.latent_size, generator=generator, dtype=torch.float64)
    theta, v = position.split([model.layout.size, model.latent_size], -1)
    with torch.no_grad():
        held, log_volume = parameterization.hold(model, model.at_data(model.layout.raw_values(theta)), v, model.targets, generator)
    value, moved = ThetaGiven(joint, parameterization, held).draw(theta, generator)
    torch.testing.assert_close(moved.v, v, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(value, joint(position) + log_volume, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "error", "match"),
    [
        (tg.Gibbs(hyper=tg.PseudoMarginalSlice()), TypeError, r"^hyper is PseudoMarginalSlice.*or PseudoMarginal\(\)"),
        (
            tg.Gibbs(hyper=tg.PseudoMarginal(correlation=0.9)),
            ValueError,
            r"^correlation is 0.9 in PseudoMarginal\(\).*Expected 0.0",
        ),
        (
            tg.Gibbs(hyper=tg.PseudoMarginal(), parameterization=tg.Surrogate()),
            ValueError,
            r"^parameterization is Surrogate\(whitening=None, precision=None\) with hyper=PseudoMarginal\(\).*AdaptiveMH\(\)",
        ),
        (tg.Gibbs(hyper=tg.NUTS), TypeError, r"^hyper is <class.*Expected AdaptiveMH\(\)"),
        (tg.Gibbs(latent=tg.AdaptiveMH()), TypeError, r"^latent is AdaptiveMH.*Expected AuxiliaryGradient\(\)"),
        (tg.Gibbs(latent=tg.NUTS(whitening=tg.EP())), ValueError, r"^whitening is EP.*moves the latents alone.*Expected None"),
        (tg.Gibbs(parameterization="surrogate"), TypeError, r"^parameterization is 'surrogate'\. Expected Sufficient\(\)"),
        (tg.Gibbs(hyper=tg.NUTS(marginal=tg.Laplace())), ValueError, r"^marginal is Laplace.*Expected None"),
        (tg.Gibbs(hyper=tg.AdaptiveMH(thinning=3)), ValueError, r"^thinning is 3 in AdaptiveMH\(\).*Expected 1"),
        (tg.Gibbs(latent=tg.EllipticalSlice(thinning=5)), ValueError, r"^thinning is 5 in EllipticalSlice\(\).*Expected 1"),
        (tg.Gibbs(hyper=tg.HMC(num_steps=0)), ValueError, "num_steps is 0"),
        (tg.Gibbs(latent=tg.PCN(target_accept_prob=2.0)), ValueError, "target_accept_prob is 2.0"),
        (tg.Gibbs(latent_steps=0), ValueError, "latent_steps is 0"),
        (tg.AuxiliaryGradient(), ValueError, r"AuxiliaryGradient samples latents alone.*Gibbs\(latent=AuxiliaryGradient\(\)\)"),
    ],
)
def test_what_cannot_be_is_refused(method, error, match):
    with pytest.raises(error, match=f"(?s){match}"):
        tg.sample(gp("probit"), method, **OPTIONS)


@pytest.mark.parametrize(
    ("method", "name", "is_fixed"),
    [
        (tg.Gibbs(), "AuxiliaryGradient", False),
        (tg.Gibbs(hyper=tg.HMC(), latent=tg.EllipticalSlice()), "HMC", False),
        (tg.AuxiliaryGradient(), "AuxiliaryGradient", True),
    ],
)
def test_gradients_of_a_step_are_refused(method, name, is_fixed):
    model = gp("robust_max")
    if is_fixed:
        model.kernel.requires_grad_(False)
    with pytest.raises(ValueError, match=rf"^{name} follows gradients, and RobustMax is a step.*EllipticalSlice\(\)"):
        tg.sample(model, method, **OPTIONS)


def test_a_step_is_no_matter_given_the_latents():
    method = tg.Gibbs(hyper=tg.HMC(num_steps=1), latent=tg.EllipticalSlice(), parameterization=tg.Sufficient())
    assert bool(torch.isfinite(tg.sample(gp("robust_max"), method, **OPTIONS).latents).all())


def test_several_latents_have_no_surrogate():
    with pytest.raises(ValueError, match=r"Softmax has several latents.*Expected parameterization=Interwoven\(\)"):
        tg.sample(gp("softmax"), tg.Gibbs(parameterization=tg.Surrogate()), **OPTIONS)


def test_without_hyperparameters_there_is_nothing_to_alternate():
    with pytest.raises(ValueError, match=r"all of this model's are fixed.*or AuxiliaryGradient"):
        tg.sample(latents_alone(), tg.Gibbs(), **OPTIONS)
