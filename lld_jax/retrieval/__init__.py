"""Passage retrieval: `build.open_index(path).search(["who founded Velkor"], k=3)[0]`.

May import the protocol. Alone in having scann. A path is a corpus file, or a folder
that `build` wrote; how passages are shown to a policy is the protocol's business.
"""
