"""Pyro: log joints against Pyro's own potential, both routes, and MCMC's interface."""

import pathlib

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import init_to_median
from pyro.infer.mcmc.util import initialize_model

import torchgpmc as tg
from tests.calibration import z_limit
from tests.integrations.pyro_models import (
    F64,
    ZERO,
    binary_data,
    eight_schools,
    logistic,
    numbers,
    problems,
)
from tests.speed import quick
from torchgpmc.density import AutogradDensity
from torchgpmc.diagnostics.summaries import effective_sizes
from torchgpmc.integrations.pyro import HMC, MCMC, NUTS
from torchgpmc.integrations.pyro.log_joint import (
    ByRows,
    Recorded,
    Vectorised,
    fastest_route,
    nearer_starts,
    unconstrained_model,
    unconstrained_potential,
)
from torchgpmc.numerics.special import log_ndtr

quiet = pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
OPTIONS = {"num_samples": 12, "warmup_steps": 12, "num_chains": 3, "disable_progbar": True, "seed": 1}
NAMES = list(problems())


@pytest.fixture(autouse=True)
def unchecked():
    """As MCMC runs them; and Pyro's numbers repeat."""
    pyro.set_rng_seed(0)
    with pyro.validation_enabled(False):
        yield


# --- the log joint --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quick(["eight schools"], NAMES))
def test_log_joint_and_gradient_are_those_of_pyros_potential(name):
    model, args = problems()[name]
    problem = unconstrained_model(model, args, {}, 3)
    looks = name.startswith("GP site")  # gpytorch's kernels look at values, and RBF at how large they are
    assert isinstance(problem.density, Vectorised if looks else Recorded)
    _, potential, transforms, _ = initialize_model(model, args)
    assert set(transforms) == set(problem.sites.shapes)
    position = problem.start + 0.3 * numbers(*problem.start.shape)
    value, gradient = problem.density.value_and_grad(position)
    for row in range(3):
        values = {name: part.clone().requires_grad_(True) for name, part in problem.sites.values(position[row]).items()}
        expected = -potential(values)
        slopes = dict(zip(values, torch.autograd.grad(expected, list(values.values())), strict=True))
        torch.testing.assert_close(value[row], expected.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(
            gradient[row], problem.sites.position({k: v[None] for k, v in slopes.items()})[0], rtol=0, atol=1e-9
        )
    torch.testing.assert_close(problem.density(position), value, rtol=0, atol=1e-12)


def test_rows_do_not_depend_on_one_another():
    model, args = problems()["GP site, other kernel"]
    density = unconstrained_model(model, args, {}, 5).density
    position = numbers(5, 16)
    alone = torch.cat([density(position[[row]]) for row in range(5)])
    torch.testing.assert_close(density(position), alone, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_recordings_serve_as_many_rows_as_are_asked_for():
    model, args = problems()["logistic regression"]
    density = unconstrained_model(model, args, {}, 5).density
    position = numbers(7, 4)
    value, gradient = density.vectorised.value_and_grad(position)
    for rows in (1, 2, 3, 5, 7):  # of four recorded, of all five, of more than there are chains
        found = density.value_and_grad(position[:rows])
        torch.testing.assert_close(found, (value[:rows], gradient[:rows]), rtol=0, atol=1e-10)


def mixture(y):
    share = pyro.sample("share", dist.Beta(ZERO + 2.0, 2.0))
    means = pyro.sample("means", dist.Normal(torch.tensor([-1.0, 1.0], dtype=F64), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        label = pyro.sample("label", dist.Bernoulli(share))
        pyro.sample("y", dist.Normal(means[label.long()], 1.0), obs=y)


def looks_at_values(y):
    mean = pyro.sample("mean", dist.Normal(ZERO, 1.0))
    pyro.sample("y", dist.Normal(mean, 1.0 if mean > 0 else 2.0), obs=y)


def test_discrete_latents_are_summed_out_by_the_loop():
    y = numbers(4)
    problem = unconstrained_model(mixture, (y,), {}, 3)
    assert isinstance(problem.density, ByRows)
    values = problem.sites.values(problem.start)
    share = values["share"].sigmoid()[:, None]
    normal = torch.distributions.Normal(values["means"][..., None], 1.0).log_prob(y)
    likelihood = torch.logaddexp((1 - share).log() + normal[:, 0], share.log() + normal[:, 1]).sum(-1)
    prior = torch.distributions.Normal(torch.tensor([-1.0, 1.0], dtype=F64), 1.0).log_prob(values["means"]).sum(-1)
    prior = prior + (6.0 * share * (1 - share)).log()[:, 0] + (share * (1 - share)).log()[:, 0]
    torch.testing.assert_close(problem.density(problem.start), likelihood + prior)


def test_control_flow_takes_the_loop():
    problem = unconstrained_model(looks_at_values, (ZERO + 1.0,), {}, 3)
    assert isinstance(problem.density, ByRows)
    normal = torch.distributions.Normal
    for mean, spread in ((-0.5, 2.0), (0.5, 1.0)):
        expected = normal(0.0, 1.0).log_prob(ZERO + mean) + normal(ZERO + mean, spread).log_prob(ZERO + 1.0)
        torch.testing.assert_close(problem.density(torch.full((1, 1), mean, dtype=F64))[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("error", [lambda p: 1e-4 * p[0], lambda p: 970.0 + 0 * p[0], lambda p: 1e-4 * (p[0] - p[0].detach())])
def test_a_density_that_is_not_the_potentials_is_not_taken(error):
    problem = unconstrained_model(logistic, binary_data(20), {}, 3)
    by_rows = problem.density.vectorised.by_rows
    right = lambda position: -by_rows.potential(problem.sites.values(position))  # noqa: E731
    assert isinstance(fastest_route(right, by_rows, problem.start), ByRows)  # Pyro's own cannot be vectorised
    exact = problem.density.vectorised.together.function
    one = lambda position: exact(position[None])[0]  # noqa: E731
    assert isinstance(fastest_route(one, by_rows, problem.start), Recorded)
    assert isinstance(fastest_route(lambda position: one(position) + error(position), by_rows, problem.start), ByRows)


def test_a_chain_far_out_climbs_and_the_others_stay():
    density = AutogradDensity(lambda x: -0.5 * (x / 0.1).square().sum(-1))
    start = torch.tensor([[0.1, 0.2], [30.0, -40.0], [0.0, 0.3]], dtype=F64)
    found = nearer_starts(density, start)
    assert torch.equal(found[[0, 2]], start[[0, 2]]) and density(found)[1] > density(start).max() - 20.0


def test_a_failed_factorisation_is_that_chains_alone():
    def potential(values):
        off = values["off"]
        matrix = torch.stack([torch.stack([off**0, off]), torch.stack([off, off**0])])
        return -torch.linalg.cholesky(matrix).diagonal().log().sum()

    starts = {"off": torch.tensor([0.5, -0.5, 0.1], dtype=F64)}
    problem = unconstrained_potential(potential, starts, None)
    assert isinstance(problem.density, Recorded)
    position = torch.tensor([[0.5], [1.5], [0.1]], dtype=F64)
    value, gradient = problem.density.value_and_grad(position)
    off = position[[0, 2], 0]
    torch.testing.assert_close(value[[0, 2]], 0.5 * (1 - off.square()).log())
    torch.testing.assert_close(gradient[[0, 2], 0], -off / (1 - off.square()))
    assert value[1] == -torch.inf and gradient[1] == 0 and torch.equal(problem.density(position), value)


@pytest.mark.parametrize("place", [0, 1])
def test_log_ndtr_for_all_chains_at_once(place):
    x = 20 * numbers(5, 4)
    x.requires_grad_(True)
    found = torch.func.vmap(lambda row: log_ndtr(3 * row).sum(), in_dims=place)(x)
    expected = log_ndtr(3 * x).sum(1 - place)
    torch.testing.assert_close(found, expected)
    slopes = (torch.autograd.grad(value.sum(), x)[0] for value in (found, expected))
    torch.testing.assert_close(next(slopes), next(slopes))


# --- MCMC -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@quiet
def test_interface_is_pyros(capsys):
    mcmc = MCMC(NUTS(logistic, max_tree_depth=3), **OPTIONS, save_params=["slopes"])
    with pytest.raises(RuntimeError, match="no draws yet"):
        mcmc.get_samples()
    x, y = binary_data(20)
    before = torch.random.get_rng_state()
    mcmc.run(x, y)
    assert torch.equal(before, torch.random.get_rng_state())
    assert mcmc.draws.info["evaluated"] == "all chains at once"
    grouped, flat = mcmc.get_samples(group_by_chain=True), mcmc.get_samples()
    assert set(flat) == {"slopes"} and grouped["slopes"].shape == (3, 12, 2) and mcmc.get_samples(5)["slopes"].shape == (5, 2)
    assert torch.equal(flat["slopes"], grouped["slopes"].flatten(0, 1)) and flat["slopes"].dtype == F64
    assert [row.name for row in mcmc.draws.summary().rows] == ["level", "slopes[0]", "slopes[1]", "lp"]
    found = mcmc.diagnostics()
    assert set(found["slopes"]) == {"n_eff", "r_hat"} and set(found["acceptance rate"]) == {"chain 0", "chain 1", "chain 2"}
    assert found["divergences"]["chain 1"] == mcmc.draws.stats["diverging"][1].nonzero().flatten().tolist()
    mcmc.summary()
    printed = capsys.readouterr().out
    assert "slopes[1]" in printed and "Number of divergences" in printed
    tree = mcmc.to_arviz()
    assert tree["posterior"]["slopes"].shape == (3, 12, 2) and tree["sample_stats"]["lp"].shape == (3, 12)
    assert pyro.infer.Predictive(logistic, {**flat, "level": torch.zeros(36, dtype=F64)})(x)["y"].shape == (36, 20)
    again = MCMC(NUTS(logistic, max_tree_depth=3), **OPTIONS)
    again.run(x, y)
    assert torch.equal(again.get_samples()["slopes"], flat["slopes"])


@pytest.mark.slow
@quiet
def test_without_a_seed_pyros_decides():
    found = []
    for seed in (3, 3, 4):
        pyro.set_rng_seed(seed)
        mcmc = MCMC(HMC(eight_schools, num_steps=2), **{**OPTIONS, "seed": None, "num_samples": 3})
        mcmc.run(*problems()["eight schools"][1])
        found.append(mcmc.get_samples()["away"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    for parallel in (False, True):
        assert pyro.infer.Predictive(eight_schools, mcmc.get_samples(), parallel=parallel)()["y"].shape == (9, 8)


@pytest.mark.slow
@quiet
def test_draws_are_constrained_and_mean_what_the_density_says():
    """Positions, transforms and sites belong together: the density of what get_samples gives is the run's lp."""
    model, args = problems()["Dirichlet and LKJ"]
    mcmc = MCMC(NUTS(model, max_tree_depth=3), **OPTIONS)
    mcmc.run(*args)
    values = {name: value[1, 4] for name, value in mcmc.get_samples(group_by_chain=True).items()}
    torch.testing.assert_close(values["shares"].sum(), ZERO + 1)
    torch.testing.assert_close(values["factor"].square().sum(-1), torch.ones(3, dtype=F64))
    total = pyro.poutine.trace(pyro.poutine.condition(model, values)).get_trace(*args).log_prob_sum()
    for name, transform in mcmc.transforms.items():
        unconstrained = transform(values[name])
        total = total - transform.log_abs_det_jacobian(values[name], unconstrained).sum()
    torch.testing.assert_close(mcmc.draws.stats["lp"][1, 4], total)


@pytest.mark.slow
@quiet
def test_starts_strategies_transforms_and_nesting():
    x, y = binary_data(20)
    starts = {"slopes": numbers(3, 2), "level": numbers(3)}
    problem = NUTS(logistic).unconstrained(3, (x, y), {}, starts)
    torch.testing.assert_close(problem.start, torch.cat([starts["level"][:, None], starts["slopes"]], -1))
    median = NUTS(logistic, init_strategy=init_to_median(num_samples=9)).unconstrained(2, (x, y), {}, None)
    assert bool((median.start[:, 1:].abs() < 2).all())
    halved = {name: torch.distributions.transforms.AffineTransform(0.0, 0.5) for name in starts}
    kernel = NUTS(logistic, transforms=halved, max_plate_nesting=1)
    other = kernel.unconstrained(3, (x, y), {}, {name: 0.5 * value for name, value in starts.items()})
    torch.testing.assert_close(other.density(other.start), problem.density(problem.start) + 3 * torch.tensor(2.0, dtype=F64).log())
    mcmc = MCMC(kernel, **OPTIONS, initial_params={name: 0.5 * value for name, value in starts.items()})
    mcmc.run(x, y)
    slopes = mcmc.get_samples(group_by_chain=True)["slopes"]
    torch.testing.assert_close(slopes, 2 * mcmc.draws.position[..., 1:])


@pytest.mark.slow
@pytest.mark.parametrize(("mcmc_class", "kernel"), [(MCMC, HMC), (pyro.infer.MCMC, NUTS)])
@quiet
def test_a_potential(mcmc_class, kernel):
    potential = lambda values: 0.5 * ((values["a"] - 3.0).square().sum() + (values["b"] / 0.3).square())  # noqa: E731
    starts = {"a": torch.full((2,), 2.0, dtype=F64), "b": ZERO}
    options = {"num_samples": 50, "warmup_steps": 30, "disable_progbar": True}
    mcmc = mcmc_class(kernel(potential_fn=potential), initial_params=starts, **options)
    mcmc.run()
    samples = mcmc.get_samples()
    assert samples["a"].shape == (50, 2) and samples["b"].shape == (50,)
    assert bool(((samples["a"].mean(0) - 3.0).abs() < 1.0).all()) and 0.1 < samples["b"].std() < 0.6


@pytest.mark.slow
def test_our_kernel_in_pyros_mcmc():
    x, y = binary_data(20)
    kernel = NUTS(logistic, adapt_mass_matrix=False)
    mcmc = pyro.infer.MCMC(kernel, num_samples=6, warmup_steps=40, disable_progbar=True)
    mcmc.run(x, y)
    assert mcmc.get_samples()["slopes"].shape == (6, 2)
    found = mcmc.diagnostics()
    assert set(found["divergences"]["chain 0"]) <= set(range(6)) and 0.1 < found["acceptance rate"]["chain 0"] <= 1
    assert pyro.infer.Predictive(logistic, mcmc.get_samples())(x)["y"].shape == (6, 20)


@pytest.mark.slow
@quiet
def test_float32_models_stay_float32():
    def model():
        pyro.sample("x", dist.Gamma(torch.tensor([2.0, 3.0]), 1.0).to_event(1))

    mcmc = MCMC(NUTS(model), **OPTIONS)
    mcmc.run()
    assert mcmc.get_samples()["x"].dtype == torch.float32 and mcmc.draws.info["evaluated"] == "all chains at once"


@pytest.mark.slow
@quiet
def test_a_run_resumes_from_its_checkpoint(tmp_path):
    options = {**OPTIONS, "checkpoint": tmp_path / "run.ckpt"}
    first, second = (MCMC(NUTS(logistic, max_tree_depth=3), **options) for _ in range(2))
    first.run(*binary_data(20))
    second.run(*binary_data(20))
    assert torch.equal(first.get_samples()["slopes"], second.get_samples()["slopes"])
    with pytest.raises(ValueError, match="belongs to another run"):
        MCMC(NUTS(logistic, max_tree_depth=3), **options).run(*binary_data(21))


@pytest.mark.slow
@pytest.mark.statistical
@quiet
def test_means_are_those_of_pyros_nuts():
    x, y = binary_data(15)
    args = (x, y)
    theirs = pyro.infer.MCMC(pyro.infer.NUTS(logistic), num_samples=500, warmup_steps=100, disable_progbar=True)
    theirs.run(*args)
    for kernel in (NUTS(logistic), HMC(logistic, trajectory_length=2.0)):
        ours = MCMC(kernel, num_samples=150, warmup_steps=100, num_chains=10, disable_progbar=True, seed=1)
        ours.run(*args)
        scores = []
        for name in ("slopes", "level"):
            a, b = (mcmc.get_samples(group_by_chain=True)[name] for mcmc in (ours, theirs))
            for one, other in zip(
                a.flatten(2).unbind(-1) if a.dim() > 2 else [a], b.flatten(2).unbind(-1) if b.dim() > 2 else [b], strict=True
            ):
                for power in (1, 2):
                    p, q = one**power, other**power
                    error = p.var() / effective_sizes(p)[0] + q.var() / effective_sizes(q)[0]
                    scores.append(float((p.mean() - q.mean()).abs() / error.sqrt()))
        assert max(scores) < z_limit(len(scores))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: MCMC(pyro.infer.NUTS(logistic), 5), TypeError, "kernel is pyro.*Expected torchgpmc.integrations.pyro.NUTS"),
        (lambda: MCMC(NUTS(logistic), 5, hook_fn=print), ValueError, "hook_fn.*pyro.infer.MCMC with this kernel"),
        (lambda: MCMC(NUTS(logistic), 5, num_chains=0), ValueError, "num_chains is 0"),
        (lambda: MCMC(NUTS(logistic), 5, 5, {"level": numbers(3)}, 4), ValueError, "number of chains"),
        (lambda: NUTS(), ValueError, "both given, or both missing"),
        (lambda: HMC(logistic, potential_fn=len), ValueError, "both given, or both missing"),
        (lambda: NUTS(logistic, full_mass=[("level",)]), ValueError, "full_mass is .*Expected True or False"),
        (lambda: NUTS(logistic, use_multinomial_sampling=False), ValueError, "Expected True"),
        (lambda: NUTS(logistic, target_accept_prob=1.5), ValueError, "target_accept_prob"),
        (lambda: HMC(logistic, trajectory_length=0.0), ValueError, "trajectory_length"),
        (lambda: MCMC(NUTS(potential_fn=len), 5).run(), ValueError, "Expected initial_params"),
        (lambda: MCMC(NUTS(lambda: None), 5).run(), ValueError, "no continuous latent site"),
        (
            lambda: MCMC(NUTS(logistic), 5, 5, {"slope": numbers(2)}).run(*binary_data(5)),
            ValueError,
            r"\['slope'\], and the model has",
        ),
    ],
)
def test_what_cannot_be_run_is_said(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_the_package_does_not_import_the_bridge():
    root = pathlib.Path(tg.__file__).parent
    importers = [
        path
        for path in root.rglob("*.py")
        if "import torchgpmc.integrations.pyro" in (text := path.read_text()) or "from torchgpmc.integrations.pyro" in text
    ]
    assert {path.parent.name for path in importers} == {"pyro"}
