"""Embedding tables that lie outside of the devices that train: rows travel, tables do not.

    ids of a micro-batch ──unique──► rows of the table ──► leaf on the device ──► the layer's output
                                            ▲                     │ backward
    optimiser of the table ◄── sum over micro-batches and devices ┘

`layer.py` stands in the model in the place of nn.Embedding and nn.EmbeddingBag; `table.py` is one table's
part on this device, `rows.py` and `tiered.py` are where its rows lie, `optimizers.py` how they move;
`exchange.py` takes ids and rows between devices that hold parts of one table, `sharing.py` says who has
which; `sums.py` joins the step's sums, norm and verdict. `ahead.py` sends rows to an accelerator before they
are asked for, over the lanes of `transfers.py`; `saving.py` is rows and state as checkpoints hold them.
"""
