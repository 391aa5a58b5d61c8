"""Checksums of rows and copies of what all tenants depend on: how damage is found, named and repaired."""
