#!/usr/bin/env bash
# The recipe of the head in heads/smollm2-135m-instruct-p-eagle: prompts -> answers -> head -> acceptance length.
#
#   recipes/smollm2-135m.sh
#   PROMPTS=my-prompts.jsonl OUT=runs/mine SECONDS_OF_TRAINING=300 recipes/smollm2-135m.sh
#
# Hardware: one NVIDIA H200 and, for --cache-features, 4.6 KB of GPU memory a token.
# Wall time: about 17 minutes, of which user turns 40 s, answers 320 s, training 610 s.
# Data of the shipped head: 94,472 documents, 26.4 M tokens, 64 % of them supervised. Its prompts were the user turns
#   drawn here and all 34,892 prompts that recipes/data/README.md describes; the default here is a sample of 2,400 of
#   them, so without PROMPTS the answers take less time and the head sees the same text more often.
# Acceptance length of the shipped head at K = 7, greedy: MT-Bench 3.23, HumanEval 3.90.
#
# A run that was interrupted goes on when the same command is given again.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PROMPTS=${PROMPTS:-$ROOT/recipes/data/train_prompts_sample.jsonl}
OUT=${OUT:-runs/smollm2-135m}
SECONDS_OF_TRAINING=${SECONDS_OF_TRAINING:-610}
PYTHON=${PYTHON:-$([ -x "$ROOT/.venv/bin/python" ] && echo "$ROOT/.venv/bin/python" || echo python3)}
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

peagle() { "$PYTHON" -m peagle "$@"; }

mkdir -p "$OUT"
if [ ! -e "$OUT/self_prompts.jsonl" ]; then
    peagle self-prompts smollm2-135m --out "$OUT/self_prompts.jsonl" --count 14000 \
        --temperature 1 --top-p 0.95 --max-tokens 160 --max-num-seqs 4096
fi

peagle prepare smollm2-135m --prompts "$PROMPTS" --prompts "$OUT/self_prompts.jsonl" --out "$OUT/data" \
    --temperatures 0,0.7 --max-tokens 256 --max-num-seqs 4096 --shard-size 50000

peagle train --recipe "$ROOT/recipes/smollm2-135m.toml" --data "$OUT/data" --out "$OUT/run" \
    --max-seconds "$SECONDS_OF_TRAINING"

"$PYTHON" -m benchmarks.acceptance --head "$OUT/run/head" --out "$OUT/acceptance-smollm2-135m.json"
