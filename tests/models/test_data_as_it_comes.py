"""Arrays, frames, lists and columns are taken wherever tensors are, and give the same model; poor scales get a word."""

import warnings

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.priors import GammaPrior, NormalPrior

import torchgpmc as tg
from tests.problems import inputs, kernel

X = inputs(6)
LABELS = [False, True, True, False, True, False]
EIGHT = torch.arange(8) % 2


def frame(x):
    return pytest.importorskip("pandas").DataFrame(x.numpy(), columns=["a", "b"])


@pytest.mark.parametrize(
    ("make_x", "y"),
    [
        (lambda: X.numpy(), np.array(LABELS)),
        (lambda: X.tolist(), LABELS),
        (lambda: list(X), [int(label) for label in LABELS]),
        (lambda: X.numpy().astype(">f8"), np.array(LABELS, dtype=object)),
        (lambda: frame(X), np.array(LABELS, dtype=np.uint8)[:, None]),
        (lambda: X, torch.tensor(LABELS)[:, None]),
        (lambda: X.flip(0).numpy()[::-1], np.array(LABELS[::-1])[::-1]),
        (lambda: X.to_sparse(), np.ma.masked_array(LABELS, mask=False)),
    ],
)
def test_all_kinds_of_numbers_give_the_same_model(make_x, y):
    expected = tg.GP(X, torch.tensor(LABELS).double(), kernel(), tg.likelihoods.Bernoulli())
    model = tg.GP(make_x(), y, kernel(), tg.likelihoods.Bernoulli())
    assert torch.equal(model.train_x, expected.train_x)
    assert torch.equal(model.train_y, expected.train_y)


@pytest.mark.parametrize("make_x", [torch.Tensor.numpy, torch.Tensor.long, torch.Tensor.tolist, frame])
def test_inducing_points_come_from_all_kinds_of_numbers(make_x):
    """Whole numbers have centres that are none."""
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [8.0, 9.0], [9.0, 9.0]])
    points = tg.kmeans_inducing_points(make_x(x), 2)
    torch.testing.assert_close(points[points[:, 0].argsort()].double(), torch.tensor([[0.5, 0.0], [8.5, 9.0]]).double())


def test_a_column_of_one_target_is_that_target():
    """It was one data set of one chain, which sampling refused unless it was told num_chains=1."""
    model = tg.GP(X[:1], [[1]], kernel(), tg.likelihoods.Bernoulli())
    assert model.train_y.shape == (1,) and not model.targets.one_a_chain


def test_a_row_of_targets_is_told_what_else_it_may_be():
    model = tg.GP(X, [LABELS], kernel(), tg.likelihoods.Bernoulli())
    with pytest.raises(ValueError, match=r"Expected num_chains=1, one data set a chain; or train_y of shape \(6,\)"):
        tg.sample(model, progress=False)


def lacking_in_a_frame():
    x = frame(X)
    return x.convert_dtypes().mask(x == x.iloc[2, 1])


@pytest.mark.parametrize("make", [lacking_in_a_frame, lambda: np.ma.masked_equal(X.numpy(), X[2, 1].item())])
def test_what_an_array_lacks_is_not_taken_for_a_number(make):
    with pytest.raises(ValueError, match=r"train_x has 1 NaN or infinite values, the first in row 2, column ('b'|1)\."):
        tg.GP(make(), LABELS, kernel(), tg.likelihoods.Bernoulli())


def test_columns_are_called_by_their_names():
    x = frame(X)
    with pytest.warns(tg.SamplingWarning, match=r"columns \['b'\] are constant"):
        tg.GP(x.assign(b=1.0), LABELS, kernel(), tg.likelihoods.Bernoulli())
    with pytest.warns(tg.SamplingWarning, match=r"deviation of column '[ab]' is .* that of column '[ab]' "):
        tg.GP(x.assign(b=1e5 * x.b), LABELS, kernel(), tg.likelihoods.Bernoulli())
    with pytest.raises(ValueError, match=r"the first in row 0, column 'b'\. .* or the columns that hold nothing else \('b'\)"):
        tg.GP(x.assign(b=np.nan), LABELS, kernel(), tg.likelihoods.Bernoulli())
    with pytest.warns(tg.SamplingWarning, match=r"columns \[1\] are constant"):
        tg.GP(x.assign(b=1.0).to_numpy(), LABELS, kernel(), tg.likelihoods.Bernoulli())


def test_columns_of_a_frame_keep_their_order():
    model = tg.GP(frame(X), LABELS, kernel(), tg.likelihoods.Bernoulli())
    theta, x = torch.zeros(1, model.layout.size, dtype=torch.float64), frame(X[:2])
    for named_alike in (x, x.to_numpy(), x.set_axis([0, 1], axis=1)):
        tg.approximations.predict(model, theta, tg.Laplace(), named_alike)
    with pytest.raises(ValueError, match=r"x has columns \['b', 'a'\] and train_x had \['a', 'b'\]. Expected those, in that order"):
        tg.approximations.predict(model, theta, tg.Laplace(), x[["b", "a"]])


def test_a_frame_of_text_names_its_columns():
    x = frame(X).assign(colour="red")
    with pytest.raises(TypeError, match=r"a DataFrame whose columns \['colour'\] are not numeric. Expected numbers"):
        tg.GP(x, LABELS, kernel(3), tg.likelihoods.Bernoulli())


@pytest.mark.parametrize("kind", ["datetime64[ns]", "timedelta64[ns]"])
def test_dates_and_durations_in_a_frame_are_no_numbers(kind):
    """They were epoch numbers, without a word, beside a column of numbers."""
    x = frame(X).assign(when=np.arange(6).astype(kind))
    for given in (x, x[["when"]]):
        with pytest.raises(TypeError, match=r"columns \['when'\] hold dates or durations. Expected numbers, of days since"):
            tg.GP(given, LABELS, kernel(3), tg.likelihoods.Bernoulli())


def test_a_frame_and_a_series_in_another_order_are_refused():
    pandas = pytest.importorskip("pandas")
    x, y = frame(X), pandas.Series(LABELS)
    with pytest.raises(ValueError, match=r"the same row labels in another order.*train_y.loc\[train_x.index\]"):
        tg.GP(x, y[::-1], kernel(), tg.likelihoods.Bernoulli())
    expected = tg.GP(X, LABELS, kernel(), tg.likelihoods.Bernoulli()).train_y
    for alike in (y, y.set_axis(range(6, 12)), y[::-1].loc[x.index]):
        assert torch.equal(tg.GP(x, alike, kernel(), tg.likelihoods.Bernoulli()).train_y, expected)


def test_a_single_point_is_a_row():
    model = tg.GP(X, LABELS, kernel(), tg.likelihoods.Bernoulli())
    theta = torch.zeros(1, model.layout.size, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"x has 1 columns .* train_x has 2. Expected 2 columns; of one point .* \(1, 2\)"):
        tg.approximations.predict(model, theta, tg.Laplace(), X[0])


@pytest.mark.parametrize("make", [np.array, lambda labels: pytest.importorskip("pandas").Series(labels, dtype="category")])
def test_labels_of_text_are_told_where_to_go(make):
    with pytest.raises(TypeError, match=r"train_y is (ndarray of dtype <U3|Series of dtype category).*GPClassifier takes labels"):
        tg.GP(X, make(["yes", "no"] * 3), kernel(), tg.likelihoods.Bernoulli())


def test_arrays_are_predicted_at_and_scored():
    model = tg.GP(X.numpy(), LABELS, kernel(), tg.likelihoods.Bernoulli())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = tg.sample(model, tg.HMC(num_steps=1), num_samples=4, warmup_steps=2, num_chains=1, progress=False, seed=0)
    from_array, from_tensor = posterior.predict(X.numpy()), posterior.predict(X)
    assert torch.equal(from_array.probs, from_tensor.probs)
    expected = from_tensor.log_prob(torch.tensor(LABELS).double())
    assert torch.equal(from_array.log_prob(LABELS), expected)
    assert torch.equal(from_array.log_prob(np.array(LABELS)[:, None]), expected)


@pytest.mark.parametrize(
    ("scales", "match"),
    [
        ([1.0, 1e4], r"standard deviation of column 0 is 0\..*that of column 1.*standardise"),
        ([0.0, 1.0], r"columns \[0\] are constant"),
    ],
)
def test_columns_that_one_prior_does_not_suit_get_a_word(scales, match):
    with pytest.warns(tg.SamplingWarning, match=match):
        tg.GP(X * torch.tensor(scales).double(), LABELS, kernel(), tg.likelihoods.Bernoulli())


def test_a_density_takes_positions_of_all_kinds_and_says_which_it_cannot():
    model = tg.GP(X, LABELS, kernel(), tg.likelihoods.Bernoulli())
    density, width = tg.joint_log_density(model), model.layout.size + 6
    position = torch.linspace(-1, 1, 2 * width).view(2, width).double()
    assert torch.equal(density(position.numpy()), density(position))
    torch.testing.assert_close(density(position.float()), density(position), atol=1e-4, rtol=1e-4)
    for wrong in (position[0], position[:, 1:]):
        for evaluate in (density, density.value_and_grad):
            with pytest.raises(ValueError, match=rf"position has shape .* Expected \(C, {width}\): in each row"):
                evaluate(wrong)
    with pytest.raises(TypeError, match=r"model is RBFKernel. Expected a torchgpmc.GP"):
        tg.joint_log_density(kernel().base_kernel)


@pytest.mark.parametrize("dtype", ["float32", torch.float16, torch.bfloat16])
def test_data_are_in_a_precision_that_can_be_used(dtype):
    with pytest.raises(ValueError, match=r"data_dtype is .*float.*. Expected torch.float32, or None"):
        tg.SparseGP(X, LABELS, kernel(), tg.likelihoods.Bernoulli(), inducing_points=X[:2], data_dtype=dtype)


def test_numbers_that_the_dtype_cannot_tell_apart_are_named():
    seconds = torch.arange(8) + 1_700_000_000
    for values, dtype in ((2**60 + torch.arange(8), torch.float64), (seconds, torch.float32)):
        with pytest.warns(UserWarning, match=r"train_x: column 0 has 8 distinct values, of which torch.float.. tells 1 apart"):
            tg.GP(values, EIGHT, kernel(1), tg.likelihoods.Bernoulli(), dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tg.GP(seconds, EIGHT, kernel(1), tg.likelihoods.Bernoulli())
        tg.GP(inputs(8, 1), EIGHT, kernel(1), tg.likelihoods.Bernoulli(), dtype=torch.float32)


def test_numbers_that_the_dtype_cannot_hold_are_refused():
    x = inputs(8, 1)
    noise = gpytorch.likelihoods.GaussianLikelihood(noise_prior=GammaPrior(2.0, 3.0))
    with pytest.raises(ValueError, match=r"train_x has numbers up to .*e\+39, and torch.float32 ends at 3.4e\+38"):
        tg.GP(1e39 * (1 + x), EIGHT, kernel(1), tg.likelihoods.Bernoulli(), dtype=torch.float32)
    for scale, dtype in ((1e200, torch.float64), (1e30, torch.float32)):
        with pytest.raises(ValueError, match=r"train_y has numbers up to .*, whose squares torch.float.. cannot hold"):
            tg.GPRegression(x, scale * x[:, 0], kernel(1), noise, dtype=dtype)


def test_inputs_whose_squares_overflow_are_refused_before_anything_is_sampled():
    x, huge = inputs(8, 1), inputs(8, 2) * torch.tensor([1.0, 1e200], dtype=torch.float64)
    likelihood, expected = tg.likelihoods.Bernoulli(), r" has numbers up to .*, whose squares torch.float.. cannot hold. Expected"
    for values, dtype in ((huge, torch.float64), (1e300 * x, torch.float64), (1e30 * x, torch.float32)):
        with pytest.raises(ValueError, match="train_x" + expected):
            tg.GP(values, EIGHT, kernel(values.shape[1]), likelihood, dtype=dtype)
    with pytest.raises(ValueError, match="inducing_points" + expected):
        tg.SparseGP(x, EIGHT, kernel(1), likelihood, inducing_points=1e200 * x[:3])
    with pytest.raises(ValueError, match="train_x" + expected):
        tg.kmeans_inducing_points(huge, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tg.GP(1e100 * x, EIGHT, kernel(1), likelihood)


def test_targets_far_from_zero_under_a_zero_mean_get_a_word():
    x = inputs(8, 1)
    y = 1000 + torch.sin(6 * x[:, 0])
    noise = gpytorch.likelihoods.GaussianLikelihood(noise_prior=GammaPrior(2.0, 3.0))
    with pytest.warns(tg.SamplingWarning, match=r"train_y: the mean is 1e\+03 .* zero on average a priori. Expected targets about"):
        tg.GPRegression(x, y, kernel(1), noise)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean = gpytorch.means.ConstantMean(constant_prior=NormalPrior(1000.0, 10.0))
        tg.GPRegression(x, y, kernel(1), noise, mean=mean)
        tg.GPRegression(x, y - 990, kernel(1), noise)
        tg.GP(x, torch.full((8,), 1000) + EIGHT, kernel(1), tg.likelihoods.Poisson())


def test_autocast_is_refused_where_it_would_halve_the_precision():
    """Draws of float32 models changed under it without a word; float64 it leaves alone."""
    x = inputs(8, 1)
    single = tg.GP(x, EIGHT, kernel(1), tg.likelihoods.Bernoulli(), dtype=torch.float32)
    double = tg.GP(x, EIGHT, kernel(1), tg.likelihoods.Bernoulli())
    mixed = tg.SparseGP(x, EIGHT, kernel(1), tg.likelihoods.Bernoulli(), inducing_points=x[:3], data_dtype=torch.float32)
    options = {"num_samples": 4, "warmup_steps": 4, "num_chains": 2, "seed": 0, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tg.SamplingWarning)
        drawn = tg.sample(single, tg.Slice(), **options)
        expected = tg.sample(double, tg.Slice(), **options).theta
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for call in (
                lambda: tg.sample(single, tg.Slice(), **options),
                lambda: drawn.predict(x),
                lambda: tg.sample(mixed, tg.Slice(), **options),
            ):
                with pytest.raises(ValueError, match=r"torch.float32, whose products torch.autocast does in half precision"):
                    call()
            assert torch.equal(tg.sample(double, tg.Slice(), **options).theta, expected)
