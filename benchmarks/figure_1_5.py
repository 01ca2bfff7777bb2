"""Figure 1.5 of paper C: classification by Gibbs-like sampling, control variables one by one and all at once, aGrad, NUTS.

    python benchmarks/figure_1_5.py --data DATA --record FOLDER --fraction 1 --sets wbc pima --methods control walk aGrad NUTS

Wisconsin breast cancer and Pima diabetes, standardised, 20 % held out; isotropic RBF kernel, probit, hyperparameters at the
maximum of EP's evidence. The paper's 5e4 sweeps, thinned by 5, are shared among 8 chains, each after 2000 of burn-in (the
paper's one chain: 1e4); NUTS: 2000 draws of each. The probability of a class given f is in closed form, and its standard error
that of a mean over chains. Each run leaves its numbers in the folder; the tables and docs/results/figure_1_5.png are of the
methods named.
"""

import argparse
import itertools
import json
import pathlib
import time

import torch
from held_out import halves, quiet
from matplotlib.figure import Figure
from real_data import OUTPUT, classification_set, isotropic_probit

import torchgpmc as tg

SETS = {"wbc": "breast", "pima": "pima"}
CHAINS, THINNING = 8, 5
BURN_IN, SWEEPS, NUTS_DRAWS = 2_000, 50_000, 2_000
METHODS = {
    "Gibbs": tg.GibbsLike(thinning=THINNING),
    "control": tg.ControlVariables(thinning=THINNING),
    "walk": tg.ControlVariables(all_at_once=True, underrelaxation=0.95, thinning=4 * THINNING),  # one proposal, no sweep of many
    "aGrad": tg.AuxiliaryGradient(thinning=THINNING),
    "NUTS": tg.NUTS(whitening=tg.EP()),
}
TRACE = 200  # points of a trace


def split_of(folder, name):
    """Inputs and labels, of training and of test rows."""
    x, y = (torch.as_tensor(values) for values in classification_set(folder, SETS[name]))
    train, test = halves(len(x), len(x) - len(x) // 5, 0)
    return x[train], y[train], x[test], y[test]


def fitted(folder, name):
    """The model at the maximum of EP's evidence with every hyperparameter fixed, and EP's probabilities of the test labels 1."""
    x, y, test_x, _ = split_of(folder, name)
    began = time.process_time()
    found = tg.fit(isotropic_probit(x, y), tg.EP(), num_starts=1)
    probs = tg.approximations.predict(found, found.layout.present(found), tg.EP(), test_x).probs
    kernel = found.kernel
    values = {"lengthscale": kernel.base_kernel.lengthscale.item(), "outputscale": kernel.outputscale.item()}
    return {**values, "probs": probs.tolist(), "seconds": time.process_time() - began}


def at(values, x, y):
    model = isotropic_probit(x, y)
    model.kernel.base_kernel.lengthscale, model.kernel.outputscale = values["lengthscale"], values["outputscale"]
    return tg.GP(x, y, model.kernel.requires_grad_(False), model.likelihood)


def sampled(model, method, draws, burn_in, test_x):
    began = time.process_time()
    posterior = tg.sample(model, method, num_samples=draws, warmup_steps=burn_in, num_chains=CHAINS, seed=0, progress=False)
    seconds = time.process_time() - began
    f = posterior.latents
    with torch.no_grad():
        covariance = model.kernel(model.train_x).to_dense() + model.jitter * torch.eye(f.shape[-1], dtype=f.dtype)
        cross = model.kernel(model.train_x, test_x).to_dense()
        gain = torch.linalg.solve(covariance, cross)
        variance = model.kernel.outputscale - (cross * gain).sum(0)
        probs = torch.special.ndtr(f @ gain / (1 + variance).sqrt()).mean(1)
        trace = torch.special.log_ndtr((2 * model.train_y - 1) * f).sum(-1)[0]
    return {
        "probs": probs.tolist(),
        "trace": trace[:: max(1, len(trace) // TRACE)].tolist(),
        "rhat": tg.diagnostics.worst_latent(f)[1],
        "sweeps": f"{burn_in} + {draws} x {method.thinning}",
        "seconds": seconds,
    }


def scores(probs, labels):
    """Share of wrong labels, and mean negative log probability of the right ones."""
    wrong = ((probs > 0.5) != (labels == 1)).double().mean()
    return float(wrong), float(-torch.where(labels == 1, probs, 1 - probs).log().mean())


def of_chains(run, labels):
    """Class probabilities ``(C, T)``; EP is one chain."""
    return torch.tensor(run["probs"], dtype=torch.float64).view(-1, len(labels))


def report(found, folder):
    print("| set | method | sweeps a chain | R-hat of the worst latent | test error | negative log likelihood | CPU s |")
    print("|---|---|---|---|---|---|---|")
    labels = {name: split_of(folder, name)[-1] for name in found}
    for name, runs in found.items():
        for method, run in runs.items():
            error, loss = scores(of_chains(run, labels[name]).mean(0), labels[name])
            about = f"{run['sweeps']} | {run['rhat']:.3f}" if "sweeps" in run else " | "
            print(f"| {name} | {method} | {about} | {error:.4f} | {loss:.4f} | {run['seconds']:.0f} |")
    print("\n| set | pair | largest difference of a probability | its error | largest error | differences / errors, rms |")
    print("|---|---|---|---|---|---|")
    for name, runs in found.items():
        for one, other in itertools.combinations([method for method in runs if method != "Gibbs"], 2):
            chains = [of_chains(runs[method], labels[name]) for method in (one, other)]
            away = (chains[0].mean(0) - chains[1].mean(0)).abs()
            error = sum(part.var(0) / len(part) for part in chains if len(part) > 1).sqrt()
            worst = int(away.argmax())
            print(
                f"| {name} | {one}, {other} | {away[worst]:.4f} | {error[worst]:.4f} | {error.max():.4f} | "
                f"{(away / error).square().mean().sqrt():.2f} |"
            )


def draw(found, folder):
    figure = Figure(figsize=(14, 3.4), layout="constrained")
    traced = [method for method in METHODS if any(method in runs for runs in found.values())]
    *panels, right = figure.subplots(1, len(traced) + 1)
    for panel, method in zip(panels, traced, strict=True):
        for name, runs in found.items():
            if method in runs:
                panel.plot(runs[method]["trace"], label=name, linewidth=0.8)
        panel.set(title=f"log likelihood, {method}", xlabel="draws of one chain")
        panel.legend()
    ticks = []
    for name, runs in found.items():
        labels = split_of(folder, name)[-1]
        for method, run in runs.items():
            error, loss = scores(of_chains(run, labels).mean(0), labels)
            right.bar(len(ticks) - 0.2, error, 0.4, color="lightgray")
            right.bar(len(ticks) + 0.2, loss, 0.4, color="black")
            ticks.append(f"{name} {method}")
    right.set_xticks(range(len(ticks)), ticks, rotation=60, ha="right", fontsize=7)
    right.set(title="error (grey), loss")
    figure.savefig(OUTPUT / "figure_1_5.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the data sets")
    parser.add_argument("--record", type=pathlib.Path, required=True, help="folder of what is done")
    parser.add_argument("--fraction", type=float, default=1.0, help="of the sweeps and draws")
    parser.add_argument("--sets", nargs="*", choices=list(SETS), default=list(SETS))
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    arguments = parser.parse_args()
    quiet()
    arguments.record.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in arguments.sets:
        fit = recorded(arguments.record / f"{name}_EP.json", fitted, arguments.data, name)
        found[name] = {"EP": fit}
        x, y, test_x, _ = split_of(arguments.data, name)
        for method in arguments.methods:
            draws = NUTS_DRAWS if method == "NUTS" else SWEEPS // THINNING // CHAINS
            draws = int(arguments.fraction * draws)
            burn_in = 200 if method == "NUTS" else int(arguments.fraction * BURN_IN)
            path = arguments.record / f"{name}_{method}.json"
            model = at(fit, x, y)
            found[name][method] = recorded(path, sampled, model, METHODS[method], draws, burn_in, test_x)
    report(found, arguments.data)
    draw(found, arguments.data)


def recorded(path, make, *arguments):
    """What the file holds, or what ``make`` returns, which it then holds."""
    if not path.exists():
        path.write_text(json.dumps(make(*arguments)))
    return json.loads(path.read_text())


if __name__ == "__main__":
    main()
