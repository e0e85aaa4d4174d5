"""An accelerator that is not there: torch's device type `rehearsal`, in Python, one device in a process.

memory     blocks and segments as a caching allocator hands them out, with a cap
clock      the device's own time: streams, engines, and a host that runs ahead
roofline   what an operation takes: max(flops / rate, bytes / bandwidth) + launch
tensor     a tensor of the device: real values on the CPU, out of reach of CPU tensors
dispatch   one operation: unwrap, check where everything lies, compute, wrap, charge
copies     what moves between host and device, and what catches a buffer that is used too early
module     torch.rehearsal, and torch.accelerator's calls
backend    registers all of that with torch, once in a process

A process in which it is registered has `rehearsal` as torch's accelerator until it ends: torch keeps one
PrivateUse1 backend for good. What a real accelerator does that this one does not is in docs/rehearsal.md.
"""
