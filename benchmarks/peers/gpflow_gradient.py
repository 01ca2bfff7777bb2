"""GPflow's SGPMC log posterior density and gradient, compiled by tf.function; prints median milliseconds.

python gpflow_gradient.py N D M CLASSES
"""

import json
import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import gpflow
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from problems import class_data, sparse_data

threads = int(os.environ.get("OMP_NUM_THREADS", 0))  # TensorFlow's own pools know nothing of it
tf.config.threading.set_intra_op_parallelism_threads(threads)
tf.config.threading.set_inter_op_parallelism_threads(threads)

num_data, num_columns, num_inducing, num_classes = map(int, sys.argv[1:])
x, y = sparse_data(num_data, num_columns) if num_classes == 1 else class_data(num_data, num_columns, num_classes)
lengthscales = np.full(num_columns, np.e * max(1.0, num_columns / 18) ** 0.5)
kernel = gpflow.kernels.SquaredExponential(variance=2.0, lengthscales=lengthscales)
kernel.lengthscales.prior = tfp.distributions.Gamma(np.float64(2.0), np.float64(0.5))
kernel.variance.prior = tfp.distributions.Gamma(np.float64(2.0), np.float64(1.0))
likelihood = gpflow.likelihoods.Bernoulli() if num_classes == 1 else gpflow.likelihoods.MultiClass(num_classes)
inducing = x[:num_inducing].copy()
model = gpflow.models.SGPMC((x, y[:, None]), kernel, likelihood, inducing_variable=inducing, num_latent_gps=num_classes)
gpflow.set_trainable(model.inducing_variable, False)


@tf.function
def gradient():
    with tf.GradientTape() as tape:
        value = model.log_posterior_density()
    return value, tape.gradient(value, model.trainable_variables)


gradient()
gradient()
times, processor = [], []
deadline = time.perf_counter() + 4.0
while time.perf_counter() < deadline or len(times) < 5:
    began, began_processor = time.perf_counter(), time.process_time()
    value, _ = gradient()
    value.numpy()
    times.append(time.perf_counter() - began)
    processor.append(time.process_time() - began_processor)
print(json.dumps({"ms": 1e3 * statistics.median(times), "processor_ms": 1e3 * statistics.median(processor)}))
