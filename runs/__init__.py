"""What a run of template.py checks, prints and leaves; sweeps and exports of runs.

It uses Hydra, Lightning and `strategies/`, and knows no model or data set.
"""
