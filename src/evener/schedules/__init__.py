"""Schedules: who does what, in which order, for any stage → device map."""

from evener.schedules.check import check, ensure
from evener.schedules.make import NAMES, make
from evener.schedules.picture import picture

__all__ = ["NAMES", "check", "ensure", "make", "picture"]
