"""What AMIS's means lose by proposals that were learned from the draws they weigh, beside weights by each draw's own proposal.

    python benchmarks/learned_proposals.py --peer FILE --seeds 16

FILE is the output of ``peers/numpyro_nuts.py 200 4 300 3000 1 sequential 10 10 determined``. The draws of a run are weighed twice:
against the mixture of all proposals (Cornuet et al. 2012), as AMIS does, and each by the proposal that it came from, which was
settled before. Gaps are those of means over runs from NumPyro's, in posterior deviations, with the error by how runs differ.
"""

import argparse
import json
import pathlib
import warnings

import torch
from problems import determined_data, probit_model

import torchgpmc as tg
from torchgpmc.diagnostics.weights import kish_effective_size
from torchgpmc.importance.adaptive import log_weights, own_log_weights
from torchgpmc.runs.run import Settings

ENOUGH, DRAWS = 400, 4000  # as the default call has them


def means(model, seed):
    """By both kinds of weights, of every hyperparameter, and variances by the first."""
    run = tg.recommend(model).prepare(model, Settings(DRAWS, None, None, None))
    generator = torch.Generator().manual_seed(seed)
    state, thetas = run.init(generator), []
    while not run.is_finished(state) and (not thetas or kish_effective_size(log_weights(state.draws)) < ENOUGH):
        state, draw, _ = run.advance(state, generator)
        thetas.append(draw.theta[0])
    values = torch.cat(thetas).exp()  # positive parameters all
    both = [torch.softmax(weights(state.draws), 0) for weights in (log_weights, own_log_weights)]
    mixture, own = (weight @ values for weight in both)
    return mixture, own, both[0] @ (values - mixture).square()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, default=16)
    options = parser.parse_args()
    warnings.simplefilter("ignore", tg.SamplingWarning)
    peer = json.loads(options.peer.read_text().splitlines()[-1])
    model = probit_model(200, 10, ard=True, data=determined_data)
    found = [torch.stack(columns) for columns in zip(*(means(model, seed) for seed in range(options.seeds)), strict=True)]
    deviation = found[2].mean(0).sqrt()
    print(f"NumPyro's own error: {peer['ess'] ** -0.5:.3f} at most")
    for name, values in zip(("all proposals", "its own"), found[:2], strict=True):
        gap = (values.mean(0) - torch.tensor(peer["means"]).double()) / deviation
        error = values.std(0) / len(values) ** 0.5 / deviation
        print(f"{name}: " + ", ".join(f"{float(a):.3f} ({float(b):.3f})" for a, b in zip(gap, error, strict=True)), flush=True)


if __name__ == "__main__":
    main()
