"""The evaluation of a checkpoint: losses, loss by position, acceptance of drafts, samples.

Acceptance is that of greedy decoding with windows of DEPTH drafts, as in an engine. A window starts at a confirmed
token, and its drafts are chained through the head. The drafts before the first wrong one are accepted, and the next
window starts after them. The backbone's greedy text does not depend on the drafts, so it is written first. The windows
are then evaluated on it. There are two figures for position j:

* cumulative: the share of all windows in which the first j drafts were right;
* conditional: the same share among the windows whose first j-1 drafts were right.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from mtp.builtin.training.data import Split
from mtp.builtin.training.loss import DEPTH
from mtp.builtin.training.model import MAX_POSITIONS, MtpModel

ROWS = 32  # a held-out estimate reads ROWS rows of text, and as many of conversations
PROMPTS, PROMPT, ANSWER = (
    256,
    128,
    128,
)  # acceptance: number of prompts, tokens of each, tokens written
WRITTEN_ROWS, WRITTEN_PROMPTS = 4096, (16, 64, 128, 256)  # rows written for each prompt length
LENGTH = 2048  # tokens of a row that a loss is averaged over
BUCKETS = (0, 64, 256, 512, 1024, 2048, 4096, MAX_POSITIONS)
SAMPLES = ("import os\n", "def fibonacci(n):\n", "class Stack:\n", ".. function:: open(file)\n\n")
QUESTIONS = (
    "Write the Python function `clamp`: Return x limited to the range low to high.",
    "Explain `os.path.join`.",
    "Hello",
)


def _rows(split: Split, length: int) -> tuple[Tensor, Tensor]:
    """Return the same rows at every call: evenly spread text, and conversations from evenly spread starts."""
    text, talk = split.text, split.chat
    device = text.tokens.device
    offsets = torch.linspace(0, len(text.tokens) - length, ROWS).long().to(device)
    starts = talk.starts[talk.starts <= len(talk.tokens) - length]
    picks = torch.linspace(0, len(starts) - 1, ROWS).long().to(device)
    return text.rows(offsets, length), talk.rows(starts[picks], length)


@torch.no_grad()
def losses(model: MtpModel, split: Split) -> dict[str, float]:
    """Return the mean cross-entropies on rows of 2048 tokens, and the share of equal choices of head and backbone.

    `chat` is measured on conversations, everything else on the text of the corpus. `agreement` estimates the acceptance
    on text as varied as people write it; the backbone's own greedy text repeats itself more.
    """
    training = model.training
    model.eval()
    text, talk = _rows(split, LENGTH + 1)
    with torch.autocast(text.device.type, torch.bfloat16):
        hidden = model(text[:, :-1])
        first, _ = model.chain(
            hidden, text, torch.zeros(8, dtype=torch.long, device=text.device), depth=1
        )
        equal = model.logits(first[:, :-1]).argmax(-1) == model.logits(hidden[:, 1:]).argmax(-1)
        values = {
            "agreement": float(equal.float().mean()),
            "backbone": _entropy(model, hidden, text[:, 1:]),
            "head": _entropy(model, first[:, :-1], text[:, 2:]),
            "chat": _entropy(model, model(talk[:, :-1]), talk[:, 1:]),
        }
    model.train(training)
    return {name: round(value, 4) for name, value in values.items()}


def _entropy(model: MtpModel, hidden: Tensor, targets: Tensor) -> float:
    return float(F.cross_entropy(model.logits(hidden).float().flatten(0, 1), targets.flatten()))


@torch.no_grad()
def loss_by_position(model: MtpModel, split: Split) -> dict[str, float]:
    """Return the mean loss in each bucket of positions, over stretches of MAX_POSITIONS tokens."""
    stream = split.text
    offsets = torch.arange(
        0, len(stream.tokens) - MAX_POSITIONS - 1, MAX_POSITIONS, device=stream.tokens.device
    )[:16]
    tokens = stream.rows(offsets, MAX_POSITIONS + 1)
    logits = model.logits(model(tokens[:, :-1]))
    each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(
        len(offsets), -1
    )
    pairs = itertools.pairwise(BUCKETS)
    return {f"{start}-{end}": round(float(each[:, start:end].mean()), 3) for start, end in pairs}


@torch.no_grad()
def write(model: MtpModel, prompts: Tensor, length: int) -> Tensor:
    """Continue prompts [B, P] greedily to [B, length]."""
    text, cache, fresh = prompts, None, prompts
    while text.shape[1] < length:
        out = model.backbone(input_ids=fresh, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        fresh = model.logits(out.last_hidden_state[:, -1:]).argmax(-1)
        text = torch.cat([text, fresh], dim=1)
    return text


def continuations(model: MtpModel, split: Split, length: int, seed: int) -> Tensor:
    """Return text [N, length] that the backbone writes after prompts of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat(
        [
            write(model, split.batch(WRITTEN_ROWS, size, generator), length)
            for size in WRITTEN_PROMPTS
        ]
    )


@torch.no_grad()
def right_drafts(model: MtpModel, text: Tensor, prompt: int) -> Tensor:
    """Return which drafts are right, [B, window starts, DEPTH], for greedy text [B, L] after `prompt` tokens."""
    starts = torch.arange(prompt - 1, text.shape[1] - DEPTH - 1, device=text.device)
    first, later = model.chain(model(text[:, :-1]), text, starts, DEPTH, greedy=True)
    drafts = torch.stack(
        [model.logits(out).argmax(-1) for out in (first[:, starts], *later)], dim=-1
    )
    truth = torch.stack([text[:, starts + 2 + step] for step in range(DEPTH)], dim=-1)
    return drafts == truth


def acceptance(model: MtpModel, prompts: Tensor) -> dict[str, Any]:
    """Return the acceptance by position and the tokens per window, over ANSWER tokens after each prompt of [B, P]."""
    size = prompts.shape[1]
    right = (
        right_drafts(model, write(model, prompts, size + ANSWER + DEPTH + 1), size)
        .cumprod(-1)
        .cpu()
    )
    counts, windows = torch.zeros(DEPTH), 0
    for row in right:
        at = 0
        while at < len(row):
            counts += row[at]
            windows += 1
            at += int(row[at].sum()) + 1
    before = torch.cat([torch.tensor([float(windows)]), counts[:-1]])
    return {
        "cumulative": [round(value, 3) for value in (counts / windows).tolist()],
        "conditional": [round(value, 3) for value in (counts / before).tolist()],
        "tokens_per_window": round(1 + float(counts.sum()) / windows, 3),
        "windows": windows,
    }


def samples(model: MtpModel, folder: Path) -> list[str]:
    """Return greedy text after a few prompts, plain and as questions."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=thinking,
        )
        for question in QUESTIONS
        for thinking in (False, True)
    ]
    device = next(model.parameters()).device
    texts = []
    for prompt in (*SAMPLES, *turns):
        ids = torch.tensor([tokenizer.encode(prompt)], device=device)
        texts.append(str(tokenizer.decode(write(model, ids, ids.shape[1] + 200)[0].tolist())))
    return texts


def report(folder: Path, train: Split, held_out: Split) -> dict[str, Any]:
    """Evaluate the checkpoint in `folder` as stored, in float32, and write evaluation.json there."""
    device = train.text.tokens.device
    torch.set_float32_matmul_precision("highest")
    model = MtpModel().to(device).eval()
    model.load(folder)
    found: dict[str, Any] = {"by_position": loss_by_position(model, held_out)}
    for name, split in (("held_out", held_out), ("seen", train)):
        generator = torch.Generator().manual_seed(1)
        last = len(split.text.tokens) - PROMPT
        text = split.text.rows(
            torch.randint(last, (PROMPTS,), generator=generator).to(device), PROMPT
        )
        starts = split.chat.starts[
            torch.randint(len(split.chat.starts) - 20, (PROMPTS,), generator=generator).to(device)
        ]
        found[name] = losses(model, split)
        found[name]["acceptance"] = acceptance(model, text)
        found[name]["acceptance_chat"] = acceptance(model, split.chat.rows(starts, PROMPT))
    found["samples"] = samples(model, folder)
    (folder / "evaluation.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=1), flush=True)
    return found
