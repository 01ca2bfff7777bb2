"""sample_density: closed-form moments, checkpoints, and starts or densities that cannot serve."""

import math
import warnings

import pytest
import torch

import torchgpmc as tg
from tests.calibration import worst_excess
from tests.speed import quick
from tests.test_loop import Stop
from torchgpmc.runs.chain import ChainRun
from torchgpmc.samplers import MassMatrix

F64 = torch.float64
OPTIONS = {"num_samples": 5, "warmup_steps": 20, "seed": 4, "progress": False}
METHODS = [
    tg.NUTS(max_tree_depth=4),
    tg.HMC(num_steps=3, mass_matrix=MassMatrix.DENSE),
    tg.ChEES(max_steps=8),
    tg.AdaptiveMH(),
    tg.Slice(),
]
quiet = pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")


def skewed(position):
    """x of a log-gamma density of shape 2, y normal about x with sd 1/2: means digamma(2), variances trigamma(2) and that + 1/4."""
    x, y = position.unbind(-1)
    return 2 * x - x.exp() - 0.5 * ((y - x) / 0.5).square()


MEAN = 1 - 0.5772156649015329
VARIANCE = math.pi**2 / 6 - 1


def start(chains=10, seed=1):
    return torch.randn(chains, 2, dtype=F64, generator=torch.Generator().manual_seed(seed))


@quiet
@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("method", [tg.NUTS(), tg.HMC(num_steps=6), tg.ChEES(), tg.AdaptiveMH(thinning=5), tg.Slice()])
def test_moments_of_a_skewed_density(method):
    options = {"num_samples": 12, "warmup_steps": 100, "seed": 3, "progress": False}
    position = tg.sample_density(skewed, start(500), method, **options).position
    x, y = (position - MEAN).unbind(-1)
    moments = torch.stack([x, y, x.square(), y.square(), x * y], -1).mean(1)  # chains are independent replicates
    expected = torch.tensor([0.0, 0.0, VARIANCE, VARIANCE + 0.25, VARIANCE])
    assert worst_excess(moments, expected) < 1
    assert worst_excess(moments, 1.4 * expected) > 1  # and it would see two fifths too much


@pytest.mark.slow
def test_draws_summary_and_arviz():
    options = {"num_samples": 500, "warmup_steps": 150, "seed": 0, "progress": False}
    draws = tg.sample_density(lambda x: -0.5 * x.square().sum(-1), torch.zeros(4, 3), tg.HMC(), **options)
    assert draws.position.shape == (4, 500, 3) and draws.position.dtype == torch.float32 and draws.complaints() == []
    assert all(value.shape == (4, 500) for value in draws.stats.values())
    torch.testing.assert_close(draws.stats["lp"], -0.5 * draws.position.square().sum(-1))
    assert [row.name for row in draws.summary().rows] == ["position[0]", "position[1]", "position[2]", "lp"]
    assert draws.info["target"] == "the given density" and draws.info["num_evaluations"] > 0
    tree = draws.to_arviz()
    assert tree["posterior"]["position"].shape == (4, 500, 3) and "lp" in tree["sample_stats"]


@quiet
@pytest.mark.parametrize("method", quick([tg.AdaptiveMH()], METHODS), ids=lambda method: type(method).__name__)
def test_runs_repeat_and_resume_to_the_same_bits(method, tmp_path, monkeypatch):
    plain = tg.sample_density(skewed, start(), method, **OPTIONS)
    advance = ChainRun.advance
    for advances in (3, 22):
        checkpoint = tg.Checkpoint(tmp_path / f"{advances}.ckpt", every=1)

        def dying(self, state, generator, last=advances):
            if state.iteration == last:
                raise Stop
            return advance(self, state, generator)

        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(ChainRun, "advance", dying)
            tg.sample_density(skewed, start(), method, **OPTIONS, checkpoint=checkpoint)
        resumed = tg.sample_density(skewed, start(), method, **OPTIONS, checkpoint=checkpoint)
        assert torch.equal(resumed.position, plain.position)
        assert all(torch.equal(resumed.stats[name], value) for name, value in plain.stats.items())


@quiet
def test_a_checkpoint_of_another_density_start_or_method_is_refused(tmp_path):
    options = {**OPTIONS, "checkpoint": tmp_path / "run.ckpt"}
    tg.sample_density(skewed, start(), tg.Slice(), **options)
    for density, begin, method, named in (
        (lambda x: 1.01 * skewed(x), start(), tg.Slice(), "log density"),
        (skewed, start(seed=2), tg.Slice(), "start"),
        (skewed, start(9), tg.Slice(), "num_chains"),
        (skewed, start(), tg.Slice(max_steps_out=2), "method"),
    ):
        with pytest.raises(ValueError, match=rf"belongs to another run: .*{named}"):
            tg.sample_density(density, begin, method, **options)


@quiet
def test_the_edge_of_a_support_is_no_failure():
    density = lambda x: torch.where((x > 0).all(-1), -x.sum(-1), -torch.inf)  # noqa: E731
    draws = tg.sample_density(density, torch.ones(4, 2, dtype=F64), tg.Slice(), **OPTIONS)
    assert float(draws.stats["n_failures"].sum()) > 0 and not any("failed" in complaint for complaint in draws.complaints())


@quiet
def test_one_start_serves_all_chains_and_nuts_is_the_default():
    draws = tg.sample_density(skewed, torch.zeros(2, dtype=F64), num_chains=3, **OPTIONS)
    assert draws.info["method"] == repr(tg.NUTS())
    assert draws.position.shape == (3, 5, 2) and len(draws.position[:, -1].unique(dim=0)) == 3


class Rows(torch.nn.Module):
    """A LogDensity whose chains have data of their own."""

    def __init__(self, centre):
        super().__init__()
        self.centre = centre

    def forward(self, position):
        return self.value_and_grad(position)[0]

    def value_and_grad(self, position):
        away = position - self.centre
        return -0.5 * away.square().sum(-1), -away

    def select(self, rows):
        return Rows(self.centre[rows])


@quiet
def test_a_log_density_with_a_gradient_and_rows_of_its_own():
    centre = torch.tensor([[-50.0], [0.0], [50.0]], dtype=F64)
    draws = tg.sample_density(Rows(centre), centre.clone(), tg.NUTS(), **OPTIONS)
    assert bool(((draws.position.mean(1) - centre).abs() < 5).all())


@pytest.mark.parametrize(
    ("density", "begin", "options", "error", "match"),
    [
        (lambda x: x[:, 0].log() - x[:, 0], torch.tensor([[1.0], [-1.0], [0.5]]), {}, ValueError, r"start of 1 of 3 chains \(1\)"),
        (lambda x: x[:, 0].sqrt() - x[:, 0], torch.tensor([[1.0], [0.0]]), {}, ValueError, r"or its gradient is not finite.*\(1\)"),
        (lambda x: -x.square().sum(), torch.ones(3, 2), {}, ValueError, r"has shape \(\). Expected \(3,\)"),
        (lambda x: -x.square(), torch.ones(3, 2), {}, ValueError, r"has shape \(3, 2\)"),
        (lambda x: -x.square().sum().expand(len(x)), torch.ones(3, 2), {}, ValueError, r"\[-6.0\] beside the others and \[-2.0\]"),
        (lambda x: -x.detach().square().sum(-1), torch.ones(3, 2), {}, ValueError, "has no gradient"),
        (skewed, torch.ones(2), {}, ValueError, r"Expected \(C, D\), one row a chain"),
        (skewed, torch.ones(3, 2), {"num_chains": 4}, ValueError, "num_chains is 4"),
        (skewed, "here", {}, TypeError, "start is str 'here'. Expected numbers"),
        (skewed, torch.ones(3, 2), {"num_samples": 0}, ValueError, "num_samples is 0"),
        (skewed, torch.ones(3, 2), {"seed": -1}, ValueError, "seed is -1"),
        (skewed, torch.ones(3, 2), {"method": tg.AMIS()}, TypeError, "AMIS.*Expected one that needs no Gaussian process"),
        (skewed, torch.ones(3, 2), {"method": tg.EllipticalSlice()}, TypeError, "needs no Gaussian process"),
        (skewed, torch.ones(3, 2), {"method": tg.NUTS}, TypeError, "needs no Gaussian process"),
        (skewed, torch.ones(3, 2), {"method": tg.NUTS(whitening=tg.Laplace())}, ValueError, "whitening is Laplace.*no latents"),
        (skewed, torch.ones(3, 2), {"method": tg.NUTS(noise_variances=True)}, ValueError, "noise_variances is True.*no latents"),
        (skewed, torch.ones(3, 2), {"method": tg.AdaptiveMH(from_mode=True)}, ValueError, "from_mode is True"),
        (skewed, torch.ones(3, 2), {"method": tg.HMC(num_steps=0)}, ValueError, "num_steps is 0"),
    ],
)
def test_what_cannot_be_sampled_is_said_before(density, begin, options, error, match):
    with pytest.raises(error, match=match):
        tg.sample_density(density, begin, **{**OPTIONS, **options})


def test_chains_start_at_arrays_and_lists_too():
    start = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double()
    options = {**OPTIONS, "num_samples": 4, "warmup_steps": 4, "method": tg.HMC(num_steps=2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [tg.sample_density(skewed, begin, **options).position for begin in (start, start.numpy(), [[0, 1], [1, 0]])]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_chains_that_never_move_are_not_to_be_trusted():
    """One start for all and a density that ends around it: R-hat has nothing to compare, and effective sizes were the draws'."""
    begin = torch.ones(2, dtype=F64)
    spike = lambda position: torch.where((position == begin).all(-1), 0.0, -torch.inf).to(F64)  # noqa: E731
    options = {"num_samples": 100, "warmup_steps": 10, "num_chains": 4, "seed": 0, "progress": False}
    with pytest.warns(tg.SamplingWarning, match=r"'position\[0\]' never moved: all draws are the same"):
        draws = tg.sample_density(spike, begin, tg.AdaptiveMH(), **options)
    assert len(draws.position.flatten(0, 1).unique(dim=0)) == 1


@quiet
def test_a_flat_density_whose_lp_is_the_same_everywhere_is_no_standstill():
    box = lambda position: torch.where((position.abs() < 1).all(-1), 0.0, -torch.inf).to(F64)  # noqa: E731
    options = {"num_samples": 300, "warmup_steps": 100, "seed": 0, "progress": False}
    draws = tg.sample_density(box, 0.4 * start(4).tanh(), tg.Slice(), **options)
    assert float(draws.stats["lp"].abs().max()) == 0.0
    assert draws.complaints() == []
