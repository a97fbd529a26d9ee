"""One decoder layer in memory at a time, for any number of tokens and variants of the model.

`layers` opens a checkpoint, `engine.run_stream` pushes sequences through it and shows an observer
what `kimi_k3`'s own layers compute. `budget` divides the work into micro-batches and groups,
`activations` holds what runs between layers, and `journal` makes a run survive a kill.
"""
