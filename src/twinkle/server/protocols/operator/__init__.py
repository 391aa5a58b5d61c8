"""Routes for operators and for people in a browser: status, health, metrics, accounts, the dashboard.

May import: http, gateway and the rooms below.
"""
