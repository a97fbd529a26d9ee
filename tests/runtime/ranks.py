"""Run by mlx.launch: load builds as the ranks of a group, continue a prompt, say what happened.

mlx.launch -n 2 --backend ring -- python -m tests.runtime.ranks CASES
where CASES is JSON: {"name": [split, the build of each rank]}.
"""

import json
import sys

import mlx.core as mx
from mlx_lm.generate import stream_generate

from kimi_k3_mlx.errors import KimiError
from kimi_k3_mlx.runtime.cluster import group_of, leave_together, shared_seed
from kimi_k3_mlx.runtime.generate import Decoding, Sampling, generate
from kimi_k3_mlx.runtime.load import Loaded, load, parameters

PROMPT, N_TOKENS = "def main(", 24
REPEATING = """def main(self):
        \"\"\"Return a list of tuples.

        The tuple is a list of the t

    def main("""


def greedy(build: Loaded) -> list[int]:
    """Tokens after the prompt."""
    stream = stream_generate(build.model, build.tokenizer, PROMPT, max_tokens=N_TOKENS)
    return [response.token for response in stream]


def looked_up(build: Loaded) -> str:
    """The text after a prompt with something to look up: drafts are kept, and taken back."""
    said = generate(build, REPEATING, Sampling(N_TOKENS), decoding=Decoding(lookup=True))
    return f"{said.tokens_from_drafts} from drafts: {said.text}"


def outcome(path: str, split: str, group: mx.distributed.Group) -> dict:
    """The tokens and the bytes of weights, or the error."""
    try:
        build = load(path, group=group, split=split)
    except KimiError as error:
        return {"error": type(error).__name__, "message": error.message}
    n_bytes = sum(array.nbytes for _, array in parameters(build.model))
    said = {"tokens": greedy(build), "text": looked_up(build)}
    leave_together(group)
    return said | {"n_bytes": n_bytes}


def main(cases: str) -> None:
    """One JSON line a case and rank."""
    group = group_of()
    rank = group.rank()
    for name, (split, paths) in json.loads(cases).items():
        found = outcome(paths[rank], split, group)
        line = {"case": name, "rank": rank, "seed": shared_seed(group, None), **found}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
