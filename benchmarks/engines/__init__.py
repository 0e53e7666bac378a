"""Rollout engines under one command line; each runs as a process of its own."""
