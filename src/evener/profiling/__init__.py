"""Model → Profile: every second and byte measured on one kind of device, through the driver's seam."""

from evener.core.profile import merge_profiles
from evener.profiling.measure import profile_model

__all__ = ["merge_profiles", "profile_model"]
