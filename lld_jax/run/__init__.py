"""The folder of a run and its life: metrics, checkpoints, storage, the host's memory.

May import config and the protocol's trajectories. Whatever else is written into a work
folder comes from `model/hf.py`, an export; those two alone may have orbax.
"""
