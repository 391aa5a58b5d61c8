"""Layers of experts with the LoRA of many tenants: a router sends each token to a few of them."""
