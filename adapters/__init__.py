"""The same collectives for NumPy, JAX, MLX and Taichi; one module each, which imports its framework only when used."""
