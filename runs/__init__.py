"""A run of the template: its configuration checked, its folder, what it prints and leaves; sweeps.

Knows Hydra and Lightning, and no model, no data set and no strategy.
"""
