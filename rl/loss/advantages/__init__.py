"""Advantage estimators: from the rewards of a batch of rollouts to the advantage of each of their tokens.

Pure numpy, in float64.
"""
