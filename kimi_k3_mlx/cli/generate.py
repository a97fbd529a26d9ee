"""Continue a prompt with a build, through mlx-lm's own generation.

The text goes to stdout as it is decoded, the numbers to stderr. The prompt is continued as it
stands, pictures before it: no chat format is put around it. Code that lies in the build is never
executed.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from kimi_k3_mlx.cli._options import (
    Parser,
    common_options,
    count,
    folder,
    fraction,
    not_negative,
    positive,
    seed,
)
from kimi_k3_mlx.cli._output import progress, say, write, write_json
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.units import format_bytes

if TYPE_CHECKING:
    from mlx.core.distributed import Group

    from kimi_k3_mlx.runtime.generate import Completion, Decoding
    from kimi_k3_mlx.runtime.load import Loaded
    from kimi_k3_mlx.runtime.vision import Prompt

USAGE = "--model DIR -p TEXT [options]"
EXAMPLES = (
    "kimi-k3 generate --model ./Kimi-K3-mlx -p 'def quicksort('",
    "kimi-k3 generate --model ./Kimi-K3-mlx -p - -m 400 --temp 0.7 --top-p 0.95 < prompt.txt",
    "kimi-k3 generate --model ./Kimi-K3-mlx -p - -m 9000 --kv-bits 8 < file-to-rewrite.txt",
    "kimi-k3 generate --model ./Kimi-K3-mlx --image a.png --image b.jpg -p 'The pictures show'",
)


def add_options(parser: Parser) -> None:
    """Declare the options; names and defaults are those of mlx_lm.generate."""
    model = parser.add_argument_group("model and prompt")
    model.add_argument(
        "--model", metavar="DIR", type=folder, required=True, help="folder of a build"
    )
    model.add_argument(
        "-p", "--prompt", metavar="TEXT", required=True, help="text to continue; - reads stdin"
    )
    model.add_argument(
        "--image", metavar="FILE", action="append", help="picture, before the text; repeatable"
    )
    sampling_options(parser, max_tokens=100)
    decoding_options(parser)
    machine_options(parser)
    common_options(parser)


def machine_options(parser: Parser) -> None:
    """Declare how to use the machine, or several."""
    machine = parser.add_argument_group("machine")
    memory_options(machine)
    machine.add_argument(
        "--lazy", action="store_true", help="begin at once, read weights when they are first used"
    )
    machine.add_argument(
        "--pipeline", action="store_true",
        help="under mlx.launch: whole layers to each Mac, not a part of each layer",
    )  # fmt: skip


def memory_options(group: Any) -> None:
    """Declare how the weights are held in memory."""
    group.add_argument("--no-wire", action="store_true", help="let macOS page weights out")
    group.add_argument(
        "--force", action="store_true", help="load a build that is too large for this Mac"
    )


def sampling_options(parser: Parser, *, max_tokens: int) -> None:
    """Declare how tokens are chosen; names and defaults are those of mlx-lm."""
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "-m",
        "--max-tokens",
        metavar="N",
        type=positive,
        default=max_tokens,
        help="most tokens to generate",
    )
    sampling.add_argument(
        "--temp", metavar="T", type=not_negative, default=0.0, help="temperature; 0 is greedy"
    )
    sampling.add_argument(
        "--top-p", metavar="P", type=fraction, default=1.0, help="nucleus probability"
    )
    sampling.add_argument(
        "--top-k",
        metavar="K",
        type=count,
        default=0,
        help="most likely tokens to keep; 0 keeps all",
    )
    sampling.add_argument(
        "--min-p", metavar="P", type=fraction, default=0.0, help="least share of the best token"
    )
    sampling.add_argument("--seed", metavar="N", type=seed, help="seed of the sampler")


def decoding_options(parser: Parser) -> None:
    """Declare how to compute; the cache's options are those of mlx_lm.generate."""
    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--lookup",
        action=argparse.BooleanOptionalAction,
        help="draft from the prompt and the output; without either: only when --temp is 0",
    )
    speed.add_argument(
        "--draft-model", metavar="DIR", type=folder, help="small model with the same tokenizer"
    )
    speed.add_argument(
        "--num-draft-tokens",
        metavar="N",
        type=positive,
        help="most tokens of a draft (default: 8 by lookup, 3 by a draft model)",
    )
    speed.add_argument(
        "--prefill-step-size",
        metavar="N",
        type=positive,
        default=4096,
        help="prompt tokens of one pass",
    )
    cache_options(parser)


def cache_options(parser: Parser) -> None:
    """Declare how to keep the latents."""
    cache = parser.add_argument_group("cache")
    cache.add_argument(
        "--kv-bits", metavar="N", type=int, choices=(4, 8), help="quantize the latents: 4 or 8"
    )
    cache.add_argument(
        "--kv-group-size", metavar="N", type=int, choices=(32, 64), default=64, help="32 or 64"
    )
    cache.add_argument(
        "--quantized-kv-start",
        metavar="N",
        type=count,
        default=5000,
        help="tokens in the cache from which on it is quantized",
    )


def run(args: argparse.Namespace) -> None:
    """Load, generate, report; of several ranks, the first one does."""
    # transformers warns that it does not know K3; only its tokenizer is used.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from kimi_k3_mlx.runtime.cluster import group_of, leave_together, shared_seed
    from kimi_k3_mlx.runtime.generate import Sampling, generate
    from kimi_k3_mlx.runtime.wiring import wiring

    group = group_of(args.pipeline)
    check_choices(args, group)
    prompt = read_prompt(args.prompt)
    shown = group is None or group.rank() == 0
    seed_here = shared_seed(group, args.seed)
    sampling = Sampling(args.max_tokens, args.temp, args.top_p, args.top_k, args.min_p, seed_here)
    decoding = decoding_of(args)
    build, pictures = loaded(args, prompt, group)
    on_text = discard if args.json or not shown else stream
    with wiring(not args.no_wire):
        completion = generate(build, pictures or prompt, sampling, on_text, decoding)
        leave_together(group)
    if not shown:
        return
    if args.json:
        write_json({"version": 1} | vars(completion))
        return
    write("")
    if not args.quiet:
        say(statistics(completion))


def check_choices(args: argparse.Namespace, group: Group | None) -> None:
    """Raise UsageError for options that don't go together, and what mlx.launch can't do."""
    if args.draft_model and args.lookup:
        raise UsageError("a draft model and prompt lookup both draft.", "leave out --lookup.")
    if args.image and (args.draft_model or group):
        raise UsageError("pictures go with neither a draft model nor several Macs.")
    if group and args.draft_model:
        raise UsageError("a draft model runs on one Mac only.", "leave out --draft-model.")
    if group and args.prompt == "-":
        raise UsageError("mlx.launch gives its ranks no stdin to read.", "give the text: -p TEXT")


def loaded(
    args: argparse.Namespace, prompt: str, group: Group | None
) -> tuple[Loaded, Prompt | None]:
    """The build, and the prompt if it has pictures: what is wrong with them is said first."""
    from kimi_k3_mlx.runtime.cluster import PIPELINE, TENSOR
    from kimi_k3_mlx.runtime.generate import picture_prompt
    from kimi_k3_mlx.runtime.load import load
    from kimi_k3_mlx.runtime.vision import load_vision
    from kimi_k3_mlx.vision.images import open_image

    images = [open_image(name) for name in args.image or ()]
    eyes = load_vision(args.model) if images else None
    quiet = args.quiet or args.json or (group is not None and group.rank() > 0)
    with progress(quiet) as shown:
        build = load(
            args.model,
            lazy=args.lazy,
            progress=shown,
            force=args.force,
            group=group,
            split=PIPELINE if args.pipeline else TENSOR,
        )
    return build, picture_prompt(build, eyes, images, prompt) if eyes else None


def decoding_of(args: argparse.Namespace) -> Decoding:
    """How to compute; what can't be is found before the build is loaded, so is a draft model."""
    from kimi_k3_mlx.runtime.build import check_build
    from kimi_k3_mlx.runtime.cache import check_kv_bits
    from kimi_k3_mlx.runtime.draft import load_draft
    from kimi_k3_mlx.runtime.generate import Decoding
    from kimi_k3_mlx.runtime.load import load_tokenizer

    draft = None
    if args.kv_bits is not None:
        check_kv_bits(check_build(args.model).config["text_config"], args.kv_group_size)
    if args.draft_model:
        check_build(args.model)
        draft = load_draft(args.draft_model, load_tokenizer(args.model, None))
    return Decoding(
        args.lookup,
        draft,
        args.num_draft_tokens,
        args.kv_bits,
        args.kv_group_size,
        args.quantized_kv_start,
        args.prefill_step_size,
    )


def read_prompt(option: str) -> str:
    """The prompt, from the option or from stdin; bytes that are no text may come as surrogates."""
    try:
        prompt = sys.stdin.read() if option == "-" else option
        prompt.encode()
    except UnicodeError as error:
        raise UsageError("the prompt is not UTF-8.", "convert it: iconv -f L1 -t UTF-8") from error
    if not prompt:
        raise UsageError("the prompt is empty.", "give some text: -p 'def main('")
    return prompt


def stream(text: str) -> None:
    """Show a piece of text at once."""
    write(text, end="")


def discard(text: str) -> None:
    """With --json the text comes at the end."""


def statistics(completion: Completion) -> str:
    """Counts, time and memory; speeds only if the weights were wired."""
    speeds = ""
    if completion.wired:
        speeds = (
            f", prompt {completion.prompt_tokens_per_second:.1f} tok/s"
            f", generation {completion.generation_tokens_per_second:.1f} tok/s"
        )
    return (
        f"[{completion.prompt_tokens} prompt + {completion.generation_tokens} generated tokens "
        f"in {completion.seconds:.1f} s{speeds}, {completion.tokens_from_drafts} from drafts, "
        f"peak {format_bytes(completion.peak_memory)}, "
        f"stopped by {completion.finish_reason}]"
    )
