"""Events in cells: where each is counted, and what cannot be."""

import numpy as np
import pytest
import torch

import torchgpmc as tg


def test_counts_equal_numpys_in_two_dimensions():
    points = torch.rand(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.tensor([3.0, 1.0]) - 1
    window = torch.tensor([[-1.0, 2.0], [-1.0, 0.0]])
    centres, counts, area = tg.bin_events(points, window, (4, 5))
    expected, *edges = np.histogram2d(*points.numpy().T, bins=(4, 5), range=window.tolist())
    np.testing.assert_array_equal(counts.view(4, 5).numpy(), expected)
    middles = np.meshgrid(*[(edge[1:] + edge[:-1]) / 2 for edge in edges], indexing="ij")
    np.testing.assert_allclose(centres.view(4, 5, 2).numpy(), np.stack(middles, -1), atol=1e-12)
    assert area.shape == () and float(area) == pytest.approx(3 / 20)
    assert centres.dtype == counts.dtype == area.dtype == torch.float64


def test_edges_belong_to_the_cell_above_and_the_last_to_the_last():
    points = torch.tensor([0.0, 0.25, 0.5, 1.0, 1.0])
    assert tg.bin_events(points, (0, 1), 4).counts.tolist() == [1, 1, 1, 2]
    assert tg.bin_events(points.unsqueeze(-1), [[0, 1]], (4,)).counts.tolist() == [1, 1, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_edge_is_in_its_own_cell(dtype):
    """At i / 100 a division by the width puts four in the cell below."""
    for low, high in ((0.0, 1.0), (-1.0, 2.0)):
        edges = torch.tensor([low + i * (high - low) / 100 for i in range(100)], dtype=dtype)
        assert bool((tg.bin_events(edges, (low, high), 100).counts == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("linspace", [torch.linspace, lambda *ends, dtype: torch.as_tensor(np.linspace(*ends)).to(dtype)])
def test_edges_by_linspace_are_in_their_own_cells(linspace, dtype):
    """Many are a unit in the last place below low + i (high - low) / cells, and were counted a cell down."""
    for low, high, cells in ((-4.2, -2.6, 184), (0.0, 0.7, 37), (1851.2026, 1962.2, 111), (-1e-3, 3.0, 97), (-2.6, -1.5, 110)):
        counts = tg.bin_events(linspace(low, high, cells + 1, dtype=dtype), (low, high), cells).counts
        assert counts.tolist() == [1.0] * (cells - 1) + [2.0]
    # What is farther from an edge than rounding is where it is.
    below = torch.tensor([0.25 - 16 * torch.finfo(dtype).eps], dtype=dtype)
    assert tg.bin_events(below, (0.0, 1.0), 4).counts.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_ends_keep_the_precision_of_the_points():
    dates = torch.tensor([1851.20260095825, 1900.0, 1962.2], dtype=torch.float64)
    binned = tg.bin_events(dates, (float(dates[0]), float(dates[-1])), 2)
    assert binned.counts.tolist() == [2.0, 1.0]
    assert float(binned.area) == pytest.approx(float(dates[-1] - dates[0]) / 2, rel=1e-15)


def test_no_events_are_counts_of_zero():
    binned = tg.bin_events(torch.zeros(0, 3), [[0, 1], [0, 2], [0, 3]], 2)
    assert binned.counts.tolist() == [0.0] * 8 and float(binned.area) == pytest.approx(6 / 8)


@pytest.mark.parametrize(
    ("points", "window", "shape", "match"),
    [
        (torch.tensor([0.5, 1.5, -0.1]), (0, 1), 4, r"2 of 3 events lie outside the window, the first in row 1: \[1.5\]"),
        (torch.tensor([0.5, torch.nan]), (0, 1), 4, "NaN or infinite"),
        (torch.rand(3, 2), (0, 1), 4, r"window has shape \(1, 2\) and points have 2 columns. Expected \(2, 2\)"),
        (torch.rand(3), (1, 0), 4, "Expected finite ends, the lower one below"),
        (torch.rand(3), (0, 1), 0, "shape is 0. Expected whole numbers of at least 1"),
        (torch.rand(3, 2), [[0, 1], [0, 1]], (4,), "one for each of 2 dimensions"),
        (torch.rand(3, 2, 2), (0, 1), 4, r"Expected \(N, d\)"),
    ],
)
def test_mistakes_are_named(points, window, shape, match):
    with pytest.raises(ValueError, match=match):
        tg.bin_events(points, window, shape)


def test_arrays_and_lists_are_binned_as_tensors_are():
    expected = tg.bin_events(torch.tensor([0.1, 0.6, 0.7]).double(), (0, 1), 4)
    for points, window, shape in (
        ([0.1, 0.6, 0.7], [0, 1], [np.int64(4)]),
        (np.array([0.1, 0.6, 0.7]), np.array([0.0, 1.0]), np.int64(4)),
    ):
        found = tg.bin_events(points, window, shape)
        assert torch.equal(found.counts, expected.counts) and torch.equal(found.centres, expected.centres)


def test_what_is_no_number_is_said():
    with pytest.raises(ValueError, match=r"shape is 2.5. Expected whole numbers"):
        tg.bin_events([0.5], (0, 1), 2.5)
    with pytest.raises(TypeError, match=r"window is NoneType None. Expected numbers"):
        tg.bin_events([0.5], None, 4)
    with pytest.raises(TypeError, match=r"exposure is str 'a'. Expected numbers"):
        tg.likelihoods.Poisson(exposure="a")
