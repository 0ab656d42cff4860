"""Measurements: how long a training step takes, how training scales, what the network carries.

Each command of the Makefile is a module, whose docstring says what is measured, how, and what is
left out. It launches processes and reads their results; the code of those processes, which imports
the strategy, is in `*_worker.py`. Tables and plots are made from JSON files alone: those in
results/, for predict and profiling those in the folder of a run.

    step                 a step beside DDP and raw loops       make bench-step
    scaling              the same job on 1, 2, 4, ... ranks    make bench, bench-check, bench-readme
    allreduce            all-reduces of several sizes          make bench-allreduce
    predict, cost_*      a step on more ranks than there are   make predict, predict-proof
    losses               is the result that of one process?    make bench-losses
    profiling            where the time of a step goes         make profile
    start, overheads     launching, and what grows with ranks  make bench-start, bench-overheads
    split                a network on two devices              make bench-split
"""
