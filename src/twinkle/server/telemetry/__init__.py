"""What operators see of a running server: metrics, traces, logs with the ids of the requests they are about.

Services record into a :class:`~twinkle.server.telemetry.recording.TrainingRecorder` or its like; nothing here changes
what they do. ``instruments.py`` is the list of all metrics.

May import: wire, state, tenancy, scheduling, backends, config and the nouns.
"""
