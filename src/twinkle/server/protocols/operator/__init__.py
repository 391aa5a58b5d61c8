"""Routes for operators and for people: status, health, metrics, accounts, the dashboard.

May import: http, gateway and the rooms below.
"""
