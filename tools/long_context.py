#!/usr/bin/env python3
"""Does sharpening pay past the context a model was trained for?

    build/venv/bin/python tools/long_context.py --heads results/probe/smollm2.json

One text of 16,384 tokens (Python's own documentation, which every Python carries), in which pass keys of twelve people are
hidden, is read by SmolLM2, trained for 8,192, under several settings. What is kept of each, as soon as it is known, in
build/long-context: the loss of every token; and at 8,192, 12,288 and 16,384 tokens, whether the key of each person named
so far is recalled, the others' being distractors. Then results/probe/long-context.json, and a table.
"""

import argparse
import json
import pydoc_data.topics
import sys
from pathlib import Path

import numpy as np
import torch

import whet.transformers
from whet.probe.files import make_folder, read_json, write_json
from whet.probe.intervals import mean_interval, share_interval
from whet.probe.losses import by_layer, rules_of
from whet.probe.models import load

ROOT = Path(__file__).resolve().parents[1]
PLACES = (8192, 12288, 16384)  # tokens after which the keys are asked for
CHUNK = 1024
BLOCK = 256  # tokens whose mean loss is one sample
NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Henry", "Irene", "James", "Karin", "Louis")


def settings(loaded, heads):
    """Rules by layer, by name."""
    dispersing = np.zeros((loaded.layers, loaded.heads), bool)
    for head in heads:
        dispersing[head["layer"], head["head"]] = head["class"] == "dispersing"
    some = f"{dispersing.sum()} dispersing heads"
    return {
        "none": rules_of(loaded),
        "log-length:8192": rules_of(loaded, "log-length:8192"),
        "log-length:2048": rules_of(loaded, "log-length:2048"),
        f"log-length:512 in {some}": rules_of(loaded, "log-length:512", dispersing),
        f"paper in {some}": rules_of(loaded, "paper", dispersing),
        "paper in all heads": rules_of(loaded, "paper"),
    }


def reading(tokenizer, seed):
    """Tokens of the text with the keys in it, where each key ends, and the questions for them with their answers."""
    random = np.random.default_rng(seed)
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    start = int(random.integers(0, len(text) // 2))
    words = tokenizer(text[start:start + 8 * PLACES[-1]], add_special_tokens=False).input_ids
    keys = random.permutation(np.arange(10_000, 100_000))[:len(NAMES)]
    depths = np.sort(random.uniform(0.02, 0.98, len(NAMES)))
    tokens, ends = [], []
    for name, key, depth in zip(NAMES, keys, depths):
        tokens += words[len(tokens):int(depth * PLACES[-1])]
        tokens += tokenizer(f"\nThe pass key of {name} is {key}.\n", add_special_tokens=False).input_ids
        ends.append(len(tokens))
    tokens += words[len(tokens):PLACES[-1]]
    questions = [(tokenizer(f"\nWhat is the pass key of {name}? The pass key of {name} is",
                            add_special_tokens=False).input_ids,
                  tokenizer(f" {key}", add_special_tokens=False).input_ids) for name, key in zip(NAMES, keys)]
    return tokens[:PLACES[-1]], ends, questions


@torch.no_grad()
def read(model, tokens, ends, questions, what):
    """The loss of each token but the first; and at each place, by person, whether the key is recalled (None: not yet
    named)."""
    ids = torch.tensor([tokens])
    cache, losses, recalled = None, [], {}
    for start in range(0, len(tokens), CHUNK):
        step = model(ids[:, start:start + CHUNK], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        following = ids[0, start + 1:start + CHUNK + 1]
        losses.append(torch.nn.functional.cross_entropy(step.logits[0, :len(following)].float(), following,
                                                        reduction="none"))
        done = min(start + CHUNK, len(tokens))
        if done in PLACES:
            recalled[str(done)] = [_recalls(model, cache, *question) if end <= done else None
                                   for end, question in zip(ends, questions)]
        print(f"{what}: {done} tokens", file=sys.stderr, flush=True)
    return torch.cat(losses).tolist(), recalled


def _recalls(model, cache, question, answer):
    """Whether the most likely token is the right one all along the answer, each given those before it."""
    logits = model(torch.tensor([question + answer[:-1]]), past_key_values=cache, use_cache=True).logits
    cache.crop(-len(question) - len(answer) + 1)
    return logits[0, -len(answer):].argmax(-1).tolist() == answer


def summary(found):
    """By setting and stretch of the text: loss, its difference from none by blocks, recall at its end."""
    lines = []
    plain = [np.array(one["losses"]) for one in found["none"]]
    for name, pieces in found.items():
        for first, last in zip((0, *PLACES), PLACES):
            differences, losses, hits = [], [], []
            for none, piece in zip(plain, pieces):
                mine, theirs = (_blocks(values[first:last]) for values in (np.array(piece["losses"]), none))
                differences += list(mine - theirs)
                losses += list(mine)
                hits += [hit for hit in piece["recalled"][str(last)] if hit is not None]
            loss, change, recall = mean_interval(np.array(losses)), mean_interval(np.array(differences)), \
                share_interval(sum(hits), len(hits))
            lines.append({"setting": name, "from": first, "to": last, "loss": loss.mean, "difference": change.mean,
                          "low": change.low, "high": change.high, "recalled": sum(hits), "asked": len(hits),
                          "recall_low": recall.low, "recall_high": recall.high})
    return lines


def _blocks(values):
    return values[:len(values) // BLOCK * BLOCK].reshape(-1, BLOCK).mean(-1)


def table(lines):
    text = ["| setting | tokens | loss, nats | against none (95 %) | keys recalled (95 %) |", "|---|---|---:|---|---|"]
    for line in lines:
        text.append(f"| {line['setting']} | {line['from']:,} to {line['to']:,} | {line['loss']:.3f} | "
                    f"{line['difference']:+.3f} ({line['low']:+.3f} to {line['high']:+.3f}) | "
                    f"{line['recalled']} of {line['asked']} ({line['recall_low']:.2f} to {line['recall_high']:.2f}) |")
    return "\n".join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Path, required=True, metavar="FILE", help="results.json of whet probe")
    parser.add_argument("--texts", type=int, default=2, metavar="N", help="texts read under each setting (default 2)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/long-context", metavar="DIR")
    parser.add_argument("--out", type=Path, default=ROOT / "results/probe/long-context.json", metavar="FILE")
    options = parser.parse_args()
    loaded = load("smollm2")
    heads = json.loads(options.heads.read_text())["heads"]
    make_folder(options.folder)
    found = {}
    for seed in range(options.texts):
        tokens, ends, questions = reading(loaded.tokenizer, seed)
        for name, rules in settings(loaded, heads).items():
            path = options.folder / f"{seed}-{name.replace(' ', '-').replace(':', '-')}.json"
            piece = read_json(path)
            if piece is None:
                with whet.transformers.enable(loaded.model, rule=by_layer(rules)):
                    losses, recalled = read(loaded.model, tokens, ends, questions, f"text {seed}, {name}")
                piece = {"losses": losses, "recalled": recalled}
                write_json(path, piece)
            found.setdefault(name, []).append(piece)
    lines = summary(found)
    make_folder(options.out.parent)
    write_json(options.out, {"model": "smollm2", "context": loaded.context, "texts": options.texts, "block": BLOCK,
                             "settings": lines})
    print(table(lines))


if __name__ == "__main__":
    main()
