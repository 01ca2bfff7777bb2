"""What AMIS's means lose by proposals that were learned from the draws they weigh, and streams of draws that do without.

    python benchmarks/learned_proposals.py --problem determined --draws 1500 --seeds 12
    python benchmarks/learned_proposals.py --problem housing --data DATA --draws 4000 --seeds 5

``determined``: labels of 200 data, 11 hyperparameters; ``housing``: a regression on 433 data, 15 of them; ``prior``: labels that
say little, proposals begun with the prior, 11. Draws are dealt to so many streams, each weighed against its own proposals, which
the draws of the others have taught; a single stream learns from the draws that it weighs (Cornuet et al. 2012). Gaps are those of
means over runs from a long run of fixed proposals, in posterior deviations, with the error by how runs differ.
"""

import argparse
import pathlib
import time
import warnings
from dataclasses import replace

import torch
from default_call_cases import case
from headline import moments, of_fixed_proposals
from problems import determined_data, probit_model

import torchgpmc as tg
from torchgpmc.diagnostics.weights import kish_effective_size

LONG = 16_000


def problem(name, folder):
    """The model, and the method of the default call."""
    if name == "determined":
        model = probit_model(200, 10, ard=True, data=determined_data)
        return model, tg.recommend(model)
    if name == "housing":
        model, _, _ = case(folder, "housing+ard", 500)
        return model, tg.recommend(model)
    evidence = tg.evidence.SmoothProbit(tg.EP(), num_importance=64)
    return probit_model(200, 10, ard=True), tg.AMIS(evidence=evidence, degrees_of_freedom=30, begin=tg.AtPrior(arms=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", choices=["determined", "housing", "prior"], required=True)
    parser.add_argument("--data", type=pathlib.Path, help="folder of the data sets, for housing")
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    warnings.simplefilter("ignore", tg.SamplingWarning)
    model, method = problem(options.problem, options.data)
    truth, variance = of_fixed_proposals(model, method, LONG, range(999, 1001))
    print("| streams | CPU seconds | Kish's size | by how runs differ | by errors | off alike, sd: all means (largest error) |")
    print("|---" * 6 + "|")
    for num_streams in options.streams:
        began, means, kish = time.process_time(), [], []
        for seed in range(options.seeds):
            streamed = replace(method, num_streams=num_streams)
            posterior = tg.sample(model, streamed, num_samples=options.draws, seed=seed, progress=False)
            means.append(moments(posterior)[0])
            kish.append(kish_effective_size(posterior.log_weights))
        seconds, means = (time.process_time() - began) / options.seeds, torch.stack(means)
        gap, spread = (means.mean(0) - truth) / variance.sqrt(), means.std(0) / variance.sqrt()
        by_spread, by_errors = (1 / float(part.mean()) for part in (spread.square(), (means - truth).square().mean(0) / variance))
        print(
            f"| {num_streams} | {seconds:.1f} | {min(kish):.0f} to {max(kish):.0f} | {by_spread:.0f} | {by_errors:.0f} | ", end=""
        )
        print(", ".join(f"{float(a):.3f}" for a in gap) + f" ({float(spread.max()) / options.seeds**0.5:.3f}) |", flush=True)


if __name__ == "__main__":
    main()
