"""What parameters decide of the transcription likelihood, kept with a chain: its slopes in f, and that it is never stale."""

import itertools

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior, MultivariateNormalPrior

import torchgpmc as tg
from torchgpmc.likelihoods import Activation, Linear, Repression, Response, Transcription
from torchgpmc.likelihoods.log_likelihood import LogLikelihood
from torchgpmc.models import JointLogDensity
from torchgpmc.models.latents import likelihood_values
from torchgpmc.runs.blocks import JointWithPrior, LatentsGivenTheta, decided_by_parameters
from torchgpmc.runs.likelihood_parts import PartsGivenF, parts_of
from torchgpmc.runs.run import Settings
from torchgpmc.trees import mapped

pytestmark = [
    pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
GENES, CHAINS = 3, 4
NOISE = {
    "measured": lambda replicates: {"variances": 0.1 + torch.rand(replicates, GENES, 4, generator=seeded(7)).double()},
    "sampled": lambda replicates: {"free_initial": True},
    "integrated": lambda replicates: {"integrate_variances": True},
}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


class Hill(Response):
    """A user's own, which says nothing of its slope."""

    def __call__(self, log_concentration, log_michaelis):
        return torch.sigmoid(2 * log_concentration)


class Squared(Activation):
    """Another, whose parent's slope is not its own."""

    def __call__(self, log_concentration, log_michaelis):
        return super().__call__(log_concentration, log_michaelis).square()


class Raised(Transcription):
    """A user's subclass, whose expected response is not its parent's."""

    def expected_response(self, f):
        return super().expected_response(f) + 0.3


class Halved(Transcription):
    """Another, which says what its parameters decide, and has its parent's slope, which is not its own."""

    def log_prob_by_part(self, f, targets):
        return 0.5 * super().log_prob_by_part(f, targets)

    def at_these_parameters(self):
        return super().at_these_parameters()

    def log_prob_by_part_at(self, decided, f, targets):
        return 0.5 * super().log_prob_by_part_at(decided, f, targets)


def model_of(kind=Transcription, response=Activation, noise="sampled", replicates=2, dtype=torch.float64, tied=False):
    grid = torch.linspace(0, 4, 8, dtype=torch.float64)
    options = NOISE[noise](replicates)
    likelihood = kind(grid, grid[[0, 2, 5, 7]], num_genes=GENES, num_replicates=replicates, response=response(), **options)
    if tied:  # no gene is then independent of the others a priori, and theta moves as a whole
        prior = MultivariateNormalPrior(torch.full((GENES,), 1.0), torch.eye(GENES))
        likelihood.register_prior("decay_prior", prior, lambda module: module.decay, lambda module, value: None)
    y = 1 + torch.rand(likelihood.target_shape(len(grid)), generator=seeded(2), dtype=torch.float64)
    return tg.GP(grid, y, RBFKernel(lengthscale_prior=GammaPrior(4.0, 4.0)), likelihood, dtype=dtype)


def position_in(model, seed=0):
    size = model.layout.size + model.latent_size
    return 0.4 * torch.randn(CHAINS, size, generator=seeded(seed), dtype=model.train_x.dtype)


def slope_and_autograd(model, targets):
    """log p(y | f) and its slope in f, as written out and by autograd from ``log_prob`` itself."""
    theta, v = position_in(model).split([model.layout.size, model.latent_size], -1)
    prior = model.prior(theta)
    f = model.latents(prior, v).detach()
    decided = decided_by_parameters(model, prior.values)
    found = model.likelihood_function({}, lambda likelihood: likelihood.log_prob_and_slope_at(decided, f, targets))
    leaf = f.clone().requires_grad_(True)
    value = model.likelihood_function(likelihood_values(prior), lambda likelihood: likelihood.log_prob(leaf, targets))
    return found, (value.detach(), torch.autograd.grad(value.sum(), leaf)[0])


@pytest.mark.parametrize("replicates", [1, 2])
@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("response", [Activation, Repression, Linear, Hill, Squared])
def test_the_slope_in_f_is_that_of_autograd(response, noise, replicates):
    model = model_of(response=response, noise=noise, replicates=replicates)
    found, expected = slope_and_autograd(model, model.train_y)
    torch.testing.assert_close(found, expected)
    own = model.train_y + torch.rand(CHAINS, *model.train_y.shape, generator=seeded(3)).double()
    found, expected = slope_and_autograd(model, own)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("response", [Activation, Repression, Linear])
def test_the_slope_is_written_out_in_either_precision(response, noise, monkeypatch):
    monkeypatch.setattr(LogLikelihood, "log_prob_and_slope_at", None)  # autograd
    model, double = (model_of(response=response, noise=noise, dtype=dtype) for dtype in (torch.float32, torch.float64))
    found, expected = slope_and_autograd(model, model.train_y)
    assert {part.dtype for part in found} == {torch.float32}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    slope_and_autograd(double, double.train_y)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("kind", [Transcription, Raised, Halved])
def test_a_density_given_theta_is_the_joint_one_of_subclasses_too(kind, noise):
    joint = JointLogDensity(model_of(kind, noise=noise))
    position, size = position_in(joint.model), joint.model.layout.size
    value, kept = JointWithPrior(joint).draw(position, seeded(0))
    assert (kept.likelihood is None) == (kind is Raised)
    expected, gradient = joint.value_and_grad(position)
    for given in (LatentsGivenTheta(joint, kept), LatentsGivenTheta(joint, kept).select(torch.arange(CHAINS))):
        found, slope = given.value_and_grad(position[:, size:])
        torch.testing.assert_close((value, found, given(position[:, size:])), (expected, expected, expected))
        torch.testing.assert_close(slope, gradient[:, size:])
    rows = torch.tensor([2, 0])
    few = LatentsGivenTheta(joint, kept).select(rows).value_and_grad(position[rows, size:])
    torch.testing.assert_close(few, (expected[rows], gradient[rows, size:]))


def is_fresh(model, state):
    """Whether what a sweep keeps of the likelihood is what the parameters decide where the chains are."""
    theta = state.position[:, : model.layout.size]
    fresh, same = decided_by_parameters(model, model.layout.raw_values(theta).by_module), []
    mapped(lambda kept, again: same.append(torch.allclose(kept, again, rtol=1e-10, atol=1e-12)), state.payload.likelihood, fresh)
    return len(same) == len(fresh) and all(same)


HYPERS = {"Metropolis": tg.AdaptiveMH(), "slice": tg.Slice(max_steps_out=2), "HMC": tg.HMC(num_steps=2)}
PARAMETERIZATIONS = {"ancillary": tg.Ancillary(), "interwoven": tg.Interwoven()}


def states_of(method, model, chain_chunk=None, count=6):
    """States of the sweep after each of some advances."""
    run, generator = method.prepare(model, Settings(0, 8, CHAINS, chain_chunk)), seeded(5)
    state = run.init(generator)
    yield state.chain
    for _ in range(count):
        state, _, _ = run.advance(state, generator)
        yield state.chain


@pytest.mark.parametrize("chain_chunk", [None, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["genes apart", "genes tied"])
@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
@pytest.mark.parametrize("hyper", HYPERS)
def test_what_a_sweep_keeps_of_the_likelihood_is_never_stale(hyper, parameterization, tied, chain_chunk):
    model = model_of(tied=tied)
    assert (parts_of(model) is None) == tied
    method = tg.Gibbs(
        hyper=HYPERS[hyper], parameterization=PARAMETERIZATIONS[parameterization], latent=tg.EllipticalSlice(), latent_steps=1
    )
    joint = JointLogDensity(model)
    stale_are_seen = 0
    for before, after in itertools.pairwise(states_of(method, model, chain_chunk)):
        assert is_fresh(model, after)
        torch.testing.assert_close(after.log_density, joint(after.position))
        torch.testing.assert_close(JointWithPrior(joint).value_at(after.position, after.payload), joint(after.position))
        # A planted error: what was kept before the hyperparameters moved.
        stale = after._replace(payload=after.payload._replace(likelihood=before.payload.likelihood))
        if bool((before.position != after.position)[:, 1 : model.layout.size].any()):
            stale_are_seen += 1
            assert not is_fresh(model, stale)
            assert not torch.allclose(JointWithPrior(joint).value_at(after.position, stale.payload), joint(after.position))
    assert stale_are_seen


@pytest.mark.parametrize("chosen", [None, [1, 4, 9]], ids=["all", "some"])
@pytest.mark.parametrize("kind", [Transcription, Raised])
def test_each_genes_row_hands_out_what_its_own_parameters_decide(kind, chosen):
    model = model_of(kind)
    theta, v = position_in(model).split([model.layout.size, model.latent_size], -1)
    joint, parts = JointLogDensity(model), parts_of(model)
    given = PartsGivenF(joint, parts, theta, model.latents(model.prior(theta), v))
    there = parts.rows(theta[:, parts.columns.start :]) + 0.2
    whole = torch.cat([theta[:, : parts.columns.start], parts.from_rows(there), theta[:, parts.columns.stop :]], -1)
    rows = torch.arange(CHAINS * GENES) if chosen is None else torch.tensor(chosen)
    given = given if chosen is None else given.select(rows)
    value, payload = given.draw(there[rows], seeded(0))
    torch.testing.assert_close(value, given(there[rows]))
    decided = decided_by_parameters(model, model.layout.raw_values(whole).by_module)
    if kind is Raised:
        assert decided is None and payload == ()
    else:
        mapped(lambda own, all_of: torch.testing.assert_close(own, all_of.flatten(0, 1)[rows]), payload, decided)


class Died(Exception):
    """What a run dies of."""


@pytest.mark.parametrize("latent", [tg.EllipticalSlice(), tg.AuxiliaryGradient()], ids=lambda move: type(move).__name__)
def test_chunks_and_checkpoints_change_no_draw(latent, tmp_path, monkeypatch):
    method, model = tg.Gibbs(latent=latent, latent_steps=1), model_of()
    options = {"num_samples": 4, "warmup_steps": 4, "num_chains": CHAINS, "seed": 4, "progress": False}
    whole = tg.sample(model, method, **options)
    chunked = tg.sample(model, method, **options, chain_chunk=3)
    torch.testing.assert_close(chunked.theta, whole.theta, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(chunked.whitened, whole.whitened, rtol=1e-6, atol=1e-6)
    kind = type(method.prepare(model, Settings(0, 8, CHAINS, None)))
    advance, checkpoint = kind.advance, tg.Checkpoint(tmp_path / "run.ckpt", every=1)

    def dying(self, state, generator):
        if state.iteration == 6:
            raise Died
        return advance(self, state, generator)

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(kind, "advance", dying)
        tg.sample(model, method, **options, checkpoint=checkpoint)
    resumed = tg.sample(model, method, **options, checkpoint=checkpoint)
    assert torch.equal(resumed.theta, whole.theta) and torch.equal(resumed.whitened, whole.whitened)
