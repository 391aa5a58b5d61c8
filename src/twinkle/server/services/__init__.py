"""The services that work on accepted requests: training, sampling, checkpoints; and the futures clients wait for.

May import: telemetry, wire, state and the packages below them.
"""
