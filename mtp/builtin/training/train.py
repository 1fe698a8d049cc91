"""The training of the built-in model: backbone and head together, then the head alone on the backbone's text.

    python -m mtp.builtin.training.train --docs /usr/share/doc/python3.11/html/_sources --out checkpoint

It needs the `train` extra (torch) and one GPU; README.md has the time it took. Seeds are fixed: corpus,
tokenizer and the order of batches are the same in every run on the same files.
"""

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from mtp.builtin.training import corpus, delta, evaluate
from mtp.builtin.training import tokenizer as bpe
from mtp.builtin.training.data import Split, split
from mtp.builtin.training.loss import STRIDE, losses
from mtp.builtin.training.model import MAX_POSITIONS, MtpModel

TOKENS_PER_STEP = 65_536
PEAK_RATE, FINAL_RATE = 2e-3, 2e-5
HEAD_RATE = 5e-4  # peak rate while the head is trained alone
WARMUP_STEPS = 200
WEIGHT_DECAY = 0.1
CLIP = 1.0
LENGTH, SHORT_LENGTH = (
    2048,
    512,
)  # tokens per row of the corpus, and per row of generated text
MAX_DIFFERENCE = 1e-3  # largest difference between the two implementations of the delta rule
LOG_EVERY, EVALUATE_EVERY = 100, 500


def rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine down to FINAL_RATE."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return FINAL_RATE + (peak - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return AdamW with decay for matrices only, not for embedding, norms, convolutions and per-head scalars."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed_tokens" in name]
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def fit(
    model: MtpModel,
    batch: Callable[[int, torch.Generator], Tensor],
    steps: int,
    peak: float,
    held_out: Split,
    head_only: bool,
    seed: int,
    out: Path,
) -> None:
    """Run `steps` optimizer steps on the rows [B, T + 1] that `batch(step, generator)` returns.

    The checkpoint is saved to `out` every EVALUATE_EVERY steps.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    adam = optimizer(model)
    started = time.monotonic()
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = rate(step, steps, peak)
        tokens = batch(step, generator)
        offset = torch.randint(STRIDE, (), generator=generator).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            result = losses(model, tokens, offset)
        result.total(head_only).backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], CLIP)
        adam.step()
        adam.zero_grad()
        if (step + 1) % LOG_EVERY == 0 or step == 0:
            values = f"loss {result.backbone:.3f} head {result.head:.3f} chain {result.chain:.3f}"
            equal = "/".join(f"{value:.3f}" for value in result.agreement.tolist())
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{steps} {values} equal {equal} {seconds:.0f}s", flush=True)
        if (step + 1) % EVALUATE_EVERY == 0:
            found = evaluate.losses(model, held_out)
            print(f"  held-out {json.dumps(found)}", flush=True)
            model.save(out)


def prepare(
    libraries: Sequence[Path], docs: Path | None, out: Path, seed: int
) -> tuple[Split, Split]:
    """Read the corpus, write the tokenizer to `out`, and return the training split and the held-out split."""
    documents = corpus.build(libraries, docs)
    seen = [document for document in documents if not document.held_out]
    kept = [document for document in documents if document.held_out]
    tokenizer = bpe.train(document.text for document in seen)
    bpe.save(tokenizer, out, MAX_POSITIONS)
    train, held_out = split(seen, tokenizer, out, seed), split(kept, tokenizer, out, seed)
    sizes = {
        "documents": len(seen),
        "characters": sum(len(document.text) for document in seen),
        "tokens": len(train.text.tokens),
        "conversations": len(train.chat.starts),
        "chat_tokens": len(train.chat.tokens),
        "held_out_documents": len(kept),
        "held_out_tokens": len(held_out.text.tokens),
    }
    print(json.dumps(sizes), flush=True)
    (out / "corpus.json").write_text(json.dumps(sizes, indent=2) + "\n")
    return train, held_out


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    own = Path(sysconfig.get_path("stdlib"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--library",
        type=Path,
        action="append",
        help=f"lib/python3.x, newest first; repeat (default {own.name})",
    )
    parser.add_argument("--docs", type=Path, help="folder of the documentation's reST sources")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the checkpoint and the evaluation"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=5500,
        help="steps of backbone and head together (default %(default)s)",
    )
    parser.add_argument(
        "--head-steps",
        type=int,
        default=800,
        help="steps of the head alone afterwards (default %(default)s)",
    )
    parser.add_argument(
        "--dropout",
        type=float,
        default=0.1,
        help="dropout on the additions of a layer (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.library = options.library or [own]
    return options


def main() -> None:
    """Build the corpus and the tokenizer, train the model, and evaluate it."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, held_out = prepare(options.library, options.docs, options.out, options.seed)
    train, held_out = train.to(device), held_out.to(device)

    if (difference := delta.check(device)) > MAX_DIFFERENCE:
        raise RuntimeError(
            f"delta.chunk_gated_delta_rule differs from the one of transformers by {difference:.1e}"
        )
    modeling_qwen3_5.torch_chunk_gated_delta_rule = delta.chunk_gated_delta_rule
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(options.seed)
    model = MtpModel(options.dropout).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    model.compile_parts()

    def text_batch(_: int, generator: torch.Generator) -> Tensor:
        """Return a batch of the corpus."""
        return train.batch(TOKENS_PER_STEP // LENGTH, LENGTH + 1, generator)

    fit(
        model,
        text_batch,
        options.steps,
        PEAK_RATE,
        held_out,
        head_only=False,
        seed=options.seed,
        out=options.out,
    )
    model.save(options.out)

    # From here on the weights are those of the file. In use, the head predicts the backbone's greedy choices on the
    # backbone's own text. So half of the last training rows are text of the backbone.
    model.load(options.out)
    model.freeze_backbone()
    written = evaluate.continuations(model, train, length=SHORT_LENGTH + 1, seed=options.seed)

    def mixed_batch(_: int, generator: torch.Generator) -> Tensor:
        """Return a batch of half corpus and half text of the backbone."""
        size = TOKENS_PER_STEP // SHORT_LENGTH // 2
        rows = torch.randint(len(written), (size,), generator=generator).to(device)
        return torch.cat([train.batch(size, SHORT_LENGTH + 1, generator), written[rows]])

    fit(
        model,
        mixed_batch,
        options.head_steps,
        HEAD_RATE,
        held_out,
        head_only=True,
        seed=options.seed + 1,
        out=options.out,
    )
    model.save(options.out)
    evaluate.report(options.out, train, held_out)


if __name__ == "__main__":
    main()
