"""A schedule on virtual links and a virtual clock: how long it would take on a machine that one does not have.

``links`` says which links messages cross, ``clock`` runs a schedule over them.
"""
