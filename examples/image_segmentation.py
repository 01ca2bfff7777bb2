"""Image segments told apart by a sparse GP: a Gaussian fit, and the free-form posterior sampled from it.

With ``--data`` the folder holds ``image.csv.gz`` (18 features, label last); without, scikit-learn simulates a set of that shape.
"""

import argparse
import pathlib
import time

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import torchgpmc as tg
from torchgpmc import plots


def load_data(folder, num_train, seed):
    if folder is None:
        x, y = make_classification(2000, 18, n_informative=6, n_clusters_per_class=3, random_state=seed)
    else:
        values = np.loadtxt(folder / "image.csv.gz", delimiter=",", skiprows=1)
        x, y = values[:, :-1], values[:, -1]
    train_x, test_x, train_y, test_y = train_test_split(x, y, train_size=num_train, random_state=seed, stratify=y)
    scaler = StandardScaler().fit(train_x)
    arrays = scaler.transform(train_x), train_y, scaler.transform(test_x), test_y
    return tuple(torch.as_tensor(array, dtype=torch.float64) for array in arrays)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, default=None, help="folder of image.csv.gz")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("image-output"))
    parser.add_argument("--train", type=int, default=500)
    parser.add_argument("--points", type=int, default=20, help="inducing points")
    parser.add_argument("--samples", type=int, default=100, help="a chain")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # tensors are small: more threads would wait for one another

    train_x, train_y, test_x, test_y = load_data(arguments.data, arguments.train, arguments.seed)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 0.5)), outputscale_prior=GammaPrior(2.0, 0.5))
    points = tg.kmeans_inducing_points(train_x, arguments.points)
    model = tg.SparseGP(train_x, train_y, kernel, tg.likelihoods.Bernoulli(), inducing_points=points)

    began = time.perf_counter()
    start = tg.initialize(model, max_iterations=60)
    print(f"Gaussian fit in {time.perf_counter() - began:.0f} s, inducing points moved: log p(y) >= {start.elbo:.1f}")
    began = time.perf_counter()
    posterior = tg.sample(start.model, tg.NUTS(), start=start, num_samples=arguments.samples, seed=arguments.seed)
    print(f"sampled in {time.perf_counter() - began:.0f} s\n{posterior.summary()}\n")

    predictions = {"Gaussian": start.predict(test_x), "sampled": posterior.predict(test_x)}
    for name, prediction in predictions.items():
        accuracy = float(((prediction.probs > 0.5) == test_y).double().mean())
        print(f"{name}: mean log density of a test label {float(prediction.log_prob(test_y).mean()):.4f}, accuracy {accuracy:.1%}")
    figure = plots.plot_calibration({name: prediction.probs for name, prediction in predictions.items()}, test_y)
    figure.savefig(arguments.output / "calibration.png", dpi=120)


if __name__ == "__main__":
    main()
