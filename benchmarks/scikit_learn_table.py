"""Our scikit-learn estimators beside scikit-learn's own Gaussian processes: held-out log density and CPU time.

    python benchmarks/scikit_learn_table.py --data FOLDER

Five sets with classes and five with real responses, five folds, at most 100 rows of each (a random choice), so that all of it
takes minutes. Negative mean log predictive density of the left-out rows, lower is better: log loss of classes, and for responses
that of a normal distribution with the predicted mean and standard deviation, in standardised units (root mean squared error in
brackets). scikit-learn's estimators have RBF kernels with a lengthscale for each column and an amplitude, white noise for
responses, and two restarts; ours have their defaults. Both are given standardised columns. Means over folds; `difference` is ours
less theirs with its standard error over folds; `doubtful`, our fits whose draws have complaints. Folds that are in the file of
`--record` are not run again.
"""

import argparse
import json
import pathlib
import time
import warnings

import numpy as np
from real_data import standardised, table

CLASSES = "crabs", "glass", "ionosphere", "pima", "ripley"
RESPONSES = "auto_mpg", "concrete", "housing", "mcycle", "yacht"
SIDES = "ours", "scikit-learn's"


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
    return {"loss": -np.log(np.clip(chosen, 1e-15, 1.0)).mean()}


def normal_loss(estimator, x, y):
    mean, deviation = estimator.predict(x, return_std=True)
    loss = (0.5 * ((y - mean) / deviation) ** 2 + np.log(deviation) + 0.5 * np.log(2 * np.pi)).mean()
    return {"loss": loss, "error": np.sqrt(((y - mean) ** 2).mean())}


def folds(folder, name, most, count):
    """Inputs, responses, rows to train on and rows to test on."""
    from sklearn.model_selection import KFold, StratifiedKFold

    x, y = rows(folder, name, most)
    of_classes = name in CLASSES
    x, y = standardised(x), y if of_classes else standardised(y)
    for train, test in (StratifiedKFold if of_classes else KFold)(count, shuffle=True, random_state=0).split(x, y):
        yield x, y, train, test


def compared(name, x, y, train, test):
    """Of both estimators: loss, error of responses, CPU seconds; of ours whether the draws are doubtful."""
    build, loss = (classifiers, log_loss) if name in CLASSES else (regressors, normal_loss)
    found = {"set": name, "size": f"{len(x)} x {x.shape[1]}"}
    for side, estimator in zip(SIDES, build(x), strict=True):
        began = time.process_time()
        found[side] = loss(estimator.fit(x[train], y[train]), x[test], y[test])
        found[side]["seconds"] = time.process_time() - began
        if side == SIDES[0]:
            posteriors = estimator.posterior_ if isinstance(estimator.posterior_, list) else [estimator.posterior_]
            found[side]["doubtful"] = any(posterior.complaints() for posterior in posteriors)
    return found


def row(results):
    """Of the table, from all folds of a set."""

    def mean(side, key):
        return np.mean([result[side][key] for result in results])

    def scores(side):
        return f"{mean(side, 'loss'):.3f}" + (f" ({mean(side, 'error'):.3f})" if "error" in results[0][side] else "")

    ours, theirs = SIDES
    difference = np.array([result[ours]["loss"] - result[theirs]["loss"] for result in results])
    change = f"{difference.mean():+.3f} +- {difference.std(ddof=1) / len(difference) ** 0.5:.3f}"
    seconds = mean(ours, "seconds"), mean(theirs, "seconds")
    cost = f"{seconds[0]:.1f} | {seconds[1]:.1f} | {seconds[0] / seconds[1]:.0f}"
    doubtful = sum(result[ours]["doubtful"] for result in results)
    known = f"{results[0]['set']} | {results[0]['size']} | {scores(ours)} | {scores(theirs)} | {change}"
    return f"| {known} | {cost} | {doubtful} of {len(results)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the data sets")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--sets", nargs="+", default=CLASSES + RESPONSES)
    parser.add_argument("--record", type=pathlib.Path, default=pathlib.Path("scikit_learn_table.jsonl"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = options.record.read_text().splitlines() if options.record.exists() else []
    kept = {(result["set"], result["fold"]): result for result in map(json.loads, lines)}
    print(
        "| set | rows x columns | ours | scikit-learn's | difference | s a fold, ours | scikit-learn's | times as long | doubtful |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.sets:
        for fold, data in enumerate(folds(options.data, name, options.rows, options.folds)):
            if (name, fold) not in kept:
                kept[name, fold] = {"fold": fold, **compared(name, *data)}
                with options.record.open("a") as file:
                    print(json.dumps(kept[name, fold]), file=file)
        print(row([kept[name, fold] for fold in range(options.folds)]), flush=True)


if __name__ == "__main__":
    main()
