"""scikit-learn's own checks, and what its users do: text labels, frames, pipelines, searches over methods."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import torchgpmc as tg

QUICK = tg.AMIS(num_importance=2, begin=tg.AtModes(1))  # what is looked at is the interface
pytestmark = pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")  # so few draws are doubtful


FROM_THE_PRIOR = tg.AMIS(num_importance=2, begin=tg.AtPrior())  # a search for a mode is most of so short a run


@pytest.mark.slow
@parametrize_with_checks(
    [tg.GPClassifier(num_samples=24, method=FROM_THE_PRIOR), tg.GPRegressor(num_samples=24, method=FROM_THE_PRIOR)]
)
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def iris():
    x, y = load_iris(return_X_y=True)
    return x[45:105:2], y[45:105:2]


@pytest.mark.slow
def test_labels_may_be_text_and_inputs_a_frame(iris):
    pandas = pytest.importorskip("pandas")
    x, y = iris
    frame, names = pandas.DataFrame(x, columns=list("abcd")), np.array(["setosa", "versicolor", "virginica"])[y]
    classifier = tg.GPClassifier(num_samples=200, method=QUICK, random_state=0).fit(frame, names)
    assert list(classifier.classes_) == ["setosa", "versicolor", "virginica"]
    assert (classifier.predict(frame) == names).mean() > 0.9
    probs = classifier.predict_proba(frame)
    np.testing.assert_allclose(probs.sum(-1), 1.0)
    assert len(classifier.posterior_) == 3


@pytest.mark.slow
def test_one_model_of_all_classes(iris):
    x, y = iris
    method = tg.HMC(num_steps=5)
    classifier = tg.GPClassifier(num_samples=30, method=method, multi_class="softmax", random_state=0).fit(x, y)
    assert classifier.posterior_.model.num_latents == 3
    assert (classifier.predict(x) == y).mean() > 0.8


@pytest.mark.slow
def test_searches_and_pipelines(iris):
    x, y = iris
    binary, x = y[y > 0], x[y > 0]
    pipeline = make_pipeline(MinMaxScaler(), tg.GPClassifier(num_samples=50, method=QUICK, random_state=0))
    assert cross_val_score(pipeline, x, binary, cv=2).shape == (2,)
    methods = [QUICK, tg.AMIS(approximation=tg.EP(), num_importance=2, begin=tg.AtModes(1))]
    search = GridSearchCV(tg.GPClassifier(num_samples=50, random_state=0), {"method": methods}, cv=2).fit(x, binary)
    assert search.best_params_["method"] in methods


@pytest.mark.slow
def test_units_do_not_matter_where_both_sides_are_standardised():
    x = np.linspace(0, 6, 25)[:, None]
    y = np.sin(x[:, 0])
    one = tg.GPRegressor(num_samples=100, method=QUICK, random_state=0).fit(x, y)
    other = tg.GPRegressor(num_samples=100, method=QUICK, random_state=0).fit(1e3 * x - 5, 100 * y + 7)
    (mean, deviation), (shifted, wider) = one.predict(x, return_std=True), other.predict(1e3 * x - 5, return_std=True)
    np.testing.assert_allclose(shifted, 100 * mean + 7, rtol=1e-5)
    np.testing.assert_allclose(wider, 100 * deviation, rtol=1e-5)
    assert np.abs(mean - y).max() < 0.1
    near = one.sample_y(np.array([[1.0], [1.001], [4.0]]), n_samples=400)
    assert near.shape == (3, 400)


def test_draws_of_the_response_are_of_all_points_together():
    x = np.linspace(0, 1, 3)[:, None]
    regressor = tg.GPRegressor(num_samples=100, method=QUICK, normalize_y=False, random_state=0).fit(x, np.zeros(3))
    far = regressor.sample_y(np.array([[9.0], [9.01], [40.0]]), n_samples=2000)
    correlation = np.corrcoef(far)
    assert correlation[0, 1] > correlation[0, 2] + 0.1  # neighbours share f, though not their noise


def test_inducing_points_are_a_number_or_places_in_the_users_units(iris):
    x, y = iris
    x, y = x[y > 0], y[y > 0]
    for inducing in (5, x[:5]):
        method = tg.HMC(num_steps=2)
        fitted = tg.GPClassifier(num_samples=5, method=method, inducing_points=inducing, random_state=0).fit(x, y)
        assert isinstance(fitted.posterior_.model, tg.SparseGP)
        assert fitted.posterior_.model.latent_inputs.shape == (5, 4)
    np.testing.assert_allclose(fitted.posterior_.model.latent_inputs, (x[:5] - x.mean(0)) / x.std(0))
    with pytest.raises(ValueError, match=r"inducing_points is 'auto'. Expected how many, for instance 100, or where"):
        tg.GPClassifier(inducing_points="auto").fit(x, y)


@pytest.mark.slow
def test_doubtful_draws_are_said_to_be_once(iris):
    x, y = iris
    x, y = x[:24], np.arange(24) % 3
    with pytest.warns(tg.SamplingWarning) as heard:
        tg.GPClassifier(num_samples=24, method=QUICK, random_state=0).fit(x, y)
    assert len(heard) == 1
    assert str(heard[0].message).startswith("GPClassifier: those of 3 of 3 models are not to be trusted. 24 weighted draws are")
    with pytest.warns(tg.SamplingWarning, match=r"GPRegressor: the draws are not to be trusted\."):
        tg.GPRegressor(num_samples=24, method=QUICK, random_state=0).fit(x, x[:, 0])


def test_mistakes_are_named(iris):
    x, y = iris
    with pytest.raises(ValueError, match=r"multi_class is 'ovo'. Expected 'one_vs_rest' or 'softmax'"):
        tg.GPClassifier(multi_class="ovo").fit(x, y)
    with pytest.raises(ValueError, match="Expected at least two classes"):
        tg.GPClassifier().fit(x, np.zeros(len(x)))
    for device in ("gpu", "cuda:99", 1.5):
        with pytest.raises(ValueError, match=rf"device is {device!r}\. Expected one that torch has here, 'cpu'.*; or None"):
            tg.GPRegressor(device=device, method=QUICK).fit(x, y)
    assert tg.GPRegressor(device="cpu", num_samples=24, method=QUICK).fit(x, y).predict(x[:2]).shape == (2,)


def test_numbers_whose_squares_overflow_are_refused_before_they_are_scaled(iris):
    x, y = iris
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy's of overflow
        with pytest.raises(ValueError, match=r"X has numbers up to .*, whose squares torch.float64 cannot hold"):
            tg.GPClassifier().fit(1e200 * x, y)
        with pytest.raises(ValueError, match=r"y has numbers up to .*, whose squares torch.float64 cannot hold"):
            tg.GPRegressor().fit(x, 1e200 * y)


def test_arrays_that_cannot_be_written_to_get_no_word_from_torch(iris, request):
    """As workers of joblib and pandas hand them on."""
    request.addfinalizer(partial(torch.set_warn_always, torch.is_warn_always_enabled()))
    torch.set_warn_always(True)  # it says so once a process
    x = iris[0].copy()
    x.flags.writeable = False
    regressor = tg.GPRegressor(num_samples=24, method=QUICK, normalize_x=False, inducing_points=x[:3])
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        regressor.fit(x, x[:, 0]).predict(x)
    assert not [warning for warning in heard if "writ" in str(warning.message)]
