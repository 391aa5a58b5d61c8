"""The frozen base model: how it is loaded, prepared for adapters, and run on packed sequences of many tenants."""
