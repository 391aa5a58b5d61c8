"""The Tinker protocol's bytes: protobuf and JSON on one side, the service's nouns on the other."""
