"""Decisions on a machine, reproduced from NCCL: channel search, rings, trees and tuning.

``plan.make_plan`` runs all stages.
"""
