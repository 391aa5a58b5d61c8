"""The environments of the stand-in, which OpenEnv's servers run; an embedded OpenEnv constructs them directly."""
