"""Protocol of the verbs transport as data and pure functions over integers.

The functions of ``rows`` and ``policy`` are compiled from this text for the data path.
"""
