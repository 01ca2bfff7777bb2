import gpytorch
import numpy as np
import pytest
import scipy.stats
import torch

import torchgpmc as tg
from tests.problems import LIKELIHOODS, fixed_kernel, gp, inputs, targets
from tests.speed import quick
from tests.test_posterior import posterior_of
from torchgpmc import plots, scores
from torchgpmc.plots.probabilities import _binned
from torchgpmc.storage.draws import Draws


def title_of(figure):
    """The figure's, without ``get_suptitle``, which matplotlib 3.7 lacks."""
    return "" if figure._suptitle is None else figure._suptitle.get_text()


@pytest.mark.slow
@pytest.mark.parametrize("draw", [plots.plot_trace, plots.plot_pair])
def test_plots_of_hyperparameters_write_files(draw, tmp_path):
    posterior = posterior_of(gp("probit"), draws=30)
    posterior.stats["diverging"] = torch.zeros(2, 30, dtype=torch.bool)
    posterior.stats["diverging"][0, 3] = True
    figure = draw(posterior)
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000
    assert len(figure.axes) >= 6


@pytest.mark.parametrize("draw", [plots.plot_trace, plots.plot_pair])
def test_draws_of_no_weight_do_not_decide_the_axes(draw):
    posterior = posterior_of(gp("probit"), torch.zeros(2, 30).double(), draws=30)
    values = posterior.samples["kernel.outputscale"]
    values[1, 3], posterior.log_weights[1, 3] = 1e6, -20.0
    figure = draw(posterior, ["kernel.outputscale"])
    drawn = figure.axes[-1].patches if draw is plots.plot_trace else figure.axes[0].patches
    assert max(patch.get_path().vertices[:, 0].max() for patch in drawn) < 1e3
    if draw is plots.plot_trace:
        assert [len(dots.get_offsets()) for dots in figure.axes[0].collections] == [30, 29]


@pytest.mark.parametrize("draw", [plots.plot_trace, plots.plot_pair, plots.plot_forest])
def test_without_hyperparameters_there_is_nothing_to_plot(draw):
    posterior = posterior_of(gp("probit"))
    posterior.samples.clear()
    with pytest.raises(ValueError, match=r"every hyperparameter of the model is fixed.*plot_fit"):
        draw(posterior)


def test_calibration_curve_has_a_line_a_method():
    probabilities = torch.linspace(0.01, 0.99, 200)
    labels = (torch.rand(200, generator=torch.Generator().manual_seed(0)) < probabilities).int()
    axis = plots.plot_calibration({"a": probabilities.numpy(), "b": probabilities.square()}, labels.numpy()).axes[0]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a", "b"]


def test_abstention_has_a_line_a_method_in_either_score():
    curves = scores.abstention_curves(torch.tensor([0.9, 0.6, 0.2, 0.1]), torch.tensor([1, 0, 0, 1]))
    figure = plots.plot_abstention({"a": curves, "b": curves})
    assert [axis.get_ylabel() for axis in figure.axes] == ["accuracy", "auc"]
    for axis, score in zip(figure.axes, (curves.accuracy, curves.auc), strict=True):
        assert len(axis.lines) == 2
        np.testing.assert_array_equal(axis.lines[1].get_ydata(), score.numpy())


def test_calibration_counts_and_intervals():
    predicted, observed, counts = _binned(np.array([0.1, 0.2, 0.2, 0.2, 0.9, 0.8]), np.array([0, 0, 1, 1, 1, 0]), 3)
    assert counts.sum() == 6 and float(observed @ counts) == pytest.approx(3)
    assert float(predicted @ counts) == pytest.approx(2.4)
    figure = plots.plot_calibration({"a": torch.full((10,), 0.3)}, torch.tensor([1] * 4 + [0] * 6))
    points, _, (bar,) = figure.axes[0].containers[0]
    assert points.get_xydata().tolist() == [[pytest.approx(0.3), pytest.approx(0.4)]]
    ends = scipy.stats.binomtest(4, 10).proportion_ci(0.9, "wilson")
    assert bar.get_segments()[0][:, 1].tolist() == [pytest.approx(ends.low), pytest.approx(ends.high)]
    assert max(patch.get_path().vertices[:, 1].max() for patch in figure.axes[1].patches) == 10


def test_a_forest_shows_weighted_quantiles():
    posterior = posterior_of(gp("probit"), torch.full((2, 30), -torch.inf).double(), draws=30)
    posterior.log_weights[0, :20] = 0.0  # the others weigh nothing
    values = posterior.samples["kernel.outputscale"][0, :20].flatten().sort().values
    axis = plots.plot_forest(posterior, ["kernel.outputscale"]).axes[0]
    whole, middle = axis.lines[0].get_xdata(), axis.lines[2].get_xdata()
    assert list(whole) == [float(values[0]), float(values[18])] and list(middle) == [float(values[9])]
    assert axis.get_xscale() == "log"
    plain = posterior_of(gp("probit"), draws=30)
    axis = plots.plot_forest(plain, ["kernel.outputscale"]).axes[0]
    assert axis.lines[2].get_xdata()[0] == pytest.approx(float(plain.samples["kernel.outputscale"].quantile(0.5)))


def weighted_posterior(collapsed):
    log_weights = torch.linspace(-3, 1, 60, dtype=torch.float64).view(2, 30).clone()
    if collapsed:
        log_weights[1, 4] = 60.0
    return posterior_of(gp("probit"), log_weights, draws=30)


def dots(axis):
    return [patch for patch in axis.collections if len(patch.get_offsets())]


@pytest.mark.slow
@pytest.mark.parametrize("draw", [plots.plot_trace, plots.plot_pair])
def test_plots_of_weighted_draws_show_weights_and_say_the_effective_size(draw, tmp_path):
    posterior = weighted_posterior(collapsed=False)
    figure = draw(posterior)
    figure.savefig(tmp_path / "figure.png")
    assert "60 weighted draws, effective size 28" in title_of(figure)
    shown = [group for axis in figure.axes for group in dots(axis)]
    areas = torch.cat([torch.as_tensor(group.get_sizes()) for group in shown[: 2 if draw is plots.plot_trace else 1]])
    weights = torch.softmax(posterior.log_weights.flatten(), 0)
    torch.testing.assert_close(areas / areas.sum(), weights)
    assert title_of(draw(posterior_of(gp("probit"), draws=30))) == ""


def test_histograms_add_up_weights():
    posterior = weighted_posterior(collapsed=False)
    weights = 60 * torch.softmax(posterior.log_weights.flatten(), 0)
    values = posterior.samples["kernel.outputscale"]
    for figure, parts in ((plots.plot_trace(posterior), [0, 1]), (plots.plot_pair(posterior), [slice(None)])):
        axis = figure.axes[1] if len(parts) == 2 else figure.axes[0]
        for patch, rows in zip(axis.patches, parts, strict=True):
            heights = torch.as_tensor(patch.get_path().vertices[:, 1])
            part = values[rows].flatten() if len(parts) == 2 else values.flatten().log10()
            expected, _ = torch.histogram(part, 40, weight=weights.view(2, 30)[rows].flatten())
            torch.testing.assert_close(heights.max(), expected.max(), rtol=1e-6, atol=0)


@pytest.mark.slow
def test_a_draw_that_carries_all_the_weight_looks_alone():
    figure = plots.plot_trace(weighted_posterior(collapsed=True))
    assert "effective size 1" in title_of(figure)
    (only,) = dots(figure.axes[0])
    assert only.get_offsets()[:, 0].tolist() == [4]


def intensity_of(x, draws=5):
    model = tg.GP(x, torch.ones(len(x)), fixed_kernel(), tg.likelihoods.Poisson())
    return posterior_of(model, draws=draws).predict(x).intensity


def test_an_intensity_in_one_dimension_has_bands_around_its_mean(tmp_path):
    events = torch.rand(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    binned = tg.bin_events(events, (0, 1), 10)
    intensity = intensity_of(binned.centres.flip(0))
    figure = plots.plot_intensity(intensity, binned.centres.flip(0), events=events, binned=binned)
    figure.savefig(tmp_path / "figure.png")
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["counts", "95% band", "50% band", "mean", "events"]
    mean = next(line for line in axis.lines if line.get_label() == "mean")
    torch.testing.assert_close(torch.as_tensor(mean.get_ydata()), intensity.mean.flip(0))  # in the order of the inputs
    wide, narrow = (band.get_paths()[0].get_extents() for band in axis.collections)
    assert wide.ymax > narrow.ymax and wide.ymin < narrow.ymin


@pytest.mark.slow
def test_an_intensity_in_two_dimensions_is_three_maps_the_right_way_round(tmp_path):
    x = torch.cartesian_prod(torch.linspace(0, 1, 3), torch.linspace(0, 2, 4)).double().flip(0)
    intensity = intensity_of(x)
    figure = plots.plot_intensity(intensity, x, events=torch.rand(5, 2))
    figure.savefig(tmp_path / "figure.png")
    assert [axis.get_title() for axis in figure.axes[:3]] == ["0.025 quantile", "mean", "0.975 quantile"]
    image = torch.as_tensor(figure.axes[1].collections[0].get_array()).view(4, 3)
    for place, value in zip(x, intensity.mean, strict=True):
        assert float(image[(place[1] * 1.5).round().long(), (place[0] * 2).round().long()]) == pytest.approx(float(value))
    with pytest.raises(ValueError, match="Expected all points of a grid"):
        plots.plot_intensity(intensity_of(x[:5]), x[:5])
    with pytest.raises(ValueError, match="x has 3 columns"):
        plots.plot_intensity(intensity, torch.rand(12, 3))


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")  # a few draws
@pytest.mark.parametrize(
    ("likelihood", "columns", "axes", "curve"),
    quick(
        [("probit", 1, 1, "probability of class 1")],
        [("gaussian", 1, 1, "mean"), ("probit", 1, 1, "probability of class 1"), ("probit", 2, 5, "")],
    ),
)
def test_a_fit_is_a_curve_with_bands_or_a_surface_and_two_maps(likelihood, columns, axes, curve, tmp_path):
    kernel = gpytorch.kernels.RBFKernel().requires_grad_(False)
    x = inputs(12)[:, :columns]
    model = tg.GP(x, targets(likelihood, 12), kernel, LIKELIHOODS[likelihood]().requires_grad_(False))
    posterior = tg.sample(model, tg.EllipticalSlice(), num_samples=20, warmup_steps=5, num_chains=1, seed=0, progress=False)
    figure = plots.plot_fit(posterior, num_points=15)
    figure.savefig(tmp_path / "fit.png")
    assert len(figure.axes) == axes  # colour bars count
    labels = [text.get_text() for axis in figure.axes if axis.get_legend() for text in axis.get_legend().get_texts()]
    assert curve in labels or not curve
    assert ("95% band" in labels) == (likelihood == "gaussian")


def test_a_fit_over_three_columns_has_no_picture():
    kernel = gpytorch.kernels.RBFKernel().requires_grad_(False)
    model = tg.GP(torch.rand(4, 3), targets("probit", 4), kernel, LIKELIHOODS["probit"]())
    with pytest.raises(ValueError, match=r"has 3 input columns. Expected one or two"):
        plots.plot_fit(tg.Posterior(model, Draws(torch.zeros(1, 2, 0), torch.zeros(1, 2, 4), None), {"lp": torch.zeros(1, 2)}, {}))


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")  # a few draws
@pytest.mark.parametrize("columns", [1, 2])
def test_a_fit_of_counts_with_exposures_of_their_own_is_of_the_rate(columns):
    # It was an error that asked for exposures of test points, which plot_fit takes none of.
    exposure = torch.linspace(0.5, 20, 12).double()
    model = tg.GP(inputs(12)[:, :columns], targets("poisson", 12), fixed_kernel(), tg.likelihoods.Poisson(exposure=exposure))
    posterior = tg.sample(model, tg.EllipticalSlice(), num_samples=20, warmup_steps=5, num_chains=1, seed=0, progress=False)
    figure = plots.plot_fit(posterior, num_points=15)
    if columns == 2:
        maps = [axis for axis in figure.axes if axis.get_title() in ("rate", "deviation of f") and axis.name != "3d"]
        for axis in maps:
            assert torch.equal(torch.as_tensor(axis.collections[1].get_array()), model.train_y / exposure)
        assert len(maps) == 2
        return
    curve, dots = figure.axes[0].lines
    assert (curve.get_label(), dots.get_label()) == ("rate", "data")
    at = torch.as_tensor(curve.get_xdata())
    torch.testing.assert_close(torch.as_tensor(curve.get_ydata()), posterior.predict(at).intensity.mean)
    assert torch.equal(torch.as_tensor(dots.get_ydata()), model.train_y / exposure)


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")  # a few draws
def test_a_fit_over_two_columns_has_the_first_of_two_functions():
    # Of noise with a latent size the deviation of f had two columns, which were no map.
    model = tg.GP(inputs(12)[:, :2], targets("gaussian", 12), fixed_kernel(), tg.likelihoods.HeteroskedasticGaussian())
    posterior = tg.sample(model, tg.EllipticalSlice(), num_samples=20, warmup_steps=5, num_chains=1, seed=0, progress=False)
    figure = plots.plot_fit(posterior, num_points=10)
    axis = next(axis for axis in figure.axes if axis.get_title() == "deviation of f")
    image = torch.as_tensor(axis.collections[0].get_array()).view(10, 10).T
    x = posterior.model.train_x
    lines = [torch.linspace(float(column.min()), float(column.max()), 10).double() for column in x.unbind(-1)]
    expected = posterior.predict(torch.cartesian_prod(*lines)).latent_variance[:, 0].sqrt()
    torch.testing.assert_close(image.flatten(), expected)


@pytest.mark.parametrize("likelihood", ["softmax", "ordinal"])
def test_a_fit_of_classes_is_refused_before_it_is_predicted(likelihood, monkeypatch):
    # Of four classes over two columns it took 20 seconds to say so.
    posterior, asked = posterior_of(gp(likelihood)), []
    predict = tg.Posterior.predict
    monkeypatch.setattr(tg.Posterior, "predict", lambda *all, **options: asked.append(len(all[1])) or predict(*all, **options))
    with pytest.raises(ValueError, match=r"one of [34] classes. Expected one number"):
        plots.plot_fit(posterior)
    assert asked == [1]
