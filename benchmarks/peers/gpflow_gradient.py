"""GPflow's SGPMC log posterior density and gradient, compiled by tf.function; prints the median milliseconds."""

import json
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import gpflow
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from problems import sparse_data

x, y = sparse_data(1000, 18)
kernel = gpflow.kernels.SquaredExponential(variance=2.0, lengthscales=np.full(18, np.e))
kernel.lengthscales.prior = tfp.distributions.Gamma(np.float64(2.0), np.float64(0.5))
kernel.variance.prior = tfp.distributions.Gamma(np.float64(2.0), np.float64(1.0))
model = gpflow.models.SGPMC((x, y[:, None]), kernel, gpflow.likelihoods.Bernoulli(), inducing_variable=x[:50].copy())
gpflow.set_trainable(model.inducing_variable, False)


@tf.function
def gradient():
    with tf.GradientTape() as tape:
        value = model.log_posterior_density()
    return value, tape.gradient(value, model.trainable_variables)


gradient()
times = []
deadline = time.perf_counter() + 4.0
while time.perf_counter() < deadline:
    began = time.perf_counter()
    value, _ = gradient()
    value.numpy()
    times.append(time.perf_counter() - began)
print(json.dumps({"ms": 1e3 * statistics.median(times[5:])}))
