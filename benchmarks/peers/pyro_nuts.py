"""Pyro's NUTS on the probit GP of ``problems.probit_data``, d=2 isotropic, written as a Pyro user would.

    python peers/pyro_nuts.py DATA WARM-UP DRAWS SEED

One chain, its gradients uncompiled (Pyro's default). One line of JSON.
"""

import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import pyro
import pyro.distributions as dist
import torch
from arviz_stats.base import array_stats
from problems import probit_data
from pyro.infer import MCMC, NUTS

num_data, warmup_steps, num_samples, seed = map(int, sys.argv[1:5])
torch.set_default_dtype(torch.float64)
x, y = (torch.as_tensor(array) for array in probit_data(num_data, 2))
square = (x.unsqueeze(1) - x).square().sum(-1)
jitter = 1e-6 * torch.eye(num_data)


def model():
    outputscale = pyro.sample("outputscale", dist.Gamma(1.2, 0.2))
    lengthscale = pyro.sample("lengthscale", dist.Gamma(1.0, 2**-0.5))
    v = pyro.sample("v", dist.Normal(torch.zeros(num_data), 1.0).to_event(1))
    covariance = outputscale * torch.exp(-0.5 * square / lengthscale**2) + jitter
    pyro.factor("likelihood", torch.special.log_ndtr(y * (torch.linalg.cholesky(covariance) @ v)).sum())


pyro.set_rng_seed(seed)
sampler = MCMC(NUTS(model), num_samples=num_samples, warmup_steps=warmup_steps, disable_progbar=True)
began = time.perf_counter()
sampler.run()
seconds = time.perf_counter() - began
samples = sampler.get_samples(group_by_chain=True)
draws = [samples[name].numpy() for name in ("outputscale", "lengthscale")]
ess = min(float(array_stats.ess(values)) for values in draws)
row = {"ess": ess, "seconds": seconds, "ess_a_second": ess / seconds, "means": [float(values.mean()) for values in draws]}
print(json.dumps(row))
