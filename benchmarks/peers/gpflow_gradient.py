"""GPflow's SGPMC log posterior density and gradient, compiled by tf.function; times on request (processes.Worker).

python gpflow_gradient.py N D M CLASSES THREADS
"""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import gpflow
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from problems import class_data, sparse_data
from processes import serve

num_data, num_columns, num_inducing, num_classes, threads = map(int, sys.argv[1:])
tf.config.threading.set_intra_op_parallelism_threads(threads)
tf.config.threading.set_inter_op_parallelism_threads(threads)
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


def value_and_gradient():
    value, _ = gradient()
    value.numpy()


serve(value_and_gradient, time.process_time if threads == 1 else time.perf_counter)
