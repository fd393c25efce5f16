"""Simulation on virtual links and a virtual clock: timing of machines that are not at hand.

``links`` describes the links that messages cross, ``clock`` runs a schedule over them.
"""
