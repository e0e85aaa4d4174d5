"""Checkpoints: one folder for each, complete or not there, readable by anything that reads safetensors.

    RUN/checkpoints/samples-000000000640/
        shard-00001-of-00003.safetensors    what one device wrote: tensors, each in one shard only
        shard-00002-of-00003.safetensors
        shard-00003-of-00003.safetensors
        manifest.json                       position, who wrote what, a checksum of each shard and of itself

It is written as .samples-000000000640.TOKEN.partial, then renamed when all is on disk: that is the commit.
"""
