"""A run as one HTML page that needs nothing else: no server, no network, no other file.

run folder ──folder──► RunFiles ──build──► Document ──html──► page (report.html, or fed live by `serving`)
"""
