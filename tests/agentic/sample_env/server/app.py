"""A module that must not be imported: only those named …_environment or …_env are."""

raise AssertionError("this module is no environment")
