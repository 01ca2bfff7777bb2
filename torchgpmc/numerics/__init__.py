"""Numbers: special functions, factorisations, random numbers, quadrature, L-BFGS, and the threads they run on."""
