"""A run of the template: its configuration checked, its folder, what it prints and leaves.

Knows Hydra and Lightning, and no model, no data set and no strategy.
"""
