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
