"""What an agent says and hears: tags, trajectories, tokens as bytes, environments.

Imports nothing of the package and no array library but numpy: it is text, ids and
plain data, and can be used without a model.
"""
