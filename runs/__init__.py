"""What a run of template.py checks, prints and leaves; sweeps and exports of runs.

It uses Hydra, Lightning, and the clock and cores of `strategies/`, and knows no model or data set.
"""
