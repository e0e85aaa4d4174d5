"""Judging hosts: rules as data, graded findings, which hosts work together, environments that fit them."""
