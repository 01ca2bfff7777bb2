"""Theta and the latents of several classes in turn: what is tuned, what is kept, what is refused."""

import copy
import math
import warnings

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, NormalPrior
from sklearn.datasets import make_classification

import torchgpmc as tg
from tests.problems import Halved, fixed_kernel, gp, gp_regression, inputs, kernel, sparse_gp, targets
from tests.runs.resume import dies_and_resumes
from torchgpmc import density
from torchgpmc.models import JointLogDensity
from torchgpmc.runs import class_chains, class_search, class_trajectories
from torchgpmc.runs.class_trajectories import Phase, ThetaAndWhite, slope_in_theta, trajectory
from torchgpmc.runs.class_white import NearlyOfWhite, OfWhite
from torchgpmc.runs.run import Settings
from torchgpmc.samplers.fitted_proposals import FittedProposal

OPTIONS = {"num_samples": 8, "warmup_steps": 10, "num_chains": 3, "seed": 4, "progress": False}


def four_classes(_=None, num_data=12):
    x = inputs(num_data, 2)
    likelihood = tg.likelihoods.Softmax(num_classes=4, mixing_weights=False)
    kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
    return tg.GP(x, (2 * x[:, 0]).floor() + 2 * (2 * x[:, 1]).floor(), kernel, likelihood)


def many_lengthscales(_=None, num_data=12):
    """More hyperparameters than quadratics are fitted to."""
    likelihood = tg.likelihoods.Softmax(num_classes=3, mixing_weights=False)
    mean = ConstantMean(constant_prior=NormalPrior(0.0, 1.0))
    return tg.GP(inputs(num_data, 3), targets("softmax", num_data), kernel(3), likelihood, mean=mean)


class Sharpened(tg.likelihoods.Softmax):
    """A user's, with a parameter of its own."""

    def __init__(self):
        super().__init__(num_classes=3, mixing_weights=False)
        self.raw_sharpness = torch.nn.Parameter(torch.zeros(1))
        self.register_prior("sharpness_prior", NormalPrior(0.0, 1.0), "raw_sharpness")

    def pointwise_log_prob(self, f, targets):
        return super().pointwise_log_prob(f * self.raw_sharpness.exp().unsqueeze(-1), targets)

    def curvature(self, f, targets):
        sharpness = self.raw_sharpness.exp().unsqueeze(-1)
        found = super().curvature(f * sharpness, targets)
        return found._replace(first=sharpness * found.first, second=sharpness.unsqueeze(-1).square() * found.second)


def sharpened():
    return tg.GP(inputs(12, 3), targets("softmax", 12), kernel(3), Sharpened())


BOTH = pytest.mark.parametrize("make", [four_classes, many_lengthscales])


def quiet(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tg.SamplingWarning)
        return tg.sample(model, tg.ClassGibbs(), **{**OPTIONS, **options})


@BOTH
@pytest.mark.parametrize("advances", [6, 14])
def test_a_run_that_died_resumes_to_the_same_bits(make, advances, tmp_path, monkeypatch):
    monkeypatch.setattr(class_chains, "_HELD", 0.0)  # so that there is a basis, where there may be one
    with pytest.warns(tg.SamplingWarning):  # draws so few
        assert dies_and_resumes(make, tg.ClassGibbs(), OPTIONS, advances, tmp_path / "run", monkeypatch)


@BOTH
def test_chains_in_chunks_have_the_same_draws(make, monkeypatch):
    together, sizes, at = quiet(make()), [], class_chains.ClassChains._at
    monkeypatch.setattr(class_chains.ClassChains, "_at", lambda self, theta, of: sizes.append(len(theta)) or at(self, theta, of))
    # Not to the last bit: products of other batches round differently, those in single precision in the seventh digit.
    torch.testing.assert_close(quiet(make(), chain_chunk=2).theta, together.theta, rtol=1e-3, atol=1e-4)
    assert set(sizes) == {1, 2}


@BOTH
def test_chains_of_several_threads_have_the_same_draws(make, monkeypatch):
    alone, counts, shared_parts = quiet(make(), num_chains=5), [], set()
    of_parts = density.side_by_side
    monkeypatch.setattr(density, "WORTH_A_THREAD", 1.0)
    monkeypatch.setattr(class_trajectories, "_WORTH_A_THREAD", 1.0)

    def noted(function, parts, device):
        counts.append(len(parts))
        shared_parts.add(function.__qualname__.split(".<locals>")[0].split(".")[-1])
        return of_parts(function, parts, device)

    monkeypatch.setattr(density, "side_by_side", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shared = quiet(make(), num_chains=5)
    finally:
        torch.set_num_threads(before)
    own = {"_values_there"} if make is four_classes else {"_shared"}  # the latter of trajectories
    assert set(counts) == {2} and shared_parts == {"fitted_class_sites", "at", "_latents_moved"} | own
    for name in ("theta", "whitened", "_further"):
        torch.testing.assert_close(getattr(shared, name), getattr(alone, name), rtol=1e-3, atol=1e-3)


def in_a_basis(chains):
    first = chains.first_tuning()
    steps = first.step_size, first.theta_step_size
    return chains.tuned(first.centre, first.root, first.scale, first.sites, first.deviation, steps, in_a_basis=True)


def test_the_basis_is_of_the_covariance_where_theta_lies():
    model = four_classes()
    chains = class_chains.ClassChains(JointLogDensity(model), 8, None)
    tuning = in_a_basis(chains)
    factor = model.prior(tuning.centre[None]).factor[0]
    inner = tuning.basis.mT @ factor @ factor.mT @ tuning.basis
    torch.testing.assert_close(inner, inner.diagonal().diag())
    assert bool((inner.diagonal().diff() <= 0).all())
    turned = tuning.basis.mT @ chains.at(tuning.centre[None] + 0.3, tuning).coordinates.spread[0]
    torch.testing.assert_close(turned, turned.tril())


def test_there_is_no_basis_where_the_covariance_does_not_factorise(monkeypatch):
    model = four_classes()
    chains = class_chains.ClassChains(JointLogDensity(model), 8, None)
    first, at_data = chains.first_tuning(), type(model).at_data

    def failed(self, hyperparameters):
        at = at_data(self, hyperparameters)
        prior = at.prior._replace(ok=torch.zeros_like(at.prior.ok), factor=at.prior.factor * torch.nan)
        return at._replace(prior=prior)

    monkeypatch.setattr(type(model), "at_data", failed)
    assert chains._basis(first.centre).shape == (0, 12)


def test_how_strongly_w_holds_theta_is_how_curved_the_density_given_it_is():
    chains = class_chains.ClassChains(JointLogDensity(four_classes(num_data=40)), 8, None)
    tuning = chains.first_tuning()
    white = torch.randn(3, chains.model.latent_size, generator=torch.Generator().manual_seed(0)).double()
    along = torch.tensor([[1.3], [0.0], [-1.3]]).double()
    values = torch.stack([OfWhite(chains.joint, chains.at(tuning.theta(one[None]), tuning))(white) for one in along])
    curvature = -(values[0] - 2 * values[1] + values[2]) / 1.3**2
    assert bool((curvature > 0.75).any())
    torch.testing.assert_close(chains.held(tuning, white), curvature.clamp(0.7, 25.0), rtol=1e-4, atol=1e-4)


def test_along_its_worst_axis(monkeypatch):
    precision = torch.tensor([[1.0, 5.0], [7.0, 2.0]])
    monkeypatch.setattr(class_chains, "fitted_proposal", lambda *of: FittedProposal(precision, None, precision))
    chains = class_chains.ClassChains(JointLogDensity(four_classes()), 8, None)
    assert chains.held(chains.first_tuning(), torch.zeros(2, chains.model.latent_size).double()).tolist() == [5.0, 7.0]


@pytest.mark.parametrize(("early", "late", "since"), [(5.0, 2.9, None), (2.0, 3.1, 11), (3.1, 3.1, 11)])
def test_warm_up_takes_a_basis_where_w_holds_theta_and_keeps_it(early, late, since, monkeypatch):
    """From half of warm-up on, by the mean of all chains and sweeps of a window; windows end at 1, 2, 4, 7, 11, 16 of 20."""
    spread = torch.tensor([0.5, 1.5, 1.0]).double()
    given = {number: (early if number <= 7 else late) for number in range(1, 12)}
    numbers = iter(range(1, 21))
    monkeypatch.setattr(class_chains.ClassChains, "held", lambda self, tuning, white: given.get(next(numbers), 0.0) * spread)
    run = tg.ClassGibbs().prepare(four_classes(), Settings(4, 20, 3, None))
    generator = torch.Generator().manual_seed(0)
    state, in_a_basis = run.init(generator), []
    for _ in range(20):
        state, _, _ = run.advance(state, generator)
        in_a_basis.append(len(state.tuning.basis) == 12)
    assert in_a_basis == [since is not None and number >= since for number in range(1, 21)]


def test_trajectories_of_theta_are_in_the_basis_of_the_data(monkeypatch):
    monkeypatch.setattr(class_chains, "_HELD", 0.0)
    run = tg.ClassGibbs().prepare(four_classes(), Settings(4, 20, 2, None))
    of_many = tg.ClassGibbs().prepare(many_lengthscales(), Settings(4, 20, 2, None))
    found = []
    for each in (run, of_many):
        generator = torch.Generator().manual_seed(0)
        state = each.init(generator)
        for _ in range(20):
            state, _, _ = each.advance(state, generator)
        found.append(len(state.tuning.basis))
    assert found == [12, 0]


@BOTH
def test_nothing_is_tuned_after_warm_up(make):
    run = tg.ClassGibbs().prepare(make(), Settings(4, 10, 2, None))
    generator = torch.Generator().manual_seed(0)
    state, tunings = run.init(generator), []
    for _ in range(14):
        state, _, _ = run.advance(state, generator)
        tunings.append(state.tuning)
    assert float(tunings[3].centre.sub(tunings[6].centre).abs().max()) > 0 and tunings[9] is tunings[13]


def test_what_is_kept_of_a_tuning_is_of_no_other():
    model = four_classes()
    chains = class_chains.ClassChains(JointLogDensity(model), 8, None)
    tuning = in_a_basis(chains)
    first = chains.designed(tuning)
    assert chains.designed(copy.deepcopy(tuning)) is first and chains.designed(tuning._replace(step_size=None)) is first
    turned = tuning._replace(basis=tuning.basis.flip(-1))
    of_others = tuning.sites._replace(log_precision=tuning.sites.log_precision + 0.1)
    for other in (turned, tuning._replace(sites=of_others)):  # about the same centre
        fresh = class_chains.ClassChains(JointLogDensity(model), 8, None).designed(other)
        for found, expected in zip(chains.designed(other), fresh, strict=True):
            assert torch.equal(found.coordinates.spread, expected.coordinates.spread)


def test_coordinates_follow_theta_so_that_four_of_five_are_accepted():
    """Where theta is tried with v held, under a lengthscale that data know of, it is one of five or fewer."""
    posterior = quiet(four_classes(num_data=40), num_samples=60, warmup_steps=60)
    assert float(posterior.stats["hyper_acceptance"].mean()) > 0.6
    assert 0.65 < float(posterior.stats["acceptance_rate"].mean()) < 0.95


def test_trajectories_of_theta_are_tuned(monkeypatch):
    monkeypatch.setattr(class_chains, "_THETA_STEP", 3.0)  # with which one in eight is accepted, by the masses found
    posterior = quiet(many_lengthscales(num_data=30), num_samples=60, warmup_steps=100)
    assert 0.6 < float(posterior.stats["hyper_acceptance"].mean()) < 0.95


def test_chains_start_where_the_posterior_is():
    model = four_classes(num_data=40)
    chains = class_chains.ClassChains(JointLogDensity(model), 8, None)
    theta, v = chains.starts(chains.first_tuning(), 16, torch.Generator().manual_seed(1)).split([1, model.latent_size], -1)
    by_chance = 40 * math.log(0.25)
    assert float(model.log_likelihood(model.at(model.prior(theta)), v, model.targets).min()) > 0.7 * by_chance


def test_all_latents_kept_of_a_theta_are_draws_given_it():
    """Those left of another theta, or in its coordinates, would have another covariance with theta."""
    posterior = quiet(four_classes(), num_samples=500, warmup_steps=60, num_chains=16)
    theta = posterior.theta.flatten(0, 1)
    theta = (theta - theta.mean(0)) / theta.std(0)
    latents = torch.cat([posterior.whitened.unsqueeze(2), posterior._further], 2).flatten(0, 1).permute(1, 0, 2)

    def moments(v):
        return torch.cat([v.mean(0), v.square().mean(0), (theta * v).mean(0), (theta * v.square()).mean(0)])

    kept, *others = (moments(v) for v in latents)
    assert len(others) == 1 and all(float((other - kept).abs().max()) < 0.15 for other in others)
    assert float(torch.corrcoef(latents[:2].flatten(1))[0, 1]) < 0.6  # and have moved


def test_predictions_average_over_all_latents_of_a_theta():
    x = inputs(30, 2, seed=5)
    posterior = quiet(four_classes())
    of_all = posterior.predict(x).probs
    both = posterior.whitened, posterior._further[:, :, 0]
    posterior._further = None
    parts = []
    for latents in both:
        posterior.whitened = latents
        parts.append(posterior.predict(x).probs)
    torch.testing.assert_close(of_all, (parts[0] + parts[1]) / 2)
    assert float((parts[0] - parts[1]).abs().max()) > 0.01


def about_to_move(model, num_chains=3):
    """Chains, a tuning whose masses are not all alike, and where some trajectories begin."""
    chains, generator = class_chains.ClassChains(JointLogDensity(model), 8, None), torch.Generator().manual_seed(0)
    tuning = chains.first_tuning()
    more = torch.randn(tuning.scale.shape, generator=generator).double().tril(-1)
    tuning = tuning._replace(scale=tuning.scale + 0.1 * more, deviation=tuning.deviation + 0.1 * tuning.deviation.cumsum(0) / 36)
    state = chains.kernel(tuning).init(chains.starts(tuning, num_chains, generator), generator)
    along, white = tuning.standardised(state.position[:, : model.layout.size]), state.white.position
    momenta = (torch.randn(values.shape, generator=generator).double() for values in (along, white))
    return chains, tuning, Phase(along, white, *momenta)


def followed(chains, tuning, phase, num_steps=5, chunk=None, step_size=0.2, precision=torch.float64):
    """In double precision, so that formulas show, and not rounding."""
    return trajectory(ThetaAndWhite(chains.joint, tuning, precision), phase, step_size, num_steps, chunk)


@pytest.mark.parametrize("make", [many_lengthscales, sharpened])
def test_slopes_in_theta_and_w_are_those_of_the_density_of_theta_and_v(make):
    model = make()
    chains, tuning, phase = about_to_move(model)
    assert chains.by_trajectories and len(chains.points) == 0

    def written_out(along, white):
        theta = tuning.theta(along)
        at = chains.at(theta, tuning)
        v = at.coordinates.latents(white, at.factor)
        return chains.joint(torch.cat([theta, v], -1)) + at.coordinates.log_volume

    along, white = phase.along.clone(), phase.white
    along[0, 1] = 3.5  # beyond where sites follow
    density = ThetaAndWhite(chains.joint, tuning, torch.float64)
    slope = slope_in_theta(density, along, white, None)
    for column in range(model.layout.size):
        step = torch.zeros_like(along)
        step[:, column] = 1e-5
        expected = (written_out(along + step, white) - written_out(along - step, white)) / 2e-5
        torch.testing.assert_close(slope[:, column], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope_in_theta(density.select(torch.tensor([2])), along[2:], white[2:], None), slope[2:])
    there = density.there(along)
    seen = density.seen(there, white)
    in_white = seen.in_white
    other = density.seen(there, white.flip(-1))
    both = density.in_theta(there, along, [seen, other], [0.3, 0.5])
    apart = 0.3 * slope + 0.5 * slope_in_theta(density, along, white.flip(-1), None)
    torch.testing.assert_close(both, apart)
    for column in (0, 17, 35):
        step = torch.zeros_like(white)
        step[:, column] = 1e-5
        expected = (written_out(along, white + step) - written_out(along, white - step)) / 2e-5
        torch.testing.assert_close(in_white[:, column], expected, rtol=1e-3, atol=1e-4)
    rounded = ThetaAndWhite(chains.joint, tuning)
    torch.testing.assert_close(slope_in_theta(rounded, along, white, None), slope, rtol=0.01, atol=0.01)
    there = rounded.there(along)
    torch.testing.assert_close(rounded.seen(there, white).in_white, in_white, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(("precision", "rounding"), [(torch.float64, 1e-6), (torch.float32, 1e-3)])
def test_a_trajectory_is_its_own_inverse_with_momenta_reversed(precision, rounding):
    chains, tuning, phase = about_to_move(many_lengthscales())
    there = followed(chains, tuning, phase, precision=precision)
    assert float((there.along - phase.along).abs().min(-1).values.min()) > 0.01
    reversed_there = there._replace(along_momentum=-there.along_momentum, white_momentum=-there.white_momentum)
    back = followed(chains, tuning, reversed_there, precision=precision)
    for found, expected in zip(back, phase, strict=True):
        if expected is phase.along_momentum or expected is phase.white_momentum:
            expected = -expected
        torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)


def test_trajectories_keep_the_energy_to_the_square_of_the_step():
    """Of masses and of slopes in theta or in w that were wrong the energy would change at any step."""
    chains, tuning, phase = about_to_move(many_lengthscales())

    def energy(phase):
        theta = tuning.theta(phase.along)
        at = chains.at(theta, tuning)
        return phase.kinetic_energy - OfWhite(chains.joint, at)(phase.white)

    errors = []
    for num_steps in (4, 16, 64):
        shorter = tuning._replace(step_size=torch.tensor(0.8 / num_steps).double())
        end = followed(chains, shorter, phase, num_steps, step_size=1.2 / num_steps)
        errors.append(float((energy(end) - energy(phase)).abs().max()))
    assert errors[0] < 1.0 and errors[1] < errors[0] / 8 and errors[2] < errors[1] / 8


def test_chains_in_chunks_and_of_several_threads_follow_the_same_trajectories(monkeypatch):
    chains, tuning, phase = about_to_move(many_lengthscales())
    together = followed(chains, tuning, phase)
    sizes, follow = [], class_trajectories._followed
    with monkeypatch.context() as patch:
        patch.setattr(
            class_trajectories,
            "_followed",
            lambda density, part, *rest: sizes.append(len(part.along)) or follow(density, part, *rest),
        )
        chunked = followed(chains, tuning, phase, chunk=2)
    assert sizes == [2, 1]
    monkeypatch.setattr(class_trajectories, "_OPERATIONS", 1e9)
    shared = followed(chains, tuning, phase)
    for found, other, expected in zip(chunked, shared, together, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(other, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("share", "num_parts"), [(0.99, 0), (1.01, 2)])
def test_trajectories_of_few_data_stay_on_one_thread(monkeypatch, share, num_parts):
    # Of 150 data two threads took longer than one: a step is hundreds of calls, which wait for Python's lock.
    chains, tuning, phase = about_to_move(many_lengthscales(), 4)
    counts, of_parts = [], density.side_by_side
    monkeypatch.setattr(density, "side_by_side", lambda *given: counts.append(len(given[1])) or of_parts(*given))
    operations = share * class_trajectories._WORTH_A_THREAD / (2 * chains.size**3)
    monkeypatch.setattr(class_trajectories, "_OPERATIONS", operations)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        followed(chains, tuning, phase)
    finally:
        torch.set_num_threads(before)
    assert counts == [num_parts] * bool(num_parts)


def test_what_does_not_factorise_on_the_way_is_no_failure_and_where_it_leads_is(monkeypatch):
    chains, tuning, phase = about_to_move(many_lengthscales(), 2)
    kernel, generator = chains.kernel(tuning), torch.Generator().manual_seed(0)
    state = kernel.init(chains.starts(tuning, 2, generator), generator)
    factored, ok = class_trajectories.cholesky_in_place, torch.tensor([True, False])
    with monkeypatch.context() as patch:
        patch.setattr(class_trajectories, "cholesky_in_place", lambda matrix: factored(matrix)._replace(ok=ok))
        end = followed(chains, tuning, phase)
        assert bool(end.along.isfinite().all() and end.white.isfinite().all())
        slope = slope_in_theta(ThetaAndWhite(chains.joint, tuning), end.along, end.white, None)
        assert float(slope[1].abs().max()) == 0 and float(slope[0].abs().min()) > 0
        assert kernel.step(state, generator)[1].n_failures.tolist() == [0, 0]
    begun = class_chains.ClassChains._begun

    def impossible(self, at, white):
        found = begun(self, at, white)
        return found._replace(log_density=torch.where(ok, found.log_density, -torch.inf))

    monkeypatch.setattr(class_chains.ClassChains, "_begun", impossible)
    new, info = kernel.step(state, generator)
    assert info.n_failures.tolist() == [0, 1]
    assert torch.equal(new.position[1, : len(tuning.centre)], state.position[1, : len(tuning.centre)])


def test_trajectories_that_leave_are_divergences_and_refused():
    model = many_lengthscales()
    chains = class_chains.ClassChains(JointLogDensity(model), 8, None)
    tuning, generator = chains.first_tuning(), torch.Generator().manual_seed(0)
    for step_size, diverge in ((0.1, False), (50.0, True)):
        kernel = chains.kernel(tuning._replace(theta_step_size=torch.tensor(step_size).double()))
        state = kernel.init(chains.starts(tuning, 8, generator), generator)
        new, info = kernel.step(state, generator)
        assert bool(info.diverging.any()) is diverge and bool(new.log_density.isfinite().all())
        size = model.layout.size
        refused = (new.position[:, :size] == state.position[:, :size]).all(-1)
        assert bool(refused.all()) is diverge and not bool(torch.equal(new.white.position, state.white.position))


def test_trajectories_are_as_long_as_what_w_holds_most_asks_for(monkeypatch):
    monkeypatch.setattr(class_chains, "_SHORTER", 0.0)
    model = many_lengthscales()
    chains = class_chains.ClassChains(JointLogDensity(model), 1000, None)
    tuning, generator = chains.first_tuning(), torch.Generator().manual_seed(0)
    steps = []
    for held in (1.0, 0.1):
        scale = torch.eye(model.layout.size).double()
        scale[1, 1] = held
        sizes = {"theta_step_size": torch.tensor(0.2).double(), "step_size": torch.tensor(100.0).double()}
        kernel = chains.kernel(tuning._replace(scale=scale, **sizes))
        state = kernel.init(chains.starts(tuning, 2, generator), generator)
        steps.append(float(kernel.step(state, generator)[1].n_steps[0]) - 1)  # one of w alone
    assert 5 <= steps[0] <= 11 and 50 <= steps[1] <= 110  # a quarter of a period, give or take a third


def test_latents_at_the_end_of_a_trajectory_of_theta_are_kept(monkeypatch):
    model, ends, follow = many_lengthscales(), [], class_chains.trajectory

    def recorded(*of):
        ends.append(follow(*of))
        return ends[-1]

    monkeypatch.setattr(class_chains, "trajectory", recorded)
    chains = class_chains.ClassChains(JointLogDensity(model), 8, None)
    tuning, generator = chains.first_tuning(), torch.Generator().manual_seed(0)
    kernel = chains.kernel(tuning)
    before = kernel.init(chains.starts(tuning, 8, generator), generator)
    after, _ = kernel.step(before, generator)
    size = model.layout.size
    accepted = (after.position[:, :size] != before.position[:, :size]).any(-1)
    assert bool(accepted.any())
    expected = after.at.coordinates.latents(ends[0].white, after.at.factor)
    torch.testing.assert_close(after.further[accepted, 0], expected[accepted])


def test_steps_of_theta_are_shorter_by_chance(monkeypatch):
    """As many steps as make the same length: trajectories that the longest steps have refused get through."""
    model, seen = many_lengthscales(), []
    follow = class_chains.trajectory
    monkeypatch.setattr(class_chains, "trajectory", lambda *of: seen.append((of[2], of[3])) or follow(*of[:2], of[2], 1, *of[4:]))
    chains = class_chains.ClassChains(JointLogDensity(model), 10_000, None)
    tuning, generator = chains.first_tuning(), torch.Generator().manual_seed(0)
    kernel = chains.kernel(tuning._replace(theta_step_size=torch.tensor(0.01).double()))
    state = kernel.init(chains.starts(tuning, 2, generator), generator)
    for _ in range(40):
        state, _ = kernel.step(state, generator)
    sizes = [size for size, _ in seen]
    assert 0.005 <= min(sizes) < 0.006 and 0.009 < max(sizes) <= 0.01
    lengths = [size * steps for size, steps in seen]
    assert min(lengths) > 2.0 and max(lengths) < 4.3  # a third about pi, of masses that make a quarter of the period pi


def test_masses_are_the_mean_curvature_in_deviations_of_the_next_window():
    model = many_lengthscales()
    chains = class_chains.ClassChains(JointLogDensity(model), 8, None)
    tuning, size = chains.first_tuning(), model.layout.size
    slopes = (
        torch.randn(500, size, generator=torch.Generator().manual_seed(0)).double()
        @ torch.diag(torch.arange(1.0, size + 1)).double()
    )
    seen = tuning._replace(slopes=slopes.mT @ slopes)
    root = 0.5 * tuning.root + 0.1 * torch.ones_like(tuning.root).tril()
    weight = torch.tensor(540.0).double()
    scale = class_chains._scale(seen, root, weight)
    before = slopes @ torch.linalg.inv(tuning.root)  # in theta
    expected = (before.mT @ before + 40 * torch.linalg.inv((tuning.root @ tuning.scale) @ (tuning.root @ tuning.scale).mT)) / weight
    found = torch.linalg.inv(scale @ scale.mT)
    torch.testing.assert_close(found, root.mT @ expected @ root)


def test_warm_up_sums_products_of_slopes_where_chains_are():
    chains, tuning, _ = about_to_move(many_lengthscales())
    warm_up, generator = class_chains.ClassWarmUp(100, 0.8, chains, lambda: tuning), torch.Generator().manual_seed(1)
    kernel = chains.kernel(tuning)
    state, info = kernel.step(kernel.init(chains.starts(tuning, 3, generator), generator), generator)
    found = warm_up.update(warm_up.update(tuning, 0, state, info, generator), 1, state, info, generator)
    along = tuning.standardised(state.position[:, : len(tuning.centre)])
    slope = slope_in_theta(ThetaAndWhite(chains.joint, tuning, torch.float64), along, state.white.position, None)
    torch.testing.assert_close(found.slopes, 2 * slope.mT @ slope, rtol=0.01, atol=2e-3)


def test_what_is_not_written_out_moves_by_quadratics():
    model = Halved(inputs(8, 3), targets("softmax", 8), kernel(3), tg.likelihoods.Softmax(num_classes=3, mixing_weights=False))
    chains = class_chains.ClassChains(JointLogDensity(model), 8, None)
    assert not chains.by_trajectories and len(chains.points) == 1 + 2 * model.layout.size**2
    assert not class_chains.ClassChains(JointLogDensity(four_classes()), 8, None).by_trajectories


@BOTH
def test_trajectories_in_single_precision_are_judged_in_double(make):
    """Where the gradient is rough, and where the likelihood has none written out, the value is that of [theta, v]."""
    model = make()
    chains = class_chains.ClassChains(JointLogDensity(model), 8, None)
    tuning = chains.first_tuning()
    generator = torch.Generator().manual_seed(0)
    kernel = chains.kernel(tuning)
    state = kernel.init(chains.starts(tuning, 4, generator), generator)
    for _ in range(3):
        state, _ = kernel.step(state, generator)
    torch.testing.assert_close(state.log_density, chains.joint(state.position), rtol=1e-12, atol=1e-9)
    exact = OfWhite(chains.joint, state.at)
    near = NearlyOfWhite(exact)
    value, gradient = exact.value_and_grad(state.white.position)
    torch.testing.assert_close(state.white.log_density, value, rtol=1e-12, atol=1e-9)
    for found in (near(state.white.position), near.value_and_grad(state.white.position)[0]):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(near.value_and_grad(state.white.position)[1], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: gp("probit"), "GP with Bernoulli.*Expected a GP with Softmax"),
        (lambda: gp("robust_max"), "RobustMax"),
        (lambda: sparse_gp("softmax"), "SparseGP with Softmax"),
        (gp_regression, "GPRegression"),
        (lambda: tg.GP(inputs(6), targets("softmax", 6), fixed_kernel(), gp("softmax").likelihood), "hyperparameters.*are fixed"),
        (lambda: gp("softmax").with_targets(torch.stack([targets("softmax", 6, seed) for seed in range(4)])), "one a chain"),
    ],
)
def test_models_of_other_kinds_are_refused(model, expected):
    with pytest.raises(ValueError, match=expected):
        tg.sample(model(), tg.ClassGibbs(), **{**OPTIONS, "num_chains": 4})


@pytest.mark.parametrize(("option", "value"), [("num_steps", 0), ("thinning", 0), ("target_accept_prob", 1.5)])
def test_options_out_of_range_are_named(option, value):
    with pytest.raises(ValueError, match=option):
        tg.sample(four_classes(), tg.ClassGibbs(**{option: value}), **OPTIONS)


def test_the_search_looks_at_some_of_many_data(monkeypatch):
    seen = []
    fitted = class_search.fitted_class_sites
    monkeypatch.setattr(
        class_search, "fitted_class_sites", lambda model, *rest: seen.append(len(model.train_x)) or fitted(model, *rest)
    )
    monkeypatch.setattr(class_search, "_ROUGH_DATA", 10)
    class_chains.ClassChains(JointLogDensity(four_classes(num_data=25)), 8, None).first_tuning()
    first = seen.index(25)
    assert first > 1 and set(seen[:first]) == {9} and set(seen[first:]) == {25}


@pytest.mark.parametrize("seed", range(3))
def test_the_search_leaves_a_prior_under_which_inputs_are_all_far_apart(seed):
    """Of 18 columns under a prior for one: K is the identity for all thetas that it has drawn, and the bound has no slope there."""
    x, y = make_classification(120, 18, n_informative=8, n_classes=4, n_clusters_per_class=1, class_sep=2.0, random_state=seed)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(3.0, 12.0)), outputscale_prior=GammaPrior(2.0, 0.15))
    model = tg.GP((x - x.mean(0)) / x.std(0), y, kernel, tg.likelihoods.Softmax(num_classes=4, mixing_weights=False))
    centre, _ = class_search.rough_theta(model)
    assert float(centre[model.layout.columns("kernel.base_kernel.lengthscale")].exp()) > 2.0


def test_the_search_climbs_along_the_axes_of_many(monkeypatch):
    """Of ten hyperparameters 21 thetas a step, not 201."""
    seen = []
    fitted = class_search.fitted_class_sites
    monkeypatch.setattr(
        class_search, "fitted_class_sites", lambda model, theta, *rest: seen.append(len(theta)) or fitted(model, theta, *rest)
    )
    model = many_lengthscales()
    class_search.rough_theta(model)
    climbs = seen[3:]  # after thetas along the axes, around the best, and the best
    assert set(climbs) == {1, 1 + 2 * model.layout.size}
