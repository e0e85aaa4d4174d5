"""Devices and links that behave like those of a fleet file, at the runtime's two seams (`core/seams.py`).

counting   what an action asks of a device: FLOPs by family and dtype, operations, bytes
pace       that work → seconds on a device of the fleet file
driver     runs an action and sleeps out the rest of its seconds
trouble    slow spells and heavy-tailed noise on those seconds
wire       sums really, and lets the sum take the seconds of the fleet's links
verdict    is this machine fast enough for the fleet, and were the timings kept

Not rehearsed: memory. A process cannot cap what torch allocates on a CPU, so `memory_bytes` of a rehearsed
device limits plans and not the run.
"""
