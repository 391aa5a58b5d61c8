"""The routes of Tinker's protocol."""
