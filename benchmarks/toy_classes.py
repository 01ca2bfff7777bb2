"""Three classes of 750 points (Hensman et al. 2015, section 5.3): contours of a Gaussian fit and of MCMC, and which are bolder.

    python benchmarks/toy_classes.py --record start.pkl --fraction 0.24

Points from the three normal distributions of the authors' script, long and thin, which cross; RobustMax; M = 50 inducing points,
placed by the fit; lengthscale Gamma(3, 2), variance Gamma(3, 3), and the script's nugget of 1e-3. Writes
docs/results/toy_classes.png. The paper made 10000 draws; its figure has contours at 0.3, 0.95 and 0.99.
"""

import argparse
import pathlib
import time

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from held_out import quiet, worst
from matplotlib.figure import Figure
from real_data import OUTPUT

import torchgpmc as tg
from torchgpmc.diagnostics.chain_statistics import ess, rhat

DRAWS, CHAINS = 10_000, 8
LEVELS = [0.3, 0.95, 0.99]
COLOURS = ["tab:blue", "tab:orange", "tab:green"]


def clouds(count, seed):
    """Points of three normal distributions, and which."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[0.0, 0.5], [-1.5, 0.0], [1.5, 0.0]], dtype=torch.float64)
    turn = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64) / 2**0.5
    covariances = torch.diag_embed(torch.tensor([[5.0, 0.1], [0.05, 3.0], [3.0, 0.1]], dtype=torch.float64))
    covariances[2] = turn @ covariances[2] @ turn.mT
    roots = torch.linalg.cholesky(covariances)
    label = torch.arange(count) % 3
    noise = torch.randn(count, 2, 1, dtype=torch.float64, generator=generator)
    return centres[label] + (roots[label] @ noise).squeeze(-1), label


def fit_of(x, y, points, record):
    """The Gaussian fit, or that which the file ``record`` holds, and its CPU seconds."""
    if record is not None and record.exists():
        return torch.load(record, weights_only=False)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(3.0, 2.0)), outputscale_prior=GammaPrior(3.0, 3.0))
    likelihood = tg.likelihoods.RobustMax(num_classes=3, epsilon=1e-3)
    z = tg.kmeans_inducing_points(x, points)
    model = tg.SparseGP(x, y, kernel + tg.kernels.White(1e-3), likelihood, inducing_points=z)
    began = time.process_time()
    found = tg.initialize(model, progress=False), time.process_time() - began
    if record is not None:
        torch.save(found, record)
    return found


def of_probabilities(posterior, x):
    """Largest R-hat and least effective size of the classes' probabilities at inputs ``x`` where draws differ, draw by draw."""
    model = posterior.model
    chains, draws = posterior.num_chains, posterior.num_draws
    found = []
    for theta, v in zip(posterior.theta.flatten(0, 1).split(50), posterior.whitened.flatten(0, 1).split(50), strict=True):
        mean, variance = (part.mT for part in model.marginals(model.at(model.prior(theta), x), v))
        found.append(model.likelihood_function({}, lambda likelihood, m=mean, s=variance: likelihood.response_moments(m, s).mean))
    series = torch.cat(found).detach().view(chains, draws, -1).movedim(-1, 0)
    series = series[series.flatten(1).std(1) > 1e-3].numpy()
    return max(float(rhat(part)) for part in series), min(float(ess(part, "bulk")) for part in series)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fraction", type=float, default=1.0, help=f"of {DRAWS} draws in {CHAINS} chains")
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--record", type=pathlib.Path, help="file that holds the fit, or will; the chains go beside it")
    parser.add_argument("--grid", type=int, default=60)
    arguments = parser.parse_args()
    quiet()
    x, y = clouds(750, seed=0)
    start, fitting = fit_of(x, y, arguments.points, arguments.record)
    draws = round(DRAWS * arguments.fraction / CHAINS)
    began = time.process_time()
    posterior = tg.sample(
        start.model,
        # Every datum is a step of the density, of no width to speak of: steps stay short, and trajectories take many.
        tg.HMC(num_steps=80, step_size=0.1, target_accept_prob=0.7),
        start=start,
        num_samples=draws,
        warmup_steps=100,
        num_chains=CHAINS,
        seed=0,
        progress=False,
        checkpoint=None if arguments.record is None else tg.Checkpoint(arguments.record.with_suffix(".ckpt"), every=20),
    )
    sampling = time.process_time() - began
    rhats, effective = zip(worst(posterior), of_probabilities(posterior, x[:40]), strict=True)
    print(f"{CHAINS} x {draws} draws; {start}; CPU seconds: fit {fitting:.0f}, sampling {sampling:.0f};")
    print(f"R-hat of hyperparameters {rhats[0]:.3f}, effective {effective[0]:.0f}; of probabilities at 40 data {rhats[1]:.3f},")
    print(f"{effective[1]:.0f}; {posterior.info['num_evaluations']:.0f} gradients. {posterior.verdict()}\n", flush=True)
    axis = torch.linspace(-5.0, 5.0, arguments.grid, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    found = {"Gaussian": start.predict(grid).probs, "MCMC": posterior.predict(grid, num_draws=300).probs}
    print("| share of the square where the likeliest class has at least | " + " | ".join(found) + " |")
    print("|---|---|---|")
    for level in LEVELS[1:]:
        shares = [float((probs.max(-1).values >= level).double().mean()) for probs in found.values()]
        print(f"| {level} | " + " | ".join(f"{share:.3f}" for share in shares) + " |")
    draw(found, x, y, start.model.inducing_points, axis)


def draw(found, x, y, inducing_points, axis):
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    for panel, (name, probs) in zip(figure.subplots(1, 2, sharey=True), found.items(), strict=True):
        for label, colour in enumerate(COLOURS):
            panel.scatter(*x[y == label].T, s=4, color=colour, alpha=0.4)
            values = probs[:, label].view(len(axis), len(axis)).T
            lines = panel.contour(axis, axis, values, levels=LEVELS, colors=[colour], linestyles=["dotted", "dashed", "solid"])
            panel.clabel(lines, fontsize=7)
        panel.scatter(*inducing_points.T, s=12, color="black", marker="x")
        panel.set(title=name, aspect="equal")
    figure.savefig(OUTPUT / "toy_classes.png", dpi=110)


if __name__ == "__main__":
    main()
