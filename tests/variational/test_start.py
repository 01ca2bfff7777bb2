"""Fits of theta and inducing points; what a start gives; errors. gpytorch's models converted."""

import dataclasses
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior, NormalPrior
from torch.utils._python_dispatch import TorchDispatchMode

import torchgpmc as tg
from tests.problems import fixed_kernel, gp, gp_regression, inputs, kernel, sparse_gp, targets
from torchgpmc.approximations.normal_latents import GaussianLatents
from torchgpmc.models.affine import AffineMap
from torchgpmc.models.bent import BentMap
from torchgpmc.models.following import FollowingMap
from torchgpmc.numerics.linalg import normal_from_natural
from torchgpmc.variational import minibatches
from torchgpmc.variational import start as start_module
from torchgpmc.variational.bound import VariationalMarginal, inducing_positions
from torchgpmc.variational.minibatches import _marginals, _Moments

QUIET = {"progress": False}


@pytest.fixture(scope="module")
def start():
    return tg.initialize(sparse_gp("probit", num_data=40), **QUIET)


@pytest.mark.parametrize("name", ["gaussian", "softmax"])
def test_the_marginals_gradient_is_that_of_its_values_in_theta_and_inducing_points(name):
    model = sparse_gp(name, num_data=12)
    positions = inducing_positions(model, True)
    marginal = VariationalMarginal(model, positions)
    size = model.layout.size + positions.moving_size
    position = torch.linspace(-0.5, 0.5, size, dtype=torch.float64)[None]
    _, gradient = marginal.value_and_grad(position)
    for column in (0, model.layout.size - 1, model.layout.size, size - 1):
        step = torch.zeros_like(position)
        step[0, column] = 1e-4
        slope = (marginal(position + step) - marginal(position - step)) / 2e-4
        torch.testing.assert_close(gradient[:, column], slope, rtol=1e-4, atol=1e-5)


def test_the_fit_is_where_nothing_rises(start):
    marginal = VariationalMarginal(start.model)
    value, gradient = marginal.value_and_grad(start.theta[None])
    assert start.converged and float(gradient.abs().max()) < 0.02
    bound = value - start.model.layout.log_prior(start.theta[None])
    assert float(bound.detach()) == pytest.approx(start.elbo, abs=1e-6)
    torch.testing.assert_close(start.model.layout.present(start.model)[0], start.theta)


def test_covariance_and_slope_of_theta_are_those_of_the_marginal(start):
    """By differences of values, and of optimal means, of other sizes."""
    marginal, size = VariationalMarginal(start.model), 0.05
    unit = size * torch.eye(len(start.theta)).double()
    values = marginal(torch.cat([start.theta + unit, start.theta - unit, start.theta[None]]))
    second = (values[:3] + values[3:6] - 2 * values[6]) / size**2
    torch.testing.assert_close(torch.linalg.inv(start.theta_covariance).diagonal(), -second, rtol=0.02, atol=1e-3)
    moved = (
        marginal.optimum(start.theta[None] + unit[:1]).latents.mean - marginal.optimum(start.theta[None] - unit[:1]).latents.mean
    )
    torch.testing.assert_close(start.slope[:, 0], moved.flatten() / (2 * size), rtol=0.02, atol=2e-3)


def test_moving_inducing_points_raises_the_bound_and_leaves_the_model_alone(start):
    model = sparse_gp("probit", num_data=40)
    still = tg.initialize(model, optimize_inducing_points=False, **QUIET)
    assert torch.equal(still.model.inducing_points, model.inducing_points)
    objective = [s.elbo + float(s.model.layout.log_prior(s.theta[None])) for s in (start, still)]
    assert objective[0] > objective[1] + 0.01
    assert not torch.equal(start.model.inducing_points, model.inducing_points)
    assert not torch.equal(still.model.layout.present(model), still.theta[None])


def test_inducing_points_move_unasked_where_the_bound_holds_them():
    """Those of a projected process are parameters of its prior."""
    sparse = sparse_gp("probit", num_data=20)
    parts = sparse.train_x, sparse.train_y, sparse.kernel, sparse.likelihood
    projected = tg.ProjectedProcess(*parts, inducing_points=sparse.inducing_points)
    for model, asked, moved in ((sparse, None, True), (projected, None, False), (projected, True, True)):
        start = tg.initialize(model, optimize_inducing_points=asked, **QUIET)
        assert torch.equal(start.model.inducing_points, model.inducing_points) is not moved


def wavy(num_data):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_data, 1, generator=generator, dtype=torch.float64)
    y = (torch.sin(8 * x[:, 0]) + 0.3 * torch.randn(num_data, generator=generator, dtype=torch.float64) > 0).double()
    return tg.SparseGP(x, y, kernel(1), tg.likelihoods.Bernoulli(), inducing_points=x[:6])


@pytest.mark.slow
def test_minibatches_come_near_the_same_fit():
    model = wavy(120)
    options = {"optimize_inducing_points": False, **QUIET}
    whole, parts = tg.initialize(model, **options), tg.initialize(model, batch_size=30, max_iterations=250, **options)
    assert abs(whole.elbo - parts.elbo) < 0.5
    gap = (whole.theta - parts.theta).abs() / whole.theta_covariance.diagonal().sqrt()
    assert parts.converged and float(gap.max()) < 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the variational fit did not converge")
def test_minibatches_go_on_from_an_earlier_fit(monkeypatch):
    model = wavy(120)
    options = {"batch_size": 30, "max_iterations": 3, **QUIET}
    first = tg.initialize(model, **options)
    monkeypatch.setattr(minibatches, "_NATURAL_SHARE", 0.0)
    monkeypatch.setattr(minibatches, "_LEARNING_RATE", 0.0)
    second = tg.initialize(first.model, start=first, **options)
    for name in ("theta", "mean", "scale"):
        torch.testing.assert_close(getattr(second, name), getattr(first, name))
    with pytest.raises(ValueError, match="start belongs to another model"):
        tg.initialize(wavy(100), start=first, **options)


def test_coordinates_follow_theta_where_that_is_not_dear(start, monkeypatch):
    assert isinstance(start.white_coordinates(), FollowingMap)
    fixed = tg.SparseGP(inputs(12), targets("probit", 12), fixed_kernel(), start.model.likelihood, inducing_points=inputs(4))
    assert isinstance(tg.initialize(fixed, **QUIET).white_coordinates(), AffineMap)
    monkeypatch.setattr(start_module, "_WORTH_FOLLOWING", 0.0)
    assert isinstance(start.white_coordinates(), BentMap)
    monkeypatch.setattr(start_module, "_MOST_BENT", 0)
    assert isinstance(start.white_coordinates(), AffineMap)


class AllRows(TorchDispatchMode):
    """Counts arithmetic with all rows of some data: what only takes rows from them is left out."""

    def __init__(self, count):
        super().__init__()
        self.count, self.seen = count, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        sizes = [len(part) for part in args if isinstance(part, torch.Tensor) and part.dim() == 2]
        self.seen += max(sizes, default=0) >= self.count and function is not torch.ops.aten.index.Tensor
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:the variational fit did not converge")
def test_a_step_on_a_minibatch_looks_at_no_other_rows():
    counts = []
    for passes in (1, 2):
        with AllRows(400) as rows:
            tg.initialize(wavy(400), batch_size=40, max_iterations=passes, **QUIET)
        counts.append(rows.seen)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-10), (torch.float32, 1e-5)])
def test_marginals_under_a_constant_q_and_their_slopes_are_those_of_its_definition(dtype, tolerance, generator):
    model = sparse_gp("softmax", num_data=12)
    theta = torch.zeros(1, model.layout.size, dtype=torch.float64, requires_grad=True)
    latents, size = model.latent_shape
    half = torch.randn(1, latents, size, size, dtype=torch.float64, generator=generator)
    q = GaussianLatents(*normal_from_natural(torch.eye(size) + half @ half.mT, half[..., 0])[:2])
    found = []
    moments = _Moments(q.mean, q.scale @ q.scale.mT, float(q.divergence()))
    for marginals in (q.marginals, lambda at: _marginals(at, moments, dtype)):
        mean, variance = marginals(model.at_data(model.layout.raw_values_and_log_prior(theta)[0]))
        slope = torch.autograd.grad((mean.sin() + variance.square()).sum(), theta)[0]
        found.append((mean.detach(), variance.detach(), slope))
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the variational fit did not converge")
def test_a_fit_that_runs_out_of_passes_has_seen_all_data_alike():
    model = wavy(400)
    start = tg.initialize(model, batch_size=10, max_iterations=9, optimize_inducing_points=False, **QUIET)
    best = VariationalMarginal(start.model).optimum(start.theta[None]).log_evidence
    assert 0 <= float(best - start.elbo) < 0.5  # steps of full length to the end leave 2 to 3.5


@pytest.mark.slow
def test_minibatches_move_inducing_points_and_depend_on_the_seed_alone():
    model = wavy(40)
    with pytest.warns(tg.SamplingWarning, match=r"still rose, by .* nats a pass over the data, when .* \(now 12 passes\)"):
        start, again, other = (tg.initialize(model, batch_size=10, max_iterations=12, seed=seed, **QUIET) for seed in (0, 0, 1))
    assert start.digest() == again.digest() != other.digest()
    assert not torch.equal(start.model.inducing_points, model.inducing_points)
    assert bool(torch.isfinite(start.predict(inputs(3, 1)).probs).all())


def test_predictions_are_those_of_q(start):
    x = inputs(5, seed=9)
    prediction = start.predict(x)
    model = start.model
    at = model.at(model.prior(start.theta[None]), x)
    projection = at.projection[0].detach()
    mean = at.mean[0].detach() + start.mean[0] @ projection
    covariance = start.scale[0] @ start.scale[0].mT
    variance = at.variance[0].detach() + (projection * (covariance @ projection)).sum(0)
    torch.testing.assert_close(prediction.latent_mean, mean)
    torch.testing.assert_close(prediction.latent_variance, variance)
    torch.testing.assert_close(prediction.log_prob(torch.ones(5)), prediction.probs.log())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")  # of ten draws
def test_several_latents_and_fixed_hyperparameters():
    x = inputs(20)
    model = tg.SparseGP(
        x,
        targets("softmax", 20),
        fixed_kernel(),
        tg.likelihoods.Softmax(num_classes=3, mixing_weights=False),
        inducing_points=x[:5],
    )
    start = tg.initialize(model, **QUIET)
    assert start.mean.shape == (3, 5) and start.scale.shape == (3, 5, 5) and start.theta.shape == (0,)
    assert start.predict(x).probs.shape == (20, 3)
    assert quick(start.model, tg.HMC(num_steps=2), start).whitened.shape == (2, 2, 15)


def test_a_search_cut_short_says_how_far_it_was_and_can_be_used():
    with pytest.warns(tg.SamplingWarning, match=r"still rose by \d.* nats.*raise max_iterations \(now 2\)"):
        start = tg.initialize(wavy(60), max_iterations=2, **QUIET)
    assert not start.converged and bool(torch.isfinite(start.predict(inputs(3, 1)).probs).all())


def test_a_single_pass_says_nothing_of_the_next():
    with pytest.warns(tg.SamplingWarning, match="still rose, as far as one pass tells, when"):
        tg.initialize(wavy(60), batch_size=10, max_iterations=1, **QUIET)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: tg.initialize(None), TypeError, "Expected a torchgpmc.SparseGP or torchgpmc.GP"),
        (lambda: tg.initialize(gp_regression()), ValueError, "integrates v out exactly.*tg.fit"),
        (lambda: tg.initialize(gp(), batch_size=3), ValueError, "a latent for every datum"),
        (lambda: tg.initialize(sparse_gp(), batch_size=0), ValueError, "batch_size is 0"),
        (lambda: tg.initialize(sparse_gp(), max_iterations=0), ValueError, "max_iterations is 0"),
        (lambda: tg.initialize(sparse_gp(), start=3), TypeError, "start is int. Expected what initialize"),
        (lambda: tg.initialize(gp().with_targets(torch.zeros(2, 6))), ValueError, "several data sets"),
        (lambda: sparse_gp(num_data=3, num_inducing=4), ValueError, "inducing_points has 4 rows and train_x has 3"),
    ],
)
def test_mistakes_are_named(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_coinciding_inducing_points_warn_and_work():
    x = inputs(12)
    with pytest.warns(UserWarning, match="1 of 3 inducing points coincide"):
        model = tg.SparseGP(x, targets("probit", 12), kernel(2), tg.likelihoods.Bernoulli(), inducing_points=x[[0, 0, 1]])
    start = tg.initialize(model, optimize_inducing_points=False, **QUIET)
    assert start.converged and bool(torch.isfinite(start.predict(x).probs).all())


def quick(model, method, start):
    return tg.sample(model, method, start=start, num_samples=2, warmup_steps=2, num_chains=2, **QUIET)


def test_what_cannot_begin_at_a_start_refuses_in_words(start):
    other = sparse_gp("probit", num_data=40, num_inducing=3)
    poisoned = dataclasses.replace(start, theta=torch.tensor([0.0, torch.nan, 0.0]).double())
    for arguments, error, match in (
        ((start.model, tg.Slice(), start), ValueError, "Slice cannot begin at a start"),
        ((start.model, tg.NUTS(whitening=tg.Laplace()), start), ValueError, "white coordinates of its own"),
        ((start.model, tg.NUTS(), "start"), TypeError, "Expected what torchgpmc.initialize"),
        ((other, tg.NUTS(), start), ValueError, "another model.*inducing_points"),
        ((sparse_gp("probit", num_data=40), tg.NUTS(), start), ValueError, "another model"),
        ((start.model, tg.NUTS(), poisoned), ValueError, r"non-finite value of parameter 'kernel.base_kernel.lengthscale'"),
        ((start.model, tg.NUTS(), dataclasses.replace(start, mean=start.mean * torch.inf)), ValueError, "start.mean has NaN"),
    ):
        with pytest.raises(error, match=match):
            quick(*arguments)
    full = gp("probit")
    with pytest.raises(ValueError, match="samples theta alone"):
        quick(full, tg.NUTS(marginal=tg.Laplace()), tg.initialize(full, **QUIET))


def test_a_checkpoint_sees_the_start(start, tmp_path):
    other = dataclasses.replace(start, mean=start.mean + 1e-6)
    settings = {"num_samples": 3, "warmup_steps": 3, "num_chains": 2, "seed": 1, "checkpoint": tmp_path / "run", **QUIET}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = tg.sample(start.model, tg.NUTS(), start=start, **settings)
        assert torch.equal(tg.sample(start.model, tg.NUTS(), start=start, **settings).whitened, first.whitened)
    assert start.digest() in first.info["start"]
    for changed in (other, None):
        with pytest.raises(ValueError, match="start was"):
            tg.sample(start.model, tg.NUTS(), start=changed, **settings)


# --- gpytorch ---------------------------------------------------------------------------------------------------------


class SVGP(gpytorch.models.ApproximateGP):
    """A trained model: its parameters are set, not learned."""

    def __init__(self, strategy=gpytorch.variational.VariationalStrategy, distribution=None, latents=1, batch=False, jitter=1e-6):
        shape = torch.Size([latents] if latents > 1 else [])
        kind = gpytorch.variational.CholeskyVariationalDistribution if distribution is None else distribution
        made = strategy(self, inputs(4, seed=7), kind(4, batch_shape=shape), jitter_val=jitter)
        if latents > 1:
            made = gpytorch.variational.IndependentMultitaskVariationalStrategy(made, num_tasks=latents)
        super().__init__(made)
        self.mean_module = gpytorch.means.ConstantMean(constant_prior=NormalPrior(0.0, 1.0))
        batch_shape = shape if batch else torch.Size([])
        base = RBFKernel(lengthscale_prior=GammaPrior(2.0, 3.0), batch_shape=batch_shape)
        self.covar_module = ScaleKernel(base, outputscale_prior=GammaPrior(2.0, 1.5), batch_shape=batch_shape)
        self.double()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            self.variational_strategy.variational_params_initialized.fill_(1)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def converted(svgp, likelihood=None, **options):
    latents = svgp.variational_strategy.variational_distribution.batch_shape
    name = "softmax" if latents else "probit"
    likelihood = likelihood or (
        tg.likelihoods.Softmax(num_classes=3, mixing_weights=False) if latents else tg.likelihoods.Bernoulli()
    )
    return tg.Start.from_gpytorch(svgp, likelihood, inputs(12), targets(name, 12), **options)


V = gpytorch.variational


@pytest.mark.parametrize(
    "svgp",
    [
        lambda: SVGP(),
        lambda: SVGP(distribution=V.MeanFieldVariationalDistribution),
        lambda: SVGP(V.UnwhitenedVariationalStrategy),
        lambda: SVGP(jitter=1e-5),
        lambda: SVGP(latents=3),
        lambda: SVGP(V.UnwhitenedVariationalStrategy, latents=3),
    ],
    ids=["whitened", "mean field", "unwhitened", "another jitter", "three latents", "three latents, unwhitened"],
)
def test_a_gpytorch_models_predictions_stay_what_they_were(svgp):
    svgp = svgp().eval()
    start, x = converted(svgp), inputs(5, seed=11)
    prediction = start.predict(x)
    with torch.no_grad():
        theirs = svgp(x)
    extra = 0.0 if isinstance(_base(svgp), V.UnwhitenedVariationalStrategy) else _base(svgp).jitter_val
    torch.testing.assert_close(prediction.latent_mean, theirs.mean, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(prediction.latent_variance, theirs.variance - extra, rtol=0.0, atol=1e-6)


def _base(svgp):
    strategy = svgp.variational_strategy
    return getattr(strategy, "base_variational_strategy", strategy)


@pytest.mark.parametrize("strategy", [V.VariationalStrategy, V.UnwhitenedVariationalStrategy], ids=["whitened", "unwhitened"])
def test_another_jitter_keeps_q_of_the_inducing_values(strategy):
    svgp = SVGP(strategy)
    ours, same = converted(svgp, jitter=1e-2), converted(svgp)
    values = []
    for start in (ours, same):
        prior = start.model.prior(start.theta[None])
        root = prior.factor[0] @ start.scale[0]
        values.append((prior.mean[0] + prior.factor[0] @ start.mean[0], root @ root.mT))
    for found, expected in zip(*values, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_gpytorch_models_without_counterpart_are_refused():
    lmc = SVGP(latents=2)
    lmc.variational_strategy = V.LMCVariationalStrategy(_base(lmc), num_tasks=3, num_latents=2, latent_dim=-1)
    for svgp, match in (
        (SVGP(latents=3, batch=True), "a kernel for each latent function"),
        (SVGP(distribution=V.DeltaVariationalDistribution), "has no spread"),
        (lmc, "LMCVariationalStrategy has no counterpart"),
    ):
        with pytest.raises(ValueError, match=match):
            converted(svgp)
    with pytest.raises(TypeError, match=r"Expected a trained gpytorch\.models.ApproximateGP"):
        tg.Start.from_gpytorch(None, None, inputs(3), torch.zeros(3))
    bare = SVGP()
    bare.covar_module = ScaleKernel(RBFKernel()).double()
    with pytest.raises(ValueError, match=r"(?s)2 parameters have no prior.*kernel.outputscale: .*kernel.base_kernel.lengthscale: "):
        converted(bare)


class Scaled(SVGP):
    """Its kernel sees other inputs than its callers'."""

    def forward(self, x):
        return super().forward(2 * x)


def test_a_forward_that_does_more_than_its_parts_is_refused():
    with pytest.raises(ValueError, match=r"Scaled.forward gives is not that of its mean_module and covar_module"):
        converted(Scaled())


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")  # two draws
def test_a_converted_model_samples():
    start = converted(SVGP())
    posterior = quick(start.model, tg.HMC(num_steps=2), start)
    assert posterior.samples["kernel.base_kernel.lengthscale"].shape == (2, 2, 1, 1)
