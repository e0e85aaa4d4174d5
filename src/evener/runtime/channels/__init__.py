"""Messages between the devices of one job: tuples of tensors, in order, each with a key that both ends know.

    send(tensors, to, key)                    receive(source, key, device=…).wait() -> tensors
        │                                         ▲
        ├── local    one process: handed over ────┤
        ├── shared   one host: a ring in shared memory, announced over a unix socket
        └── tcp      between hosts: a stream of messages over a connection for each direction

messages   what a message is on the wire
places     where a device runs, and the transport between two places with the reason for it
local      shared      tcp         the transports
ring       of `shared`;            doors, frames, porter, ahead   of `tcp`
stop       ends every wait, from any thread
channel    one device's end: a transport per peer, opened when first used
sums       of a few numbers over a channel
"""
