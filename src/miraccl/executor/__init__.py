"""Executors of schedules: ``cpu`` in compiled code on processors, ``cuda`` in kernels on NVIDIA
GPUs.
"""
