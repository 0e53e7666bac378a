"""What a step says about the health of a run, and what is done about it.

May import the paper and the protocol's trajectories. It decides on numbers; it neither
computes log-probs nor changes weights.
"""
