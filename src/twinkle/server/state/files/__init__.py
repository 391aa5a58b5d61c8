"""The files of a data directory: where they lie, their checksums, their modes."""
