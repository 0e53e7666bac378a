"""The folder of a run and its life: metrics, checkpoints, storage, the host's memory.

May import config and the protocol's trajectories. The only room that writes into a work
folder, and with `model/hf.py` the only one with orbax.
"""
