"""A run of the template: its configuration checked, its folder, what it prints and leaves; sweeps.

Knows Hydra and Lightning, the clock and the cores of `strategies/`, and no model and no data
set.
"""
