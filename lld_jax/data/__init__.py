"""Question sets, and the encyclopaedia of invented names.

Imports nothing of the package. Passages for search are retrieval's.
"""
