"""A server for OpenAI's chat completions, on mlx-lm's.

`request` reads what a client asks for, `prompt` makes token ids of it, `engine` generates, `reply`
says what came out in OpenAI's words, `handler` speaks HTTP, `serve` starts and ends all of it.
mlx-lm has the threads, the queue, sampling and batches.
"""
