"""Measuring: a step, and how training scales; tables and plots of it.

Launches processes and reads their results; imports no model and no strategy.
"""
