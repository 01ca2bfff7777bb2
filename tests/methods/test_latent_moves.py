"""What warm-up finds for moves of the latents: regions that accept, control variables that explain; frozen, saved, or refused."""

import pytest
import torch

import torchgpmc as tg
from tests.problems import LIKELIHOODS, fixed_kernel, gp, inputs, kernel, targets
from tests.runs.resume import dies_and_resumes
from tests.speed import quick
from tests.test_conformance import quiet_sample
from tests.trials.test_a_likelihood import Integrals
from torchgpmc.methods.control_values import _Kept
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.control_inputs import ControlSearch, add_controls, prior_of_controls, unexplained
from torchgpmc.runs.partition import Partition, Refinement, start_partition
from torchgpmc.runs.run import Settings
from torchgpmc.samplers.regions import RegionRates, RegionsInfo

pytestmark = pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")

F64 = torch.float64
NOTHING = torch.zeros(1, 0, dtype=F64)


def smooth(num_data=30, likelihood="poisson", noise=None):
    """A function of one input that is smooth beside the spacing of its data."""
    x = torch.linspace(0, 1, num_data, dtype=F64)
    made = LIKELIHOODS[likelihood]()
    if noise is not None:
        made.noise = noise
    y = targets(likelihood, num_data)
    return tg.GP(x, y, fixed_kernel(0.2, 1.0), made.requires_grad_(False))


def of_eight(likelihood):
    return smooth(8, likelihood)


def run_through(method, model, warmup, draws, chains=8):
    run, generator = method.prepare(model, Settings(draws, warmup, chains, None)), torch.Generator().manual_seed(1)
    state = run.init(generator)
    for _ in range(warmup + draws):
        state, _, stats = run.advance(state, generator)
        yield state, stats


# --- regions ----------------------------------------------------------------------------------------------------------


def info_with(rates):
    rates = torch.tensor(rates, dtype=F64)
    return RegionsInfo(rates.mean(-1), rates[:, 0], rates[:, 0], RegionRates(rates))


def test_regions_that_accept_too_rarely_are_split_by_their_inputs():
    x = torch.tensor([[0.0], [0.1], [5.0], [5.1], [9.0]], dtype=F64)
    refinement = Refinement(100, x, 2, 0.25)
    tuning = Partition(torch.tensor([0, 0, 0, 0, 1]), torch.zeros(5, dtype=F64), torch.zeros((), dtype=F64))
    for iteration in range(1, 6):
        assert tuning.labels.max() == 1 and refinement.restarts(iteration) == (iteration == 5)
        # Pooled over two chains: 0.2 in the first region, and 0 in one that is a single point.
        tuning = refinement.update(tuning, iteration, None, info_with([[0.1, 0.0], [0.3, 0.0]]), None)
    first, second = tuning.labels[0], tuning.labels[2]
    assert tuning.labels.tolist() == [first, first, second, second, 1] and {int(first), int(second)} == {0, 2}
    assert float(tuning.accepted.sum()) == float(tuning.num_seen) == 0
    for iteration in range(6, 11):
        tuning = refinement.update(tuning, iteration, None, info_with([[0.25, 0.0, 0.9]]), None)
    assert int(tuning.labels.max()) == 2


def test_first_regions_are_clusters_and_equal_inputs_are_split_too():
    x = torch.tensor([[0.0], [5.0], [0.1], [5.1], [5.2]], dtype=F64)
    labels = start_partition(x, 2).labels
    assert labels[0] == labels[2] != labels[1] == labels[3] == labels[4]
    assert start_partition(torch.zeros(4, 2, dtype=F64), 4).labels.sort().values.tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_every_region_accepts_as_often_as_was_asked_for_and_is_frozen_before_the_draws():
    model = smooth(noise=0.05, likelihood="gaussian")
    states, rates = [], []
    run = tg.LocalRegions().prepare(model, Settings(30, 120, 32, None))
    generator = torch.Generator().manual_seed(1)
    state = run.init(generator)
    for iteration in range(150):
        if iteration >= 120:
            states.append(state.tuning)
            _, info = run.kernel(state.tuning).step(state.chain, generator)  # the same step again, from other numbers
            rates.append(info.regions.acceptance.mean(0))
        state, _, stats = run.advance(state, generator)
    assert all(tuning is states[0] for tuning in states)
    assert 2 <= float(stats["num_regions"][0]) < 30
    assert float(torch.stack(rates).mean(0).min()) > 0.2  # 960 proposals a region


# --- control variables ------------------------------------------------------------------------------------------------


def test_what_controls_leave_is_the_formula():
    model, x = smooth(), inputs(3, 1, seed=2)
    values = model.layout.raw_values(NOTHING).by_module
    within = model.covariance.bind(x, x)(values["kernel"])[0]
    within = within + torch.diag(1e-6 * within.diagonal() + model.jitter)
    across = model.covariance.bind(model.train_x, x)(values["kernel"])[0]
    total = model.covariance.bind(model.train_x, model.train_x)(values["kernel"])[0]
    left = (total - across @ torch.linalg.solve(within, across.T)).diagonal() / total.trace()
    torch.testing.assert_close(unexplained(model, values, x)[0], left)
    assert torch.autograd.gradcheck(lambda place: unexplained(model, values, place), (x.requires_grad_(),))


@pytest.mark.parametrize("explained", quick([0.8], [0.8, 0.95, 0.999]))
def test_control_variables_are_added_until_they_explain_enough(explained):
    model = smooth()
    values = model.layout.raw_values(NOTHING).by_module
    found = add_controls(model, values, model.train_x[:0], explained)
    assert float(unexplained(model, values, found).sum()) <= 1 - explained
    assert len(found) < 12
    fewer = add_controls(model, values, model.train_x[:0], 0.0, len(found) - 1)
    assert float(unexplained(model, values, fewer).sum()) > 1 - explained
    # Better than any of as many random choices among the data.
    for seed in range(5):
        chosen = torch.randperm(30, generator=torch.Generator().manual_seed(seed))[: len(found)]
        assert float(unexplained(model, values, model.train_x[chosen]).sum()) > float(unexplained(model, values, found).sum())


def test_there_are_never_more_controls_than_latents():
    model = tg.GP(inputs(4), targets("poisson", 4), fixed_kernel(0.01), LIKELIHOODS["poisson"]())
    values = model.layout.raw_values(NOTHING).by_module
    assert len(add_controls(model, values, model.train_x[:0], 0.999999999, 9)) == 4


class Told:
    """An Info with an acceptance rate."""

    def __init__(self, model, rate):
        self.acceptance_rate = torch.full((2,), rate, dtype=F64)
        self.values = model.layout.raw_values(NOTHING).by_module


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "grows"), [(0.1, True), (0.3, False)])
def test_control_variables_are_added_while_acceptance_is_low(rate, grows):
    model = smooth()
    search = ControlSearch(100, model, 0.95, 0.25, False)
    tuning, counts = search.start(model.train_x, None, None), []
    for iteration in range(1, 21):
        tuning = search.update(tuning, iteration, None, Told(model, rate), None)
        counts.append(len(tuning.inputs))
    assert counts[0] == 1 < counts[4]  # after the first round they explain enough, whatever was accepted with one
    assert (counts[9] > counts[4]) == (counts[14] > counts[9]) == grows


@pytest.mark.slow
def test_control_inputs_are_frozen_before_the_draws_and_chains_share_them():
    seen = [(state.tuning, stats) for state, stats in run_through(tg.ControlVariables(), smooth(), 40, 5)]
    draws = [tuning for tuning, _ in seen[40:]]
    assert all(tuning is draws[0] for tuning in draws)
    assert float(seen[-1][1]["num_controls"][0]) == len(draws[0].inputs) > 1
    assert float(torch.stack([stats["acceptance_rate"] for _, stats in seen[30:]]).mean()) > 0.2


def test_the_prior_of_controls_is_worked_out_once_at_fixed_hyperparameters(monkeypatch):
    module = __import__("torchgpmc.methods.control_values", fromlist=["prior_of_controls"])
    counts = []
    monkeypatch.setattr(module, "prior_of_controls", lambda *arguments: counts.append(1) or prior_of_controls(*arguments))
    list(run_through(tg.ControlVariables(), smooth(), 0, 7))
    assert len(counts) == 1


# --- all of them ------------------------------------------------------------------------------------------------------

METHODS = {
    "GibbsLike": tg.GibbsLike(),
    "GibbsLike, proposing": tg.GibbsLike(exact=False),
    "LocalRegions": tg.LocalRegions(),
    "ControlVariables": tg.ControlVariables(),
    "ControlVariables, underrelaxed": tg.ControlVariables(underrelaxation=0.5),
    "ControlVariables, walking": tg.ControlVariables(all_at_once=True),
}
OPTIONS = {"num_samples": 4, "warmup_steps": 12, "num_chains": 3, "seed": 4}


NOT_ALIKE = [name for name in METHODS if name != "ControlVariables, underrelaxed"]


@pytest.mark.parametrize("name", quick(["LocalRegions", "GibbsLike"], NOT_ALIKE))
def test_a_run_that_died_resumes_to_the_same_bits(name, tmp_path, monkeypatch):
    for advances in (7, 14):  # after regions or control variables have changed, and among the draws
        path = tmp_path / f"{advances}.ckpt"
        assert dies_and_resumes(of_eight, METHODS[name], {**OPTIONS, "progress": False}, advances, path, monkeypatch)


@pytest.mark.parametrize("name", quick(["LocalRegions", "GibbsLike"], METHODS))
def test_chunks_of_chains_do_not_change_the_draws(name):
    whole, chunked = (quiet_sample(smooth(8), METHODS[name], **OPTIONS, chain_chunk=chunk) for chunk in (None, 2))
    torch.testing.assert_close(chunked.whitened, whole.whitened, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("likelihood", ["softmax", "student_t"])
@pytest.mark.parametrize("name", quick(["LocalRegions"], METHODS))
def test_several_latents_and_any_factorising_likelihood(name, likelihood):
    model = tg.GP(inputs(6), targets(likelihood, 6), fixed_kernel(), LIKELIHOODS[likelihood]().requires_grad_(False))
    posterior = quiet_sample(model, METHODS[name], num_samples=20, warmup_steps=20)
    assert bool(torch.isfinite(posterior.latents).all())
    assert len(torch.unique(posterior.whitened.flatten(0, 1), dim=0)) > 2


def not_factorising():
    x = torch.linspace(0, 1, 7, dtype=F64)
    return tg.GP(x, torch.tensor([[0.3, 0.5, 0.9], [0.2, 0.6, 1.0]]), fixed_kernel(), Integrals().requires_grad_(False))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "GibbsLike"])
def test_a_likelihood_that_does_not_factorise_is_served_by_proposals(name):
    assert quiet_sample(not_factorising(), METHODS[name]).latents.shape == (2, 6, 7)


class Own(GPModel):
    """A model with a likelihood of its own."""

    def log_likelihood(self, *arguments):
        return 0.5 * super().log_likelihood(*arguments)


def free(kind=tg.GP):
    return kind(inputs(4), targets("poisson", 4), kernel(), LIKELIHOODS["poisson"]())


def fixed(kind=tg.GP, count=4, **options):
    return kind(inputs(count), targets("poisson", count), fixed_kernel(), LIKELIHOODS["poisson"](), **options)


@pytest.mark.parametrize(
    ("method", "model", "match"),
    [
        (tg.GibbsLike(), not_factorising, r"not a product over its latents.*GibbsLike\(exact=False\) or EllipticalSlice\(\)"),
        (tg.GibbsLike(), lambda: fixed(Own), "of Own is not a product over its latents"),
        (tg.GibbsLike(), lambda: fixed(tg.SparseGP, inducing_points=inputs(2)), "of SparseGP is not a product"),
        (tg.LocalRegions(), lambda: fixed(count=1), r"this model has one of them.*use EllipticalSlice\(\)"),
        (tg.LocalRegions(num_regions=5), fixed, "num_regions is 5 and there are 4 latents"),
        (tg.LocalRegions(num_regions=0), fixed, "num_regions is 0"),
        (tg.LocalRegions(target_accept_prob=1.5), fixed, "target_accept_prob is 1.5"),
        (tg.ControlVariables(explained=1.0), fixed, "explained is 1.0"),
        (tg.ControlVariables(underrelaxation=1), fixed, "underrelaxation is 1"),
        (tg.ControlVariables(underrelaxation=-0.5), fixed, "underrelaxation is -0.5"),
        *((method, free, "samples latents alone.*have priors.*sample both with Gibbs") for method in METHODS.values()),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(method, model, match):
    with pytest.raises(ValueError, match=match):
        method.prepare(model(), Settings(5, 5, 2, None))


def test_control_variables_keep_the_priors_of_thetas_that_stay():
    model = gp("probit")
    kept, controls = _Kept(model), model.latent_inputs[::2]
    theta = model.layout.sample_prior(3, torch.Generator().manual_seed(0))
    moved = theta + torch.tensor([[0.0], [0.5], [0.0]])
    for at, where in ((theta, controls), (moved, controls), (moved, controls + 0.1), (theta, controls)):
        with torch.no_grad():
            prior = model.prior(at)
        for found, expected in zip(kept(prior, where), prior_of_controls(model, prior, where), strict=True):
            torch.testing.assert_close(found, expected)
