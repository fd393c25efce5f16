"""Collectives as data.

``ir`` has the records, ``interpret`` defines their meaning, ``verify`` proves schedules correct,
``catalog`` and ``algos`` hold the algorithms, ``text`` is the readable form, ``passes`` transforms
schedules and ``cost`` counts steps and bytes.
"""
