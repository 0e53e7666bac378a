"""Passage retrieval: a corpus file in, ranked passages out.

from lld_jax.retrieval.build import open_index
index = open_index("corpus.jsonl.gz")  # or a folder written by build
passages = index.search(["who founded Velkor Mills"], k=3)[0]
"""
