"""What is trained with one process, with Horovod and with DDP, to be compared: see test_matrix.py.

Each case is a function of a strategy's name that returns numbers. Ranks share global batches of 8,
so that every strategy and every number of ranks sees the same samples in the same order. On GPUs
see test_gpu.py."""

from tests.matrix import checkpoints, metrics, optimization, parameters, precision

__all__ = ["checkpoints", "metrics", "optimization", "parameters", "precision"]
