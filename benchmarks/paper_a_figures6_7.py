"""Paper A, figures 6 and 7: capacity scores against the size of the training set, on five data sets.

    python benchmarks/paper_a_figures6_7.py --data ../shared/data --sets pima glass

Balanced training sets drawn at random, the rest for testing. SVM with squared exponential kernel and Platt scaling (scikit-learn; C
and width by cross-validation), EP ML (type-II maximum likelihood), MCMC EP (theta drawn under EP's evidence, f integrated out by
EP), MCMC PM EP (the exact posterior by the pseudo-marginal chain, 64 importance samples). The paper has 40 training sets a size.
"""

import argparse
import pathlib
import time
import warnings

import numpy as np
import torch
from real_data import OUTPUT, classification_set, isotropic_probit
from sklearn.calibration import CalibratedClassifierCV
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.svm import SVC

import torchgpmc as tg
from torchgpmc.approximations import predict

SCORES = {"capacity accuracy": tg.scores.capacity_accuracy, "capacity AUC": tg.scores.capacity_auc}
CHAINS, WARMUP, DRAWS = 16, 100, 40
KEPT = 200  # thetas that MCMC EP predicts with


def support_vectors(x, y, x_test, seed):
    folds = StratifiedKFold(min(5, len(y) // 2), shuffle=True, random_state=seed)
    search = GridSearchCV(SVC(), {"C": [0.1, 1, 10, 100], "gamma": np.array([0.1, 0.3, 1, 3]) / x.shape[1]}, cv=folds).fit(x, y)
    machine = CalibratedClassifierCV(search.best_estimator_, method="sigmoid", cv=folds, ensemble=False).fit(x, y)
    return torch.as_tensor(machine.predict_proba(x_test)[:, 1])


def maximum_likelihood(x, y, x_test, seed):
    fitted = tg.fit(isotropic_probit(x, y), tg.EP(), seed=seed)
    return predict(fitted, fitted.layout.present(fitted), tg.EP(), torch.as_tensor(x_test)).probs


def run_chains(model, method, seed):
    return tg.sample(model, method, num_samples=DRAWS, warmup_steps=WARMUP, num_chains=CHAINS, seed=seed, progress=False)


def approximate_chains(x, y, x_test, seed):
    model = isotropic_probit(x, y)
    theta = run_chains(model, tg.AdaptiveMH(marginal=tg.EP(), thinning=5), seed).theta.flatten(0, 1)
    return predict(model, theta[:: len(theta) // KEPT], tg.EP(), torch.as_tensor(x_test)).probs


def pseudo_marginal(x, y, x_test, seed):
    method = tg.PseudoMarginal(approximation=tg.EP(), num_importance=64, thinning=5)
    return run_chains(isotropic_probit(x, y), method, seed).predict(torch.as_tensor(x_test)).probs


CLASSIFIERS = {
    "SVM": support_vectors,
    "EP ML": maximum_likelihood,
    "MCMC EP": approximate_chains,
    "MCMC PM EP": pseudo_marginal,
}


def balanced(y, size, seed):
    """Rows of a training set with as many of either class, and the others."""
    generator = np.random.default_rng(seed)
    chosen = np.concatenate([generator.choice(np.flatnonzero(y == label), size // 2, replace=False) for label in (0, 1)])
    return chosen, np.setdiff1d(np.arange(len(y)), chosen)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["pima", "glass", "thyroid", "ionosphere", "usps"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 20, 50, 100])
    parser.add_argument("--replicates", type=int, default=40)
    parser.add_argument("--figure", default="paper_a_figures6_7.png")
    options = parser.parse_args()
    from matplotlib.figure import Figure

    warnings.simplefilter("ignore", tg.SamplingWarning)
    figure = Figure(figsize=(9, 3 * len(options.sets)), layout="constrained")
    panels = figure.subplots(len(options.sets), 2, squeeze=False)
    print("| set | n | classifier | capacity accuracy (se) | capacity AUC (se) | s a fit |")
    print("|---" * 6 + "|")
    for row, name in enumerate(options.sets):
        x, y = classification_set(options.data, name)
        curves = {classifier: [] for classifier in CLASSIFIERS}
        for size in options.sizes:
            for classifier, make in CLASSIFIERS.items():
                began, values = time.perf_counter(), []
                for seed in range(options.replicates):
                    train, test = balanced(y, size, seed)
                    probs = make(x[train], y[train], x[test], seed)
                    values.append([score(probs, y[test]) for score in SCORES.values()])
                mean, error = np.mean(values, 0), np.std(values, 0, ddof=1) / options.replicates**0.5
                curves[classifier].append((mean, error))
                scores = " | ".join(f"{value:.3f} ({spread:.3f})" for value, spread in zip(mean, error, strict=True))
                seconds = (time.perf_counter() - began) / options.replicates
                print(f"| {name} | {size} | {classifier} | {scores} | {seconds:.1f} |", flush=True)
        for column, score in enumerate(SCORES):
            for classifier, curve in curves.items():
                means, errors = np.array([part[0][column] for part in curve]), np.array([part[1][column] for part in curve])
                panels[row, column].errorbar(options.sizes, means, errors, marker="o", capsize=2, label=classifier)
            panels[row, column].set(title=f"{name}: {score}", xlabel="training points", xscale="log")
        panels[0, 0].legend(fontsize=7)
        figure.savefig(OUTPUT / options.figure, dpi=100)


if __name__ == "__main__":
    main()
