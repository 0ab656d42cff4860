"""Measuring: a step, and how training scales; tables and plots of it.

Launches processes and reads their results; what runs in them and imports the strategy is in
`*_worker.py`.
"""
