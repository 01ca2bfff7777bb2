"""Short searches from several beginnings: which goes on, what is left out, and what is said of it."""

import math

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from tqdm.auto import tqdm

import torchgpmc as tg
from tests.problems import gp, sparse_gp
from torchgpmc.calls.engines import candidates
from torchgpmc.variational import searches
from torchgpmc.variational.bound import inducing_positions
from torchgpmc.variational.searches import Found, best_beginning, search

QUIET_BAR = tqdm(disable=True)
STILL = {"optimize_inducing_points": False, "progress": False}


def waves(seed, num_data=200):
    """Labels of a sum of waves along three columns, of which eight inducing points resolve one or another."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_data, 3, generator=generator, dtype=torch.float64)
    f = torch.sin(3 * x) @ torch.linspace(1.0, 1.5, 3, dtype=torch.float64)
    y = (f + 0.2 * torch.randn(num_data, generator=generator, dtype=torch.float64) > 0).double()
    base = RBFKernel(ard_num_dims=3, lengthscale_prior=GammaPrior(1.1, 1.0))
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(1.1, 1.0))
    return tg.SparseGP(x, y, kernel, tg.likelihoods.Bernoulli(), inducing_points=x[:8])


def objective(start):
    return start.elbo + float(start.model.layout.log_prior(start.theta[None]))


def end_from(model, theta):
    """Where a search from theta alone ends."""
    return search(model, inducing_positions(model, False), theta, None, 200, QUIET_BAR).value


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_fit_ends_no_lower_than_a_search_from_the_present_values(seed):
    """With the beginning of the highest bound alone it ended five to sixteen nats below."""
    model = waves(seed)
    present = end_from(model, model.layout.present(model)[0])
    assert objective(tg.initialize(model, **STILL)) > present - 0.01
    assert objective(tg.initialize(model, num_starts=1, **STILL)) < present - 1


def test_which_beginnings_there_are_depends_on_the_seed_alone():
    model = waves(0)
    first, again, other = (tg.initialize(model, seed=seed, **STILL) for seed in (0, 0, 1))
    assert first.digest() == again.digest() and first.tried == again.tried != other.tried
    assert len(first.tried) == 3 and "the best of 3 beginnings, " in repr(first)
    more = tg.initialize(model, num_starts=5, **STILL)
    assert more.tried[:3] == first.tried and len(more.tried) == 5


def test_the_users_modules_stay_as_they_are():
    model = waves(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tg.initialize(model, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class BreaksWhereLong(RBFKernel):
    """Not a number at lengthscales above five."""

    def forward(self, x1, x2, diag=False, **parameters):
        broken = torch.where(self.lengthscale.amax(-1, keepdim=True) > 5, torch.nan, 1.0)
        return super().forward(x1, x2, diag=diag, **parameters) * (broken.squeeze(-1) if diag else broken)


def breaking(seed=0):
    like = waves(seed)
    base = BreaksWhereLong(ard_num_dims=3, lengthscale_prior=GammaPrior(1.1, 1.0))
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(1.1, 1.0))
    return tg.SparseGP(like.train_x, like.train_y, kernel, like.likelihood, inducing_points=like.inducing_points)


def test_a_beginning_that_fails_is_left_out_and_counted():
    model = breaking()
    model.kernel.base_kernel.lengthscale = 6.0
    start = tg.initialize(model, **STILL)
    assert [math.isnan(value) for value in start.tried] == [False, True, False]
    assert "the best of 3 beginnings, of which 1 failed, " in repr(start)
    assert start.converged and math.isfinite(start.elbo)
    assert objective(start) >= max(start.tried[0], start.tried[2])


def failed(model, positions, position, sites, max_iterations, bar):
    return Found(position * math.nan, sites, math.nan, math.nan)


def test_a_fit_goes_on_where_the_bound_is_highest_if_all_short_searches_fail(monkeypatch):
    model = waves(0)
    alone = best_beginning(model, 1, 0, QUIET_BAR)
    monkeypatch.setattr(searches, "search", failed)
    begun = best_beginning(model, 3, 0, QUIET_BAR)
    assert torch.equal(begun.theta, alone.theta) and begun.sites is None
    assert len(begun.tried) == 3 and all(map(math.isnan, begun.tried))


def test_a_bound_that_is_finite_nowhere_is_refused(monkeypatch):
    model = breaking()
    model.kernel.base_kernel.lengthscale = 6.0
    long = torch.full((8, 4), 2.0, dtype=torch.float64)
    monkeypatch.setattr(type(model.layout), "starting_points", lambda layout, count, generator: long[:count])
    with pytest.raises(ValueError, match="not finite at the model's hyperparameters, nor at 8 draws from their prior"):
        tg.initialize(model, **STILL)


def test_of_many_data_short_searches_see_some(monkeypatch):
    model = waves(0)
    monkeypatch.setattr(searches, "_MOST_DATA", 80)
    seen = []
    monkeypatch.setattr(searches, "search", lambda model, *rest: seen.append(len(model.train_x)) or search(model, *rest))
    begun = best_beginning(model, 3, 0, QUIET_BAR)
    assert seen == [80] * 3 and begun.sites is None  # sites are those of 80 data
    assert objective(tg.initialize(model, **STILL)) > end_from(model, model.layout.present(model)[0]) - 0.01
    seen.clear()
    full = gp("probit")
    monkeypatch.setattr(searches, "_MOST_DATA", 3)
    assert best_beginning(full, 2, 0, QUIET_BAR).sites is not None and seen == [len(full.train_x)] * 2


def test_where_there_is_one_beginning_more_are_refused():
    model = waves(0)
    start = tg.initialize(model, num_starts=1, **STILL)
    assert start.tried == () and "beginnings" not in repr(start)
    for options in ({"batch_size": 50}, {"start": start}):
        with pytest.raises(ValueError, match=f"num_starts is 2, and with {next(iter(options))} there is one beginning"):
            tg.initialize(start.model, num_starts=2, **options, **STILL)
    assert tg.initialize(start.model, start=start, **STILL).tried == ()
    with pytest.raises(ValueError, match="num_starts is 0"):
        tg.initialize(model, num_starts=0)
    fixed = sparse_gp("probit")
    fixed.kernel.requires_grad_(False)
    fixed.mean.requires_grad_(False)
    fixed.likelihood.requires_grad_(False)
    assert tg.initialize(fixed, **STILL).tried == ()


def test_chains_of_the_default_call_begin_around_the_best_of_several():
    many = tg.SparseGP(
        torch.cat([waves(0).train_x] * 6, 1),
        waves(0).train_y,
        RBFKernel(ard_num_dims=18, lengthscale_prior=GammaPrior(1.1, 1.0)),
        tg.likelihoods.Bernoulli(),
        inducing_points=torch.cat([waves(0).inducing_points] * 6, 1),
    )
    starts = [engine.start() for engine in candidates(many)]
    assert [len(start.tried) for start in starts if start is not None] == [3]
