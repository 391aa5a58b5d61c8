"""What works on accepted requests: training, sampling, checkpoints, and the futures that clients wait for.

May import: telemetry, wire, state and the rooms below them.
"""
