"""Tools for decay gates: audit of kernels, calibration of g_min, migration from softplus gates to bounded ones.

``trine.decay.calibrate``: which bound fits which tile, number format and anchor, and where a model's gates live.
``trine.decay.migrate``: a checkpoint with softplus gates in the bounded form, with a report of what changed.
"""
