"""K is factorised once for each theta that is tried, and never for latents: counted for every method and for sweeps.

A theta's work is one matrix under [theta, v]; with the latents integrated out what an evaluation takes, or what statistics state.
"""

import sys
from itertools import pairwise

import pytest
import torch

import torchgpmc as tg
from tests.problems import LIKELIHOODS, fixed_kernel, gp, gp_regression, inputs, some_fit, sparse_gp, targets
from tests.speed import quick
from tests.statistical.kernels import SAMPLERS
from torchgpmc.approximations import ApproximateMarginal, Conjugate
from torchgpmc.models import GP, JointLogDensity, SparseGP
from torchgpmc.runs.run import Settings
from torchgpmc.runs.sites import posterior_sites
from torchgpmc.trees import where

CHAINS = 3
SETTINGS = Settings(20, 0, CHAINS, None)


@pytest.fixture
def counted(monkeypatch):
    """Matrices factorised so far, as a list of batch sizes."""
    sizes = []

    def counting(original):
        def factorised(matrix, **options):
            sizes.append(matrix.shape[:-2].numel())
            return original(matrix, **options)

        return factorised

    for name in ("cholesky_ex", "eigh"):
        monkeypatch.setattr(torch.linalg, name, counting(getattr(torch.linalg, name)))
    return sizes


def advances(method, model, count=3, settings=SETTINGS):
    """The statistics of each of the first advances, without warm-up."""
    run, generator = method.prepare(model, settings), torch.Generator().manual_seed(3)
    state = run.init(generator)
    for _ in range(count):
        state, _, stats = run.advance(state, generator)
        yield stats


WHOLE = {"NUTS": tg.NUTS(max_tree_depth=4), "HMC": tg.HMC(num_steps=3), "AdaptiveMH": tg.AdaptiveMH(thinning=2)}


@pytest.mark.parametrize("make", [gp, sparse_gp])
@pytest.mark.parametrize("name", WHOLE)
def test_methods_on_theta_and_v_factorise_once_an_evaluation(name, make, counted):
    before = None
    for stats in advances(WHOLE[name], make("probit")):
        if before is not None:
            assert sum(counted) - before == float(stats["n_steps"].sum())
        before = sum(counted)


@pytest.mark.parametrize("thinning", quick([1], [1, 2]))
@pytest.mark.parametrize("make", [gp, sparse_gp])
def test_slices_of_theta_and_v_factorise_once_a_theta(make, thinning, counted):
    """The whole of an advance, its end included; what one coordinate of theta tries is counted by the block's own Info."""
    model = make("probit")
    run, generator = tg.Slice(thinning=thinning).prepare(model, SETTINGS), torch.Generator().manual_seed(3)
    state = run.init(generator)
    sampler, twin = run.kernel(state.tuning), torch.Generator()
    for _ in range(3):
        twin.set_state(generator.get_state())
        chain, tried = state.chain, 0.0
        for _ in range(thinning):
            chain, info = sampler.step(chain, twin)
            tried += float(info.blocks[0].info.n_steps.sum())
        before = sum(counted)
        state, _, stats = run.advance(state, generator)
        assert sum(counted) - before == tried < float(stats["n_steps"].sum())


@pytest.mark.parametrize("chunk", [None, 2])
def test_chunks_factorise_no_more(chunk, counted):
    generator = torch.Generator().manual_seed(3)
    run = tg.Slice().prepare(gp("probit"), SETTINGS._replace(chain_chunk=chunk))
    state = run.init(generator)
    before = sum(counted)
    _, info = run.kernel(state.tuning).step(state.chain, generator)
    assert sum(counted) - before == float(info.blocks[0].info.n_steps.sum())


def test_a_sweep_factorises_once_a_proposed_theta(counted, generator):
    """Metropolis on theta and elliptical slices of v: a matrix a chain and sweep, whatever the latents do."""
    check_sweeps(counted, generator)


def test_a_payload_of_another_theta_is_caught(counted, generator, monkeypatch):
    """Planted error: Metropolis takes a theta, and keeps p(f | theta) of the one before for the latents."""

    def stale(mask, yes, no):
        return where(mask, yes._replace(payload=no.payload), no)

    # The package's name "metropolis" is the function's; the module is found by its path.
    monkeypatch.setattr(sys.modules["torchgpmc.samplers.metropolis"], "where", stale)
    with pytest.raises(AssertionError, match="not close"):
        check_sweeps(counted, generator)


def check_sweeps(counted, generator):
    model = gp("probit").with_targets(torch.stack([targets("probit", 6, seed) for seed in range(CHAINS)]))
    position = torch.zeros(CHAINS, model.layout.size + model.latent_size, dtype=torch.float64)
    sampler = SAMPLERS["sweep"].make(model, JointLogDensity(model), position)
    state = sampler.init(position, generator)
    assert sum(counted) == CHAINS
    accepted = torch.zeros(CHAINS)
    for sweeps in range(2, 12):
        moved, info = sampler.step(state, generator)
        accepted += (moved.position[:, 0] != state.position[:, 0]).float()
        state = moved
        assert sum(counted) == sweeps * CHAINS
        torch.testing.assert_close(JointLogDensity(model)(state.position), state.log_density, rtol=1e-12, atol=1e-12)
        counted[-1:] = []  # that check's own
    assert 0 < float(accepted.sum()) < 10 * CHAINS  # both outcomes were seen
    assert float(info.blocks[1].info.n_steps.min()) >= 1


WHITE, REGRESSED = tg.Surrogate(whitening=tg.Laplace()), tg.Regressed(some_fit(gp("probit")))
PARAMETERIZATIONS = (tg.Ancillary(), tg.Sufficient(), tg.Surrogate(), WHITE, tg.Interwoven(), REGRESSED)
HYPER = (tg.AdaptiveMH(), tg.Slice(), tg.HMC(num_steps=2, random_length=False), tg.NUTS(max_tree_depth=3))


@pytest.mark.parametrize("latent", quick([tg.EllipticalSlice()], [tg.AuxiliaryGradient(), tg.EllipticalSlice(), tg.PCN()]))
@pytest.mark.parametrize("hyper", quick(HYPER[::2], HYPER), ids=lambda hyper: type(hyper).__name__)
@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS, ids=lambda given: type(given).__name__)
def test_gibbs_states_what_it_factorises(parameterization, hyper, latent, counted):
    """Auxiliary gradients count an eigendecomposition a sweep, and make those of chains whose theta moved."""
    method = tg.Gibbs(hyper=hyper, latent=latent, parameterization=parameterization, hyper_steps=2, latent_steps=3)
    run, generator = method.prepare(gp("probit"), SETTINGS), torch.Generator().manual_seed(3)
    state, before = run.init(generator), None
    for _ in range(3):
        theta = state.chain.position[:, 0]
        state, _, stats = run.advance(state, generator)
        kept = int((state.chain.position[:, 0] == theta).sum()) * isinstance(latent, tg.AuxiliaryGradient)
        if before is not None:
            assert sum(counted) - before == float(stats["n_factorizations"].sum()) - kept
        before = sum(counted)


def test_gibbs_through_estimates_states_what_it_factorises(counted):
    before = None
    for stats in advances(tg.Gibbs(hyper=tg.PseudoMarginal(num_importance=2), hyper_steps=2), gp("probit")):
        if before is not None:
            assert sum(counted) - before == float(stats["n_factorizations"].sum())
        before = sum(counted)


def test_white_moves_factorise_once_a_theta(counted):
    method = tg.Gibbs(latent=tg.PCN(whitening=tg.Laplace()), parameterization=tg.Sufficient(), latent_steps=3)
    counts = [(sum(counted), stats["n_factorizations"]) for stats in advances(method, gp("probit"))]
    for (before, _), (after, stated) in pairwise(counts):
        assert after - before == float(stated.sum()) == 2 * CHAINS  # K, and the posterior under the sites


@pytest.mark.parametrize(
    ("parameterization", "expected"),
    [(tg.Ancillary(), 1), (tg.Sufficient(), 1), (tg.Surrogate(), 3), (WHITE, 3), (tg.Interwoven(), 2), (REGRESSED, 1)],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("latent_steps", [1, 7])
def test_metropolis_factorises_once_a_theta_and_parameterization(parameterization, expected, latent_steps):
    """Paper A, table 2: one for AA and SA, three for SURR (here one of them of the present theta); none for the latents."""
    method = tg.Gibbs(latent=tg.EllipticalSlice(), parameterization=parameterization, latent_steps=latent_steps)
    for stats in advances(method, gp("probit")):
        assert bool((stats["n_factorizations"] == expected).all())


FIXED = {
    **WHOLE,
    "Slice": tg.Slice(),
    "EllipticalSlice": tg.EllipticalSlice(thinning=3),
    "PCN": tg.PCN(thinning=3),
    "AuxiliaryGradient": tg.AuxiliaryGradient(),
    "GibbsLike": tg.GibbsLike(),
    "LocalRegions": tg.LocalRegions(num_regions=2),
}


@pytest.mark.parametrize("name", FIXED)
def test_methods_on_v_factorise_nothing_after_the_start(name, counted):
    model = tg.GP(inputs(6), targets("probit", 6), fixed_kernel(), LIKELIHOODS["probit"]())
    counts = [sum(counted) for _ in advances(FIXED[name], model)]
    assert counts[0] == counts[-1] <= 2  # the start's (K, and its axes); some check theirs with a density of their own


@pytest.mark.parametrize("name", WHOLE)
def test_methods_on_theta_factorise_once_an_evaluation_and_once_a_kept_draw(name, counted):
    """Of a regression, where p(y | theta) is known: K + noise, and for the latents of a kept theta K and the posterior's as well.

    A value without its gradient comes from the matrices that latents need.
    """
    per_draw = matrices_a_theta(gp_regression(), counted)
    per_theta = 1 if name in ("NUTS", "HMC") else per_draw
    before = None
    for stats in advances(WHOLE[name], gp_regression()):
        if before is not None:
            assert sum(counted) - before == per_theta * float(stats["n_steps"].sum()) + CHAINS * per_draw
        before = sum(counted)


def matrices_a_theta(model, counted):
    before = sum(counted)
    ApproximateMarginal(model, Conjugate())(torch.zeros(1, model.layout.size, dtype=torch.float64))
    return sum(counted) - before


ESTIMATES = {
    "plain": tg.PseudoMarginal(num_importance=4),
    "thinned": tg.PseudoMarginal(num_importance=4, thinning=3),
    "correlated": tg.PseudoMarginal(num_importance=2, correlation=0.9),
    "slice": tg.PseudoMarginalSlice(num_importance=2),
    "delayed": tg.PseudoMarginal(num_importance=4, delayed_acceptance=True),
    "delayed by EP": tg.PseudoMarginal(tg.EP(), num_importance=4, delayed_acceptance=True, thinning=2),
}


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("name", quick(["plain", "thinned", "correlated"], ESTIMATES))
def test_estimates_state_what_they_factorise(name, chunk, counted):
    """Those that screen by an approximate evidence state what that took too, of every proposal."""
    before = None
    for stats in advances(ESTIMATES[name], gp("probit"), settings=SETTINGS._replace(chain_chunk=chunk)):
        if before is not None:
            assert sum(counted) - before == float(stats["n_factorizations"].sum())
        before = sum(counted)


@pytest.mark.parametrize("make", [GP, SparseGP])
def test_white_coordinates_at_fixed_hyperparameters_are_factorised_once(make, counted):
    """One affine map serves every position; it gives the density that whitening at each gives, and its gradient."""
    options = {"inducing_points": inputs(4)} if make is SparseGP else {}
    model = make(inputs(6), targets("probit", 6), fixed_kernel(), LIKELIHOODS["probit"](), **options)
    method, generator = tg.NUTS(whitening=tg.Laplace()), torch.Generator().manual_seed(0)
    position = torch.randn(CHAINS, model.latent_size, generator=generator, dtype=torch.float64)
    density = method.prepare(model, SETTINGS).target.density
    expected = JointLogDensity(model, sites=posterior_sites(model, tg.Laplace()))
    torch.testing.assert_close(density(position), expected(position))
    for found, slow in zip(density.value_and_grad(position), expected.value_and_grad(position), strict=True):
        torch.testing.assert_close(found, slow)
    generator.manual_seed(3)
    run = method.prepare(model, SETTINGS)
    state, before = run.init(generator), sum(counted)
    for _ in range(3):
        state, _, stats = run.advance(state, generator)
    assert sum(counted) == before and float(stats["n_steps"].min()) > 1
