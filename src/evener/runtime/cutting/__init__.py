"""Cutting an unmodified model into stages of consecutive layers; glue and skips are carried along."""

from evener.runtime.cutting.assembling import CutPoint, Tie
from evener.runtime.cutting.cutting import Cut, cut, legal_cuts
from evener.runtime.cutting.layers import layer_names
from evener.runtime.cutting.stage import Slot, StageModule

__all__ = ["Cut", "CutPoint", "Slot", "StageModule", "Tie", "cut", "layer_names", "legal_cuts"]
