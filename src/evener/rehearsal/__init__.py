"""Devices and links that behave like others."""
