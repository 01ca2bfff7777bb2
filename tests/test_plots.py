import pytest
import torch

from tests.problems import gp
from tests.test_posterior import posterior_of
from torchgpmc import plots


@pytest.mark.parametrize("draw", [plots.plot_trace, plots.plot_pair])
def test_plots_of_hyperparameters_write_files(draw, tmp_path):
    posterior = posterior_of(gp("probit"), draws=30)
    posterior.stats["diverging"] = torch.zeros(2, 30, dtype=torch.bool)
    posterior.stats["diverging"][0, 3] = True
    figure = draw(posterior)
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000
    assert len(figure.axes) >= 6


def test_calibration_curve_has_a_line_a_method():
    probabilities = torch.linspace(0.01, 0.99, 200)
    labels = (torch.rand(200, generator=torch.Generator().manual_seed(0)) < probabilities).int()
    axis = plots.plot_calibration({"a": probabilities, "b": probabilities.square()}, labels).axes[0]
    assert [line.get_label() for line in axis.lines[1:]] == ["a", "b"]


def weighted_posterior(collapsed):
    log_weights = torch.linspace(-3, 1, 60, dtype=torch.float64).view(2, 30).clone()
    if collapsed:
        log_weights[1, 4] = 60.0
    return posterior_of(gp("probit"), log_weights, draws=30)


def dots(axis):
    return [patch for patch in axis.collections if len(patch.get_offsets())]


@pytest.mark.parametrize("draw", [plots.plot_trace, plots.plot_pair])
def test_plots_of_weighted_draws_show_weights_and_say_the_effective_size(draw, tmp_path):
    posterior = weighted_posterior(collapsed=False)
    figure = draw(posterior)
    figure.savefig(tmp_path / "figure.png")
    assert "60 weighted draws, effective size 28" in figure.get_suptitle()
    shown = [group for axis in figure.axes for group in dots(axis)]
    areas = torch.cat([torch.as_tensor(group.get_sizes()) for group in shown[: 2 if draw is plots.plot_trace else 1]])
    weights = torch.softmax(posterior.log_weights.flatten(), 0)
    torch.testing.assert_close(areas / areas.sum(), weights)
    assert draw(posterior_of(gp("probit"), draws=30)).get_suptitle() == ""


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


def test_a_draw_that_carries_all_the_weight_looks_alone():
    figure = plots.plot_trace(weighted_posterior(collapsed=True))
    assert "effective size 1" in figure.get_suptitle()
    first, second = dots(figure.axes[0])
    assert first.get_sizes().max() < 1e-6 and second.get_sizes().argmax() == 4 and (second.get_sizes() > 1e-6).sum() == 1
