"""Watching a run from outside: its folder is followed, and told on a web page, to Prometheus, in log files.

Nothing here runs in a process that trains: the run only writes its files, as it does unwatched.
"""
