"""Parameters of a stage that live in host memory and come to the device as they are needed.

    host     │ layer 0 │ layer 1 │ layer 2 │ layer 3 │   the user's own parameters, in pinned memory
                  │ in, one ahead of its use        ▲
    device        └──► layer 1, layer 2 ────────────┘ gradients out, as each layer's are ready

flow       copies beside the computing, and how long computing waited for them
pieces     parameters that come and go together, and their guests on the device
residing   which layers are there, in which order they are wanted, what is kept
returning  gradients on their way to the host, one layer at a time
ondisk     the optimiser's state in a file, one parameter of it in memory
"""
