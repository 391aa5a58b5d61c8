"""What operators see of a running server: metrics, traces, and logs with the ids of requests.

Services report to recorders such as :class:`~twinkle.server.telemetry.recording.TrainingRecorder`; nothing here changes
what services do. ``instruments.py`` lists all metrics.

May import: wire, state, tenancy, scheduling, backends, config and the nouns.
"""
