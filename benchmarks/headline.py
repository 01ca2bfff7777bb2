"""AMIS by the error it leaves: posterior variance over the mean squared error of the posterior mean across seeds, per CPU second.

    python benchmarks/headline.py
    python benchmarks/headline.py --columns 10 --seeds 5 --draws 2000
    python benchmarks/headline.py --columns 10 --seeds 10 --long 40000 --methods "default call"
    python benchmarks/headline.py --columns 10 --seeds 5 --determined --methods "default call"

Probit GP, n=200, paper A's priors; d=2 isotropic, or a lengthscale each; worst hyperparameter. The truth is one long run, with
more columns one batch from proposals fitted to runs of 4000 draws. Beside it are Kish's size and k-hat, the largest weight,
which tells a heavy tail from a bounded one, and how far the worst mean of the worst seed is off, in posterior deviations. Mode
search is inside the time. With two columns NumPyro's NUTS runs first, sequential chains, compile time left out; with ten it
takes most of an hour to 200 effective draws (``peers/numpyro_nuts.py``), and is not run here, but for ``--determined``: there
labels depend on three of the inputs and say much, and NumPyro has 700 effective draws after 900 transitions a chain (``--peer``:
its output). Its means, whose error is that of as many draws, stand beside the long run's and, again, as the truth.
"""

import argparse
import json
import pathlib
import time
import warnings
from dataclasses import replace

import torch
from problems import determined_data, probit_data, probit_model
from processes import measure, peer_python

import torchgpmc as tg


def log_weights_of(posterior):
    """Those of draws without weights are zero."""
    return torch.zeros_like(posterior.stats["lp"]) if posterior.log_weights is None else posterior.log_weights


def truth_of(model, columns, determined, draws):
    """Moments of one long run, or of one batch from proposals that were fitted to other runs.

    Proposals learned from the draws that they weigh had a mean of eleven 0.06 to 0.12 deviations low in all runs alike.
    """
    if columns == 2:
        return moments(tg.sample(model, tg.AMIS(approximation=tg.EP()), num_samples=draws, seed=999, progress=False))
    evidence = tg.evidence.SmoothProbit(tg.EP(), num_importance=64)
    extremes = tg.AtPrior(arms=True)
    method = tg.AMIS(evidence=evidence, degrees_of_freedom=30, begin=extremes)
    if determined:
        modes = tg.AtModes(search_tails=True, leave_for=extremes, approximation=tg.EP(tolerance=0.02))
        return of_fixed_proposals(model, replace(method, begin=modes), draws, range(999, 1002))
    return of_fixed_proposals(model, method, draws // 2, range(999, 999 + max(2, draws // 8000)))


def of_fixed_proposals(model, method, draws, seeds):
    """Moments of draws from proposals that runs of 4000 draws each have taught, and these draws have not."""
    runs = [tg.sample(model, method, num_samples=min(4000, draws), seed=seed, progress=False) for seed in seeds]
    fixed = replace(method, batch_sizes=(draws,), num_streams=1)
    return moments(tg.sample(model, fixed, num_samples=draws, seed=998, progress=False, start=tg.pool(runs)))


def peer_of_determined(file):
    """The last line of NumPyro's run, made here or before."""
    if file is not None:
        return json.loads(file.read_text().strip().splitlines()[-1])
    return measure(numpyro(), "peers/numpyro_nuts.py", 200, 2, 300, 600, 0, "sequential", 10, 1, "determined")


def numpyro():
    """NumPyro's interpreter."""
    return peer_python("numpyro", ["numpyro==0.22.*", "jax", "jaxlib", "arviz-stats", "scipy"])


def moments(posterior):
    """Weighted mean and variance of every hyperparameter, constrained."""
    weights = torch.softmax(log_weights_of(posterior).flatten(), 0)
    values = torch.cat([value.flatten(0, 1).reshape(len(weights), -1) for value in posterior.samples.values()], -1)
    mean = weights @ values
    return mean, weights @ (values - mean).square()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0, help="others than those by which something was chosen")
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--long", type=int, default=60_000)
    parser.add_argument("--columns", type=int, default=2)
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--determined", action="store_true", help="labels of three inputs alone")
    parser.add_argument("--peer", type=pathlib.Path, help="output of peers/numpyro_nuts.py, with --determined")
    parser.add_argument("--methods", nargs="+", help="rows to run, by name; all by default")
    options = parser.parse_args()
    warnings.simplefilter("ignore", tg.SamplingWarning)
    data = determined_data if options.determined else probit_data
    model = probit_model(200, options.columns, ard=options.columns > 2, data=data)
    print("| method | effective (variance over MSE) | a second | Kish's size | k-hat: median, worst | largest weight | ", end="")
    print("seconds, CPU seconds | mean of the outputscale, over seeds | worst mean off, sd | trusted |")
    print("|---" * 10 + "|")
    if options.columns == 2 and not options.without_peer:
        peer = measure(numpyro(), "peers/numpyro_nuts.py", 200, 4, 200, 400, 0, "sequential")
        print(f"| NumPyro NUTS, 4 x (200 + 400) | {peer['ess']:.0f} | {peer['ess_a_second']:.2f} | | | | ", end="")
        print(f"{peer['seconds']:.0f} | {peer['means'][0]:.2f} | | |")
    methods = {"AMIS, Laplace (16)": tg.AMIS(), "AMIS, EP (16)": tg.AMIS(approximation=tg.EP())}
    if options.columns > 2:  # the posterior's lobes of short lengthscales leave importance samples of f too noisy
        smooth, smooth_ep = tg.evidence.SmoothProbit(), tg.evidence.SmoothProbit(tg.EP())
        methods = {
            "AMIS, Laplace (16)": tg.AMIS(),
            "AMIS, EP (16)": tg.AMIS(approximation=tg.EP()),
            "AMIS, white noise out, Laplace (16)": tg.AMIS(evidence=smooth, defensive_share=0.5),
            "AMIS, white noise out, EP (16)": tg.AMIS(evidence=smooth_ep, defensive_share=0.5),
            "AMIS, orthants (16 points)": tg.AMIS(evidence=tg.evidence.Orthant(16), defensive_share=0.5),
        }
    methods["default call"] = None
    if options.determined:
        peer = peer_of_determined(options.peer)
        peer_means = torch.tensor(peer["means"]).double()
        print(
            f"| NumPyro NUTS | {peer['ess']:.0f} | {peer['ess'] / peer['cpu_seconds']:.2f} | | | | {peer['seconds']:.0f}, ", end=""
        )
        print(f"{peer['cpu_seconds']:.0f} | {peer['means'][0]:.2f} | | |", flush=True)
    truth, variance = truth_of(model, options.columns, options.determined, options.long)
    for name, method in methods.items():
        if options.methods and name not in options.methods:
            continue
        means, variances, seconds, work, kish, khat, largest, counts, trusted = [], [], [], [], [], [], [], [], 0
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            began, worked = time.perf_counter(), time.process_time()
            posterior = tg.sample(model, method, num_samples=options.draws if method else None, seed=seed, progress=False)
            seconds.append(time.perf_counter() - began)
            work.append(time.process_time() - worked)
            trusted += not posterior.complaints()
            for kept, moment in zip((means, variances), moments(posterior), strict=True):
                kept.append(moment)
            log_weights = log_weights_of(posterior)
            counts.append(log_weights.numel())
            kish.append(tg.diagnostics.weights.kish_effective_size(log_weights))
            khat.append(tg.diagnostics.weights.pareto_khat(log_weights))
            largest.append(float(torch.softmax(log_weights.flatten(), 0).max()) * log_weights.numel())
        gap = torch.stack(means) - truth
        sizes = variance / gap.square().mean(0)
        together = float(1 / (1 / sizes).mean())
        time_each = sum(work) / len(work)
        print(
            f"| {name} | {together:.0f} all means, {float(sizes.min()):.0f} the worst, of {sum(counts) / len(counts):.0f} | "
            f"{together / time_each:.2f}, {float(sizes.min()) / time_each:.2f} | {sum(kish) / len(kish):.0f} | "
            f"{sorted(khat)[len(khat) // 2]:.2f}, {max(khat):.2f} | {max(largest):.1f} times the mean | "
            f"{float(torch.tensor(seconds).median()):.1f}, {time_each:.1f} ({min(work):.0f} to {max(work):.0f}) | "
            f"{float(torch.stack(means)[:, 0].min()):.2f} to {float(torch.stack(means)[:, 0].max()):.2f} | "
            f"{float((gap.abs() / variance.sqrt()).max()):.2f} | {trusted} of {options.seeds} |",
            flush=True,
        )
        if options.determined:
            print(beside_peer(torch.stack(means), variance, truth, peer_means, peer["ess"]), flush=True)


def beside_peer(means, variance, truth, peer_means, peer_size):
    """The same by the peer's means, by how calls differ, and whether both are off the peer's means alike beyond its own error."""
    of_peer = variance / (means - peer_means).square().mean(0)
    of_calls = variance / means.var(0)
    shared, long = ((value - peer_means).square() / variance for value in (means.mean(0), truth))
    together, beside = (float(1 / (1 / sizes).mean()) for sizes in (of_calls, of_peer))
    own = 1 / peer_size + 1 / (of_calls * len(means))
    return (
        f"by the peer's means: {beside:.0f}, {float(of_peer.min()):.0f} the worst; by how calls differ: {together:.0f}, "
        f"{float(of_calls.min()):.0f}. Off the peer's alike: {float(shared.sqrt().max()):.3f} sd at worst, squares over both "
        f"errors summed: {float((shared / own).sum()):.1f} of {len(truth)} means; the long run {float(long.sqrt().max()):.3f}."
    )


if __name__ == "__main__":
    main()
