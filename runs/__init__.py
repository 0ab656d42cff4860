"""A run of the template: its configuration checked, its folder, what it prints and leaves; sweeps.

Knows Hydra and Lightning, the clock, cores and timeline of `strategies/`, and no model and no data
set.
"""
