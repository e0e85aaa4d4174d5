"""Devices and links that behave like those of a fleet file, at the runtime's seams (`core/seams.py`).

counting   what an action asks of a device: FLOPs by family and dtype, operations, bytes
pace       that work → seconds on a device of the fleet file
driver     runs an action and sleeps out the rest of its seconds
trouble    slow spells and heavy-tailed noise on those seconds
wire       sums really, and lets the sum take the seconds of the fleet's links
verdict    is this machine fast enough for the fleet, and were the timings kept
device     an accelerator that is not there: memory, clock and mistakes of its own
pacer      what both kinds of driver are to wires and channels

On paced CPUs memory is not rehearsed: a process cannot cap what torch allocates there, so `memory_bytes`
limits plans and not the run.
"""
