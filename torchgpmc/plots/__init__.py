"""Pictures of a posterior: traces, pairs of hyperparameters, calibration, intensities. Needs the extra ``plots`` (matplotlib)."""

from torchgpmc.plots.hyperparameters import plot_forest, plot_pair, plot_trace
from torchgpmc.plots.over_inputs import plot_fit, plot_intensity
from torchgpmc.plots.probabilities import plot_abstention, plot_calibration

__all__ = ["plot_abstention", "plot_calibration", "plot_fit", "plot_forest", "plot_intensity", "plot_pair", "plot_trace"]
