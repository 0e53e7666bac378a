"""Trajectories to arrays to new weights: the batch, its rows, the jitted update.

May import what lies below it: rollout's policy, the model, diagnosis, the protocol and
the paper. No host loop, no file and no retriever belongs here.
"""
