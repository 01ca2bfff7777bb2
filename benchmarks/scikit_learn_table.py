"""Our scikit-learn estimators beside scikit-learn's own Gaussian processes: held-out log density and CPU time.

    python benchmarks/scikit_learn_table.py --data FOLDER

Five sets with classes and five with real responses, five folds, at most 150 rows of each (a random choice), so that all of it
takes minutes. Negative mean log predictive density of the left-out rows, lower is better: log loss of classes, and for responses
that of a normal distribution with the predicted mean and standard deviation, in standardised units. scikit-learn's estimators have
RBF kernels with a lengthscale for each column and an amplitude, white noise for responses, and two restarts; ours have their
defaults. Both are given standardised columns. Means over folds; `difference` is ours less theirs with its standard error.
"""

import argparse
import pathlib
import time
import warnings

import numpy as np
from real_data import standardised, table

CLASSES = "crabs", "glass", "ionosphere", "pima", "ripley"
RESPONSES = "auto_mpg", "concrete", "housing", "mcycle", "yacht"


def rows(folder, name, most):
    """Inputs without constant columns, and the last column, of at most ``most`` rows."""
    columns = table(folder, name)
    columns = columns[np.random.default_rng(0).permutation(len(columns))[:most]]
    x = columns[:, :-1]
    return x[:, x.std(0) > 0], columns[:, -1]


def classifiers(x):
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    import torchgpmc as tg

    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(np.ones(x.shape[1]), (1e-2, 1e3))
    return tg.GPClassifier(random_state=0), GaussianProcessClassifier(kernel, n_restarts_optimizer=2, random_state=0)


def regressors(x):
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    import torchgpmc as tg

    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(np.ones(x.shape[1]), (1e-2, 1e3)) + WhiteKernel(0.1, (1e-6, 1e1))
    return tg.GPRegressor(random_state=0), GaussianProcessRegressor(kernel, n_restarts_optimizer=2, random_state=0)


def log_loss(estimator, x, y):
    chosen = estimator.predict_proba(x)[np.arange(len(y)), np.searchsorted(estimator.classes_, y)]
    return -np.log(np.clip(chosen, 1e-15, 1.0)).mean()


def normal_loss(estimator, x, y):
    mean, deviation = estimator.predict(x, return_std=True)
    return (0.5 * ((y - mean) / deviation) ** 2 + np.log(deviation) + 0.5 * np.log(2 * np.pi)).mean()


def main():
    from sklearn.model_selection import KFold, StratifiedKFold

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the data sets")
    parser.add_argument("--rows", type=int, default=150)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--sets", nargs="+", default=CLASSES + RESPONSES)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| set | rows x columns | ours | scikit-learn's | difference | seconds a fold, ours | scikit-learn's | times as long |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.sets:
        x, y = rows(options.data, name, options.rows)
        of_classes = name in CLASSES
        x, y = standardised(x), y if of_classes else standardised(y)
        build, loss, folds = (classifiers, log_loss, StratifiedKFold) if of_classes else (regressors, normal_loss, KFold)
        found, seconds = [], []
        for train, test in folds(options.folds, shuffle=True, random_state=0).split(x, y):
            losses, times = [], []
            for estimator in build(x):
                began = time.process_time()
                losses.append(loss(estimator.fit(x[train], y[train]), x[test], y[test]))
                times.append(time.process_time() - began)
            found.append(losses)
            seconds.append(times)
        (ours, theirs), (time_ours, time_theirs) = np.mean(found, 0), np.mean(seconds, 0)
        difference = np.subtract(*np.transpose(found))
        change = f"{difference.mean():+.3f} +- {difference.std(ddof=1) / len(difference) ** 0.5:.3f}"
        cost = f"{time_ours:.1f} | {time_theirs:.1f} | {time_ours / time_theirs:.0f}"
        print(f"| {name} | {len(x)} x {x.shape[1]} | {ours:.3f} | {theirs:.3f} | {change} | {cost} |", flush=True)


if __name__ == "__main__":
    main()
