"""Sampling in our own protocol: features or conversations in, features that go on from there out."""
