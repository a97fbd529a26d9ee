"""What a tensor becomes: pure functions over names, shapes, byte ranges and arrays.

No file, no network, no printing. `names` is the table of all tensors, `config` the sizes they must
have, `dense` and `experts` describe build tensors, `mxfp4` is the packed format.
"""
