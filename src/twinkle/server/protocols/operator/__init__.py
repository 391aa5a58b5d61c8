"""Routes for people and machines that watch a server: health, metrics, audit, billing, the dashboard."""
